"""Micro-batches: rows that pass through the model together. Losses see them padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
import torch

from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.minibatches import balanced_partition, row_costs
from roll_lite.data.proto import VECTORS, DataProto
from roll_lite.data.ragged import Ragged


@dataclass(frozen=True)
class MicroBatch:
    """Padded slice of a batch: token columns [B, T], transition columns [B, T-1] (vectors [B, T-1, k]), row columns [B]."""

    columns: Mapping[str, torch.Tensor]
    mask: torch.Tensor
    """[B, T-1] bool: transitions that count, which are response_mask shifted by one."""


@dataclass(frozen=True)
class MicroBatchOutputs:
    """Model outputs, [B, T-1] float32 unless noted."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    distribution: torch.Tensor | None = None
    """[B, T-1, V] log-probs of the vocabulary."""
    final_value: torch.Tensor | None = None
    """[B]: value after the last token."""


# ---------------------------------------------------------------- planning


@dataclass(frozen=True)
class Multiples:
    tokens: int = 1
    """Micro-batches are padded to a multiple of this many tokens, for sequence and context parallelism."""
    count: int = 1
    """The number of micro-batches per pass is a multiple of this: interleaved pipeline stages switch model chunks after as many."""


class MicroBatchPlanner(Protocol):
    def cut(self, lengths: torch.Tensor, parts: int = 1) -> list[np.ndarray]:
        """Return row numbers of each micro-batch; every row is in exactly one. `lengths` [rows]: tokens. `parts`: number of
        micro-batches that other ranks run; this rank runs as many, and may spread its rows over them."""


@dataclass(frozen=True)
class RowsAtATime:
    """Fixed number of rows in batch order."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a micro-batch of {self.size} rows: it needs at least one")

    def cut(self, lengths: torch.Tensor, parts: int = 1) -> list[np.ndarray]:
        rows = np.arange(len(lengths))
        return [rows[start : start + self.size] for start in range(0, len(rows), self.size)]


@dataclass(frozen=True)
class TokenBudget:
    """Fewest micro-batches of at most `tokens` tokens and about equal cost, so that pipeline stages and ranks do not wait for each
    other. A longer row gets its own. Rows are sorted, longest first."""

    tokens: int
    rows: int | None = None
    attention_par: float = inf
    with_padding: bool = False
    """True if padding counts as tokens, as it must for padded outputs with many numbers per token."""

    def cut(self, lengths: torch.Tensor, parts: int = 1) -> list[np.ndarray]:
        tokens = lengths.numpy()
        costs = row_costs(tokens, self.attention_par)
        fewest = -(-int(tokens.clip(max=self.tokens).sum()) // self.tokens)
        no_two = int((2 * tokens > self.tokens).sum())
        count = max(parts, fewest, no_two, -(-len(tokens) // self.rows) if self.rows else 1, 1)
        found = balanced_partition(costs, count, self.rows)
        while not all(self._fits(tokens[part]) for part in found):
            found = balanced_partition(costs, len(found) + 1, self.rows)
        return [part[np.argsort(-tokens[part], kind="stable")] for part in found if len(part)]

    def _fits(self, tokens: np.ndarray) -> bool:
        return len(tokens) <= 1 or (len(tokens) * tokens.max() if self.with_padding else tokens.sum()) <= self.tokens


@dataclass(frozen=True)
class PaddedBudget:
    """Micro-batches for models that pad: rows of similar length, as many as fit into `tokens` with padding. A longer row gets its own."""

    tokens: int
    rows: int | None = None

    def cut(self, lengths: torch.Tensor, parts: int = 1) -> list[np.ndarray]:
        tokens = lengths.numpy()
        found: list[list[int]] = []
        for row in np.argsort(-tokens, kind="stable").tolist():
            if not found or len(found[-1]) == self.rows or (len(found[-1]) + 1) * tokens[found[-1][0]] > self.tokens:
                found.append([])
            found[-1].append(row)
        return [np.array(part, dtype=np.int64) for part in found]


@dataclass(frozen=True)
class MicroBatchPlan:
    """Micro-batches of a rank's pass over its rows."""

    parts: tuple[np.ndarray, ...]
    count: int
    """Number of micro-batches that this rank runs, at least 1. Those beyond `parts` are empty: other ranks run as many."""
    token_multiple: int = 1

    @staticmethod
    def of(
        lengths: torch.Tensor,
        planner: MicroBatchPlanner,
        multiples: Multiples = Multiples(),
        agree: Callable[[int], int] | None = None,
    ) -> MicroBatchPlan:
        """`agree`: collective that returns the largest number of micro-batches among ranks that must run equally many."""
        parts = planner.cut(lengths)
        most = max(agree(len(parts)) if agree else len(parts), 1)
        count = -(-most // multiples.count) * multiples.count
        if count > len(parts) and len(spread := planner.cut(lengths, count)) <= count:
            parts = spread
        rows = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        assert np.array_equal(np.sort(rows), np.arange(len(lengths))), f"{planner} does not cut {len(lengths)} rows into parts once each"
        return MicroBatchPlan(tuple(parts), count, multiples.tokens)

    @property
    def rows(self) -> int:
        return sum(map(len, self.parts))

    def cut(self, batch: DataProto) -> list[DataProto]:
        """Cut into `count` parts; empty ones come last."""
        if len(batch) != self.rows:
            raise ValueError(f"a plan for {self.rows} rows was given a batch of {len(batch)}")
        return [batch.take(rows) for rows in self.parts] + [batch.slice(0, 0)] * (self.count - len(self.parts))

    def lengths(self, batch: DataProto) -> list[torch.Tensor]:
        return [batch.lengths[rows] for rows in self.parts] + [batch.lengths[:0]] * (self.count - len(self.parts))

    def collect_transitions(self, outputs: Sequence[torch.Tensor], batch: DataProto) -> Ragged:
        """Join outputs [B, T-1, ...] to a column, on the host and detached."""
        with_rows = self._with_rows(outputs)
        if not with_rows:
            return Ragged.from_rows([], torch.float32)
        parts = zip(with_rows, self.lengths(batch), strict=False)
        joined = Ragged.concat([Ragged.from_padded(_on_host(output), lengths - 1) for output, lengths in parts])
        return joined if self._order is None else joined.take(self._order)

    def collect_tokens(self, outputs: Sequence[torch.Tensor], batch: DataProto) -> Ragged:
        """Join outputs to a column in the batch's order. Each output is [tokens, ...]: a micro-batch's rows one after another, then
        padding, which is dropped."""
        with_rows = self._with_rows(outputs)
        if not with_rows:
            return Ragged.from_rows([], outputs[0].dtype)
        parts = [
            Ragged.from_rows(output[: int(lengths.sum())].split(lengths.tolist()))
            for output, lengths in zip(with_rows, self.lengths(batch), strict=False)
        ]
        joined = Ragged.concat(parts)
        return joined if self._order is None else joined.take(self._order)

    def collect_rows(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join outputs [B] to a column, on the host and detached."""
        joined = torch.cat([torch.empty(0), *map(_on_host, self._with_rows(outputs))])
        return joined if self._order is None else joined[self._order]

    def _with_rows(self, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(outputs) != self.count:
            raise ValueError(f"{len(outputs)} outputs for a plan of {self.count} micro-batches")
        return outputs[: len(self.parts)]

    @property
    def _order(self) -> torch.Tensor | None:
        """Index that restores the batch's row order; None if micro-batches keep it."""
        planned = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *self.parts]))
        return None if bool((planned[1:] > planned[:-1]).all()) else torch.argsort(planned)


# ---------------------------------------------------------------- padding


def padded(rows: DataProto) -> MicroBatch:
    """Pad rows to the longest, with the column's value in VECTORS or 0. Drops OBJECT columns. Without a response_mask every real
    transition counts. Without rows the width is one transition, for losses."""
    lengths = rows.lengths
    width = int(lengths.max()) if len(rows) else 2
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
