"""Passes of a train strategy whose micro-batches hold a given number of rows, or are cut by a planner."""

from __future__ import annotations

from collections.abc import Sequence

from roll_lite.data.microbatch import MicroBatchPlanner, RowsAtATime
from roll_lite.data.proto import DataProto
from roll_lite.distributed.strategy.base import ForwardStrategy, LossFn, TrainResult, TrainStrategy

Cut = int | MicroBatchPlanner


def planner_of(size: Cut) -> MicroBatchPlanner:
    return RowsAtATime(size) if isinstance(size, int) else size


def forward(strategy: ForwardStrategy, batch: DataProto, outputs: Sequence[str], size: Cut) -> DataProto | None:
    return strategy.forward(batch, outputs, strategy.plan(batch.lengths, planner_of(size)))


def train_step(strategy: TrainStrategy, batch: DataProto, loss_fn: LossFn, outputs: Sequence[str], size: Cut) -> TrainResult:
    return strategy.train_step(batch, loss_fn, outputs, strategy.plan(batch.lengths, planner_of(size)))
