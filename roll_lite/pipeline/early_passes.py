from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll_lite.data.proto import DataProto
from roll_lite.distributed.cluster import Cluster, Pending, gather
from roll_lite.distributed.dataflow import Batch, Block
from roll_lite.pipeline.clusters import Model
from roll_lite.pipeline.journal import Journal
from roll_lite.scheduler.supply import least_early
from roll_lite.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class EarlyPass:
    rows: DataProto
    passes: list[Pending[list[Block | None]]]


class EarlyPasses:
    """Computes log-probs and values of finished groups while others are generated (`rollout.stream_log_probs`). Results of samples that
    miss the batch are dropped."""

    def __init__(self, models: Sequence[tuple[Model[Any], Sequence[str]]], prompts_per_step: int, journal: Journal) -> None:
        self._models = models
        self._least = least_early(prompts_per_step)
        self._journal = journal
        self._asked: Pending[tuple[DataProto, Block]] | None = None
        self._parts: list[EarlyPass] = []

    def join(self, batch: Batch) -> None:
        if not self._models:
            return
        number = dict(zip(_names(batch.rows), batch.rows.tensor("sample").tolist(), strict=True))
        joined = 0
        for part in self._parts:
            names = {own: name for own, name in zip(part.rows.tensor("sample").tolist(), _names(part.rows), strict=True) if name in number}
            numbers = {own: number[name] for own, name in names.items()}
            batch.add(block.renumbered(numbers) for blocks in gather(*part.passes) for block in blocks if block is not None)
            joined += sum(branch == 0 for *_, branch in names.values())
        self._journal.early(joined)
        self.forget()

    def poll(self, rollouts: Cluster[RolloutWorker]) -> None:
        """Start the next forward passes if enough groups have finished. Non-blocking; call about once a second."""
        is_idle = all(running.answer() is not None for part in self._parts[-1:] for running in part.passes)
        if not self._models or not is_idle:
            return
        if self._asked is None:
            known = {group for part in self._parts for group in part.rows.tensor("group").tolist()}
            self._asked = rollouts.start_one(RolloutWorker.finished, known, self._least)
        elif (finished := self._asked.answer()) is not None:
            self._asked = None
            rows, tokens = finished
            if len(rows) > 0:
                batch = Batch(rows, [tokens])
                self._parts.append(EarlyPass(rows, [model.start_forward(batch, columns) for model, columns in self._models]))

    def forget(self) -> None:
        """Drop all passes: their batch is complete, or their ranks were lost."""
        for running in [running for part in self._parts for running in part.passes]:
            running.settle()
        if self._asked is not None:
            self._asked.settle()
        self._parts, self._asked = [], None


def _names(rows: DataProto) -> list[tuple[int, int, int]]:
    """Return each row's (group, index in the group, branch), which identify it in parts and in the whole batch; sample numbers differ."""
    branches = rows.tensor("branch").tolist() if "branch" in rows else [0] * len(rows)
    return list(zip(rows.tensor("group").tolist(), rows.tensor("index").tolist(), branches, strict=True))
