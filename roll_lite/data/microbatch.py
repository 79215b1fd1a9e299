"""Micro-batches: which rows pass through the model together, and the one place where ragged rows become padded tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.proto import VECTORS, DataProto
from roll_lite.data.ragged import Ragged


@dataclass(frozen=True)
class MicroBatch:
    """A padded slice of a batch. Token columns are [B, T], transition columns [B, T-1] ([B, T-1, k] for vectors), row columns [B]."""

    columns: Mapping[str, torch.Tensor]
    mask: torch.Tensor
    """[B, T-1] bool: response_mask shifted, the transitions that count."""


@dataclass(frozen=True)
class MicroBatchOutputs:
    """What the model says of a micro-batch, [B, T-1] float32 where nothing else is said."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    distribution: torch.Tensor | None = None
    """[B, T-1, V] log-probs of the whole vocabulary."""
    final_value: torch.Tensor | None = None
    """[B] value of the end of the row."""


# ---------------------------------------------------------------- planning


@dataclass(frozen=True)
class Multiples:
    """What a parallel layout asks of every plan."""

    width: int = 1
    """Tokens of a padded row are a multiple of this: sequence parallelism cuts them into equal parts."""
    count: int = 1
    """Micro-batches of a pass are a multiple of this: interleaved pipeline stages take turns over groups of them."""


class MicroBatchPlanner(Protocol):
    """Decides which rows of a batch go together."""

    def cut(self, lengths: torch.Tensor) -> list[np.ndarray]:
        """`lengths` [rows] tokens. Row numbers of each micro-batch, every row in exactly one of them."""


@dataclass(frozen=True)
class RowsAtATime:
    """A fixed number of rows, in the order of the batch."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a micro-batch of {self.size} rows: it needs at least one")

    def cut(self, lengths: torch.Tensor) -> list[np.ndarray]:
        rows = np.arange(len(lengths))
        return [rows[start : start + self.size] for start in range(0, len(rows), self.size)]


@dataclass(frozen=True)
class MicroBatchPlan:
    """One pass of a rank over its rows, forward or training: what a strategy is given beside the batch."""

    parts: tuple[np.ndarray, ...]
    """Row numbers of each micro-batch."""
    count: int
    """Micro-batches that this rank runs, at least one. Those beyond `parts` have no rows: they keep step with ranks that have more."""
    width_multiple: int = 1
    """Tokens of a padded row are a multiple of this."""

    @staticmethod
    def of(
        lengths: torch.Tensor,
        planner: MicroBatchPlanner,
        multiples: Multiples = Multiples(),
        agree: Callable[[int], int] | None = None,
    ) -> MicroBatchPlan:
        """`agree`: from this rank's number of micro-batches to the largest among the ranks that have to run equally many; collective."""
        parts = tuple(planner.cut(lengths))
        rows = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        assert np.array_equal(np.sort(rows), np.arange(len(lengths))), f"{planner} does not cut {len(lengths)} rows into parts once each"
        count = max(agree(len(parts)) if agree else len(parts), 1)
        return MicroBatchPlan(parts, -(-count // multiples.count) * multiples.count, multiples.width)

    @property
    def rows(self) -> int:
        return sum(map(len, self.parts))

    def micro_batches(self, batch: DataProto) -> list[MicroBatch]:
        """`count` of them; those without rows come last."""
        if len(batch) != self.rows:
            raise ValueError(f"a plan for {self.rows} rows was given a batch of {len(batch)}")
        nothing = [padded(batch.slice(0, 0), self.width_multiple)] * (self.count - len(self.parts))
        return [padded(batch.take(rows), self.width_multiple) for rows in self.parts] + nothing

    def lengths(self, batch: DataProto) -> list[torch.Tensor]:
        """Tokens of the rows of each micro-batch."""
        return [batch.lengths[rows] for rows in self.parts] + [batch.lengths[:0]] * (self.count - len(self.parts))

    def collect_transitions(self, outputs: Sequence[torch.Tensor], batch: DataProto) -> Ragged:
        """Outputs [B, T-1, ...] of the micro-batches as one column of the batch, on the host and without a graph."""
        with_rows = self._with_rows(outputs)
        if not with_rows:
            return Ragged.from_rows([], torch.float32)
        parts = zip(with_rows, self.lengths(batch), strict=False)
        joined = Ragged.concat([Ragged.from_padded(_on_host(output), lengths - 1) for output, lengths in parts])
        return joined if self._order is None else joined.take(self._order)

    def collect_rows(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Outputs [B] of the micro-batches as one column of the batch, on the host and without a graph."""
        joined = torch.cat([torch.empty(0), *map(_on_host, self._with_rows(outputs))])
        return joined if self._order is None else joined[self._order]

    def _with_rows(self, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(outputs) != self.count:
            raise ValueError(f"{len(outputs)} outputs for a plan of {self.count} micro-batches")
        return outputs[: len(self.parts)]

    @property
    def _order(self) -> torch.Tensor | None:
        """From the order of the micro-batches to that of the batch; None where they are the same."""
        planned = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *self.parts]))
        return None if bool((planned[1:] > planned[:-1]).all()) else torch.argsort(planned)


# ---------------------------------------------------------------- padding


def padded(rows: DataProto, width_multiple: int = 1) -> MicroBatch:
    """The rows side by side, as long as the longest of them rounded up to `width_multiple`.

    input_ids are padded with 0, kept_ids with -1, everything else with 0; OBJECT columns stay behind. Without a response_mask every
    transition between real tokens counts. Without rows there is room for one transition, so that losses find the shapes they expect.
    """
    lengths = rows.lengths
    longest = int(lengths.max()) if len(rows) else 2
    width = -(-longest // width_multiple) * width_multiple
    columns: dict[str, torch.Tensor] = {}
    for name, column in rows.columns.items():
        if isinstance(column, Ragged):
            shorter = 1 if KEYS[name].kind is Kind.TRANSITIONS else 0
            columns[name] = column.to_padded(VECTORS.get(name, 0), width - shorter)
            if name in VECTORS and columns[name].dim() == 2:  # without entries nothing says how long the vectors are
                columns[name] = columns[name].unsqueeze(-1)
        elif isinstance(column, torch.Tensor):
            columns[name] = column
    real = torch.arange(1, width) < lengths[:, None]
    return MicroBatch(columns, columns["response_mask"][:, 1:] & real if "response_mask" in columns else real)


def _on_host(output: torch.Tensor) -> torch.Tensor:
    return output.detach().to("cpu", torch.float32)
