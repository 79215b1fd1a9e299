"""Write ledger.jsonl: what happened to every prompt, sample and update (docs/ledger.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll_lite.algorithms.rewards import Masked
from roll_lite.config.arithmetic import group_size, trains
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.proto import DataProto
from roll_lite.files import flush
from roll_lite.observability.run_folder import continues_in_folder
from roll_lite.pipeline.checkpoint_files import resumption
from roll_lite.scheduler.supply import pacing_of
from roll_lite.workers.model import Update

LEDGER_FILE = "ledger.jsonl"


class Ledger:
    """Appends whole lines; only a kill can cut one short."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._config = config
        self._path = folder / LEDGER_FILE
        self._first = 0

    def append(self, lines: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(lines)

    def write(self, event: str, **facts: Any) -> None:
        self.append(json.dumps({"event": event, **facts}).encode() + b"\n")

    def start(self, step: int, version: int, again: bool = False) -> None:
        """Record a start or resumption after `step`. `again`: this process went back to `step`; its lines of later steps are void."""
        self._first = self._first if again else step
        config, source = self._config, self._config.checkpoint.source
        with self._path.open("ab+") as file:
            if file.tell() and (file.seek(-1, 2), file.read())[1] != b"\n":
                file.write(b"\n")  # an earlier process was killed in the middle of a line
        resumed_from: str | None = None
        if step > self._first or (source is not None and continues_in_folder(config, self._path.parent)):
            resumed_from = "."  # the run continues in its own folder
        elif source is not None:
            resumed_from = str(resumption(source).checkpoint.resolve().parent.parent)
        self.write(
            "start",
            resumed_from=resumed_from,
            step=step,
            version=version,
            trains=trains(config),
            replays=config.replay.path is not None,
            max_staleness=pacing_of(config.rollout).supply.max_staleness,
            ppo_epochs=config.algorithm.ppo_epochs,
            short_batches=config.rollout.filter is not None and config.rollout.filter.when_short == "continue",
            domains={
                name: {"share": one.share, "least": one.min_prompts, "samples": group_size(config, one)}
                for name, one in config.domains.items()
            },
        )

    def step(self, step: int, version: int) -> None:
        self.write("step", step=step, version=version)
        flush([self._path])

    def masked(self, step: int, rows: DataProto, masked: Masked) -> None:
        weightless = masked.weights.numpy() == 0
        if weightless.any():
            causes = {cause: _names(rows, np.flatnonzero(of.numpy() & weightless)) for cause, of in masked.causes.items() if of.any()}
            self.write("masked", step=step, samples=causes)

    def updates(
        self, step: int, rows: DataProto, mini_batches: Sequence[MiniBatch], updates: Mapping[str, Sequence[Sequence[Update]]]
    ) -> None:
        """Record each mini-batch's samples and its outcome by role: trained, skipped (not finite) or stopped (training ended early)."""
        place = np.zeros(int(rows.tensor("sample").max()) + 1, dtype=np.int64)
        place[rows.tensor("sample").numpy()] = np.arange(len(rows))
        for number, mini_batch in enumerate(mini_batches):
            done = {}
            for role, ranks in updates.items():
                is_done = number < len(ranks[0])
                done[role] = "stopped" if not is_done else "skipped" if ranks[0][number].result.skipped else "trained"
            names = _names(rows, place[mini_batch.samples])
            self.write("update", step=step, update=number + 1, epoch=mini_batch.epoch + 1, roles=done, samples=names)


def _names(rows: DataProto, places: np.ndarray) -> dict[int, list[int]]:
    groups, indices = rows.tensor("group").numpy()[places].tolist(), rows.tensor("index").numpy()[places].tolist()
    names: dict[int, dict[int, None]] = {}
    for group, index in zip(groups, indices, strict=True):
        names.setdefault(group, {})[index] = None  # once for all rows of a sample
    return {group: list(of_group) for group, of_group in names.items()}
