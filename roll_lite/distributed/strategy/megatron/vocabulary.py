"""Logits of a vocabulary that is spread over tensor-parallel ranks: this rank's columns, and which of them take part in the softmax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 1 << 24
"""Logits that are held in float32 at a time (64 MiB a copy)."""

DROPPED = -1e4
"""Log-prob of a token that truncated sampling could not choose. Its exp is exactly 0, in float64 too, so that p log p and its gradient
are 0; and it is finite, so that differences and squares of two of them are no NaN, which they would be with -inf."""


class Vocabulary:
    """logits [N, V/tp] are this rank's columns (all where group is None), of which only the first vocab_size over all ranks are words.

    temperatures [N] float32: what a row's logits are divided by.
    kept [N, K]: the tokens that a row's softmax goes over, beside its target; -1 pads, a row of -1 alone and kept None mean all.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        kept: torch.Tensor | None,
    ) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.start = logits.shape[1] * (self.group.rank() if self.group is not None else 0)
        self.size = min(max(vocab_size - self.start, 0), logits.shape[1])
        self.words = logits[:, : self.size]
        self._targets = targets
        self._temperatures = temperatures
        self._kept = kept

    def reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        if self.group is not None:
            dist.all_reduce(tensor, operation, group=self.group)

    def chunks(self, size: int) -> Iterator[slice]:
        """Rows to work on at a time; none where this rank has no words."""
        for start in range(0, len(self.words) if self.size else 0, size):
            yield slice(start, start + size)

    def target_columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the targets here (0 where another rank has them), and which ones are here."""
        column = self._targets - self.start
        here = (column >= 0) & (column < self.size)
        return column.where(here, 0), here

    def dropped(self, rows: slice) -> torch.Tensor | None:
        """[rows, words] bool: what takes no part in the softmax; None where everything does."""
        if self._kept is None:
            return None
        kept = self._kept[rows].long()
        column = torch.cat([kept, self._targets[rows, None]], dim=1) - self.start
        # One column more than there are words takes everything that is not here.
        column = column.where((column >= 0) & (column < self.size), self.size)
        dropped = torch.ones(len(kept), self.size + 1, dtype=torch.bool, device=kept.device).scatter_(1, column, False)
        return dropped[:, : self.size] & (kept >= 0).any(dim=1, keepdim=True)

    def largest(self, chunk: int) -> torch.Tensor:
        """[N] float32: the largest of the scaled logits in a row's softmax, over all ranks."""
        if self._kept is None and self.size:
            found = self.words.amax(dim=1).float()
        else:
            found = torch.full((len(self.words),), -torch.inf, device=self.words.device)
            for rows in self.chunks(chunk):
                found[rows] = self._without_dropped(self.words[rows], rows, -torch.inf).amax(dim=1).float()
        found.div_(self._temperatures)
        self.reduce(found, dist.ReduceOp.MAX)
        return found

    def scaled(self, rows: slice, *shifts: torch.Tensor) -> torch.Tensor:
        """[rows, words] float32, to be written to: logits / temperatures - shifts, each [N]; DROPPED where they take no part."""
        scaled = torch.div(self.words[rows].float(), self._temperatures[rows, None])
        for shift in shifts:
            scaled.sub_(shift[rows, None])
        return self._without_dropped(scaled, rows, DROPPED)

    def _without_dropped(self, words: torch.Tensor, rows: slice, value: float) -> torch.Tensor:
        dropped = self.dropped(rows)
        return words if dropped is None else words.masked_fill(dropped, value)


def rows_at_a_time(logits: torch.Tensor, elements: int) -> int:
    return max(1, elements // max(1, logits.shape[1]))
