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
    """Padded rows: token columns [B, T], transition columns (one entry per predicted token) [B, T-1] or [B, T-1, k], row columns [B]."""

    columns: Mapping[str, torch.Tensor]
    mask: torch.Tensor
    """[B, T-1] bool: predicted tokens that count in the loss."""


@dataclass(frozen=True)
class MicroBatchOutputs:
    """Outputs of the model; [B, T-1] float32 unless noted."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    distribution: torch.Tensor | None = None
    """[B, T-1, V]: log-probs of the whole vocabulary."""
    final_value: torch.Tensor | None = None
    """[B]: the critic's value after the last token."""


# ---------------------------------------------------------------- planning


@dataclass(frozen=True)
class Multiples:
    tokens: int = 1
    """Divisor of a micro-batch's token count, reached by padding; for sequence and context parallelism."""
    count: int = 1
    """Divisor of the number of micro-batches: interleaved pipeline stages process this many at a time per model chunk."""


class MicroBatchPlanner(Protocol):
    def cut(self, lengths: torch.Tensor, parts: int = 1) -> list[np.ndarray]:
        """Return each micro-batch's row numbers. `lengths` [rows]: tokens per row. `parts`: number of micro-batches that other ranks or
        `Multiples.count` require; if fewer are returned, the caller adds empty ones."""


@dataclass(frozen=True)
class RowsAtATime:
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a micro-batch of {self.size} rows: it needs at least one")

    def cut(self, lengths: torch.Tensor, parts: int = 1) -> list[np.ndarray]:
        rows = np.arange(len(lengths))
        return [rows[start : start + self.size] for start in range(0, len(rows), self.size)]


@dataclass(frozen=True)
class TokenBudget:
    """Plans few micro-batches of about equal cost, so that ranks wait little. Each has at most `tokens` tokens, or one row."""

    tokens: int
    rows: int | None = None
    attention_parity_tokens: float = inf
    with_padding: bool = False
    """Count padding as tokens. Needed for large padded outputs, such as log-probs of the whole vocabulary."""

    def cut(self, lengths: torch.Tensor, parts: int = 1) -> list[np.ndarray]:
        tokens = lengths.numpy()
        costs = row_costs(tokens, self.attention_parity_tokens)
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
    """Groups rows of similar length into micro-batches of at most `tokens` tokens, padding included, or of a single row."""

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
    parts: tuple[np.ndarray, ...]
    count: int
    """Number of micro-batches that this rank runs, at least 1; those beyond `parts` are empty."""
    tokens_divisor: int = 1

    @staticmethod
    def of(
        lengths: torch.Tensor,
        planner: MicroBatchPlanner,
        multiples: Multiples = Multiples(),
        agree: Callable[[int], int] | None = None,
    ) -> MicroBatchPlan:
        """Plan rows of these lengths. `agree` returns a number's maximum over the ranks that must run equally many micro-batches."""
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
        if len(batch) != self.rows:
            raise ValueError(f"a plan for {self.rows} rows was given a batch of {len(batch)}")
        return [batch.take(rows) for rows in self.parts] + [batch.slice(0, 0)] * (self.count - len(self.parts))

    def lengths(self, batch: DataProto) -> list[torch.Tensor]:
        return [batch.lengths[rows] for rows in self.parts] + [batch.lengths[:0]] * (self.count - len(self.parts))

    def collect_transitions(self, outputs: Sequence[torch.Tensor], batch: DataProto) -> Ragged:
        """Join the micro-batches' outputs [B, T-1, ...] into a host-memory column in batch order."""
        with_rows = self._with_rows(outputs)
        if not with_rows:
            return Ragged.from_rows([], torch.float32)
        parts = zip(with_rows, self.lengths(batch), strict=False)
        joined = Ragged.concat([Ragged.from_padded(_on_host(output), lengths - 1) for output, lengths in parts])
        return joined if self._order is None else joined.take(self._order)

    def collect_tokens(self, outputs: Sequence[torch.Tensor], batch: DataProto) -> Ragged:
        """Join the micro-batches' packed outputs [tokens, ...] into a column in batch order, without the padding at the end."""
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
        joined = torch.cat([torch.empty(0), *map(_on_host, self._with_rows(outputs))])
        return joined if self._order is None else joined[self._order]

    def _with_rows(self, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(outputs) != self.count:
            raise ValueError(f"{len(outputs)} outputs for a plan of {self.count} micro-batches")
        return outputs[: len(self.parts)]

    @property
    def _order(self) -> torch.Tensor | None:
        """Index that restores batch order; None if the rows are in order."""
        planned = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *self.parts]))
        return None if bool((planned[1:] > planned[:-1]).all()) else torch.argsort(planned)


# ---------------------------------------------------------------- padding


def padded(rows: DataProto) -> MicroBatch:
    """Pad rows to the longest, with 0 or the column's value in VECTORS; drop object columns. Without a response_mask, all predicted tokens
    count in the loss. Empty batches get T = 2, so that losses work on them."""
    lengths = rows.lengths
    width = int(lengths.max()) if len(rows) else 2
    columns: dict[str, torch.Tensor] = {}
    for name, column in rows.columns.items():
        if isinstance(column, Ragged):
            shorter = 1 if KEYS[name].kind is Kind.TRANSITIONS else 0
            columns[name] = column.to_padded(VECTORS.get(name, 0), width - shorter)
            if name in VECTORS and columns[name].dim() == 2:  # without entries the length of the vectors is unknown
                columns[name] = columns[name].unsqueeze(-1)
        elif isinstance(column, torch.Tensor):
            columns[name] = column
    real = torch.arange(1, width) < lengths[:, None]
    return MicroBatch(columns, columns["response_mask"][:, 1:] & real if "response_mask" in columns else real)


def _on_host(output: torch.Tensor) -> torch.Tensor:
    return output.detach().to("cpu", torch.float32)
