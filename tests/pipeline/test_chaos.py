"""Chaos mode: the plan follows its seed, and its faults reach real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cluster_workers import Adder

from roll_lite.config.schema.run import ChaosConfig
from roll_lite.distributed.cluster import ClusterSpec, RankFailed, start_cluster
from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.rank_group import WATCH
from roll_lite.pipeline import chaos as module
from roll_lite.pipeline.chaos import Chaos, faults, strike

strike_here: Any = strike._function  # type: ignore[attr-defined]


@pytest.fixture
def processes() -> Iterator[list[psutil.Process]]:
    """One with a child."""
    code = "import subprocess; subprocess.run(['sleep', '100'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        parent = psutil.Process(process.pid)
        while not (children := parent.children()):
            time.sleep(0.01)
        yield [parent, *children]
        for one in [*children, parent]:
            with suppress(psutil.Error):
                one.kill()


@pytest.mark.parametrize(("draw", "victim"), [(0.1, 0), (0.9, 1)])
def test_a_process_or_one_that_it_started_is_struck(processes: list[psutil.Process], draw: float, victim: int) -> None:
    strike_here(Place("node", processes[0].pid), "stop", draw, 0.0)
    deadline = time.monotonic() + 10
    while processes[victim].status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    assert processes[1 - victim].status() != psutil.STATUS_STOPPED
    processes[victim].resume()
    before = time.monotonic()
    strike_here(Place("node", processes[0].pid), "slow", draw, 0.5)
    assert time.monotonic() - before >= 0.5
    while processes[victim].status() == psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "it runs on afterwards"
    strike_here(Place("node", processes[0].pid), "kill", draw, 0.0)
    assert processes[victim].wait(10) is not None or not processes[victim].is_running()
    strike_here(Place("node", 2**22 + 1), "kill", draw, 0.0)  # it has ended


def test_the_plan_follows_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, struck = 0.0, list[Any]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    agent = SimpleNamespace(options=lambda scheduling_strategy: SimpleNamespace(remote=lambda *what: struck.append(what)))
    monkeypatch.setattr(module, "strike", agent)
    names = {"actor_infer": 2, "actor_train": 1, "judges.main": 1, "replay": 1}
    groups = [
        SimpleNamespace(
            name=name,
            started=True,
            lost={1: "dead"} if name == "actor_infer" else {},
            pulses=[SimpleNamespace(place=Place("ab" * 28, rank)) for rank in range(ranks)],
        )
        for name, ranks in names.items()
    ]
    monkeypatch.setattr(module.WATCH, "groups", groups)

    def plan(**settings: Any) -> list[str]:
        nonlocal now
        now, said = 0.0, list[str]()
        chaos = Chaos(ChaosConfig(every_s=10.0, **settings), said.append)
        for second in range(1000):
            now = float(second)
            chaos.tick()
        return said

    first = plan(targets=["actor_infer", "actor_train", "judges"], actions={"kill": 1.0, "slow": 1.0})
    assert 60 < len(first) < 140 and first == plan(targets=["actor_infer", "actor_train", "judges"], actions={"kill": 1.0, "slow": 1.0})
    assert {line.split(",")[0] for line in first} == {
        f"chaos: {action} of {role} rank 0" for action in ("kill", "slow") for role in ("actor_infer", "actor_train", "judges.main")
    }
    assert plan(targets=["critic"]) == [] and len(plan(most=3)) == 3
    assert plan(seed=1) != plan(seed=0)


def test_a_rank_is_killed_while_the_driver_waits(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(1)), Adder)
    cluster.all(Adder.place)
    said: list[str] = []
    with (
        faults(ChaosConfig(every_s=0.5, most=1), said.append),
        pytest.raises(RankFailed, match="actor_train rank 0 failed in sleep: its process"),
    ):
        cluster.all(Adder.sleep, 60.0)
    assert len(said) == 1 and "chaos" not in WATCH.errands
