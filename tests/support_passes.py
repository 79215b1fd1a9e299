"""Passes of a train strategy whose micro-batches hold a given number of rows, as a worker plans them."""

from __future__ import annotations

from collections.abc import Sequence

from roll_lite.data.microbatch import RowsAtATime
from roll_lite.data.proto import DataProto
from roll_lite.distributed.strategy.base import ForwardStrategy, LossFn, TrainResult, TrainStrategy


def forward(strategy: ForwardStrategy, batch: DataProto, outputs: Sequence[str], size: int) -> DataProto | None:
    return strategy.forward(batch, outputs, strategy.plan(batch.lengths, RowsAtATime(size)))


def train_step(strategy: TrainStrategy, batch: DataProto, loss_fn: LossFn, outputs: Sequence[str], size: int) -> TrainResult:
    return strategy.train_step(batch, loss_fn, outputs, strategy.plan(batch.lengths, RowsAtATime(size)))
