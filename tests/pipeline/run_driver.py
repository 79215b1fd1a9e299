"""A run for the tests of its end: everything is real but the pipeline, which is a worker that sleeps, or lines on standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cluster_workers import Adder

from roll_lite.config.loading import load_config
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.placement import anywhere
from roll_lite.pipeline import run as module

LINES = 2000
"""More than a pipe holds."""


def sleeping(config: RunConfig, folder: Path, session: Any, journal: Any) -> Any:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(1), log_folder=session.log_folder), Adder)
    cluster.one(Adder.place)
    journal.console.message("ready")
    return SimpleNamespace(run=lambda: cluster.all(Adder.sleep, 1000.0), close=lambda: None)


def talking(config: RunConfig, folder: Path, session: Any, journal: Any) -> Any:
    def run() -> None:
        for line in range(LINES):
            journal.console.message(f"line {line} {'x' * 200}")

    return SimpleNamespace(run=run, close=lambda: None)


def waiting(config: RunConfig, folder: Path, session: Any, journal: Any) -> Any:
    def run() -> None:
        while True:  # as the driver does in its calls into Ray: another thread may be the one that gets a signal
            time.sleep(0.2)

    journal.console.message("ready")
    return SimpleNamespace(run=run, close=lambda: None)


def stepping(config: RunConfig, folder: Path, session: Any, journal: Any) -> Any:
    def run() -> None:
        with journal.step(1):
            pass
        waiting(config, folder, session, journal).run()

    return SimpleNamespace(run=run, close=lambda: None)


def filling(config: RunConfig, folder: Path, session: Any, journal: Any) -> Any:
    def run() -> None:
        with (folder / "model.safetensors").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    journal.console.message("ready")
    return SimpleNamespace(run=run, close=lambda: None)


@contextmanager
def no_session(*_: Any) -> Iterator[Any]:
    yield SimpleNamespace(log_folder=None, started=True)


def main() -> None:
    how, run_dir, *overrides = sys.argv[1:]
    config = load_config("tiny_grpo", Path("examples/configs"), [f"run_dir={run_dir}", *overrides])
    builds = {"sleeping": sleeping, "talking": talking, "waiting": waiting, "stepping": stepping, "filling": filling}
    module.build = builds[how]  # type: ignore[assignment]
    if how != "sleeping":
        module.ray_session = no_session  # type: ignore[assignment]
    sys.exit(module.run(config))


main()
