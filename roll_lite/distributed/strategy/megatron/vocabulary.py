"""Logits and softmax, a block of vocabulary words at a time: the logits [N, V/tp] are never stored whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

BLOCK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits per block: few enough for a CPU's cache, enough for a GPU (256 MiB in float32)."""
FEWEST_WORDS = 256
"""Minimum words per block: narrower matrix products are slow."""

DROPPED = -1e4
"""Log-prob outside a truncated softmax. Its exp is exactly 0, even in float64; unlike with -inf, the difference of two is not NaN."""


class Vocabulary:
    """Share of the vocabulary (V/tp rows of the output weight) on this rank, and the softmax at N positions.

    `share`: words per rank. `vocab_size`: without padding. `targets` [N]: token ids. `kept` [N, K]: ids that a truncated softmax keeps
    besides the target, padded with -1; all -1, or None: no truncation.
    """

    def __init__(
        self,
        share: int,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        kept: torch.Tensor | None = None,
        block_words: int | None = None,
    ) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.start = share * (self.group.rank() if self.group is not None else 0)
        self.words = min(max(vocab_size - self.start, 0), share)
        self.size = vocab_size
        self.targets = targets
        self.inverse_temperatures = temperatures.reciprocal()
        self._kept = None if kept is None else torch.cat([kept.long(), targets[:, None]], dim=1)
        self._truncated = None if kept is None else (kept >= 0).any(dim=1, keepdim=True)
        self._block_words = block_words or max(FEWEST_WORDS, BLOCK_LOGITS[targets.device.type] // max(1, len(targets)))

    def reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        if self.group is not None:
            dist.all_reduce(tensor, operation, group=self.group)

    def blocks(self) -> Iterator[slice]:
        """Yield slices of this rank's words; none if it holds only padding."""
        for start in range(0, self.words, self._block_words):
            yield slice(start, min(start + self._block_words, self.words))

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (block, logits [N, words]). Tokens that a truncated softmax drops get -inf. The caller may overwrite the logits."""
        for block in self.blocks():
            logits = hidden @ weight[block].t()
            if self._kept is not None and self._truncated is not None:
                logits.masked_fill_(self._dropped(self._kept, block) & self._truncated, -torch.inf)
            yield block, logits

    def scaled(self, logits: torch.Tensor, shift: torch.Tensor, *shifts: torch.Tensor) -> torch.Tensor:
        """Return logits / temperatures - sum of shifts ([N] each) in float32; DROPPED outside the softmax. May overwrite the logits."""
        scaled = logits.float()
        torch.addcmul(-shift[:, None], scaled, self.inverse_temperatures[:, None], out=scaled)
        for further in shifts:
            scaled.sub_(further[:, None])
        return scaled if self._kept is None else scaled.masked_fill_(scaled == -torch.inf, DROPPED)

    def target_columns(self, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (each target's column in the block, 0 if outside; whether it is inside), both [N, 1]."""
        column = self.targets[:, None] - (self.start + block.start)
        here = (column >= 0) & (column < block.stop - block.start)
        return column.where(here, 0), here

    def _dropped(self, kept: torch.Tensor, block: slice) -> torch.Tensor:
        words = block.stop - block.start
        column = kept - (self.start + block.start)
        # Ids outside the block go to an extra column.
        column = column.where((column >= 0) & (column < words), words)
        dropped = torch.ones(len(kept), words + 1, dtype=torch.bool, device=kept.device).scatter_(1, column, False)
        return dropped[:, :words]


class SoftmaxSums:
    """Sums [N] of exp(z) and exp(z) * z over the vocabulary, by block, then over ranks. z: logit / temperature minus the position's
    maximum."""

    def __init__(self, vocabulary: Vocabulary, entropy: bool) -> None:
        self._vocabulary = vocabulary
        self._entropy = entropy
        rows, device = len(vocabulary.targets), vocabulary.targets.device
        # Not -inf: the difference of two would be NaN.
        self.largest = torch.full((rows,), torch.finfo(torch.float32).min, device=device)
        self._sums = torch.zeros(3, rows, device=device)
        self.exponentials, self.weighted, self.target = self._sums

    def add(self, block: slice, logits: torch.Tensor) -> None:
        inverse_temperatures = self._vocabulary.inverse_temperatures
        column, here = self._vocabulary.target_columns(block)
        self.target.add_(logits.gather(1, column).where(here, 0).squeeze(1) * inverse_temperatures)
        self._rise_to(torch.maximum(self.largest, logits.amax(dim=1) * inverse_temperatures))
        scaled = self._vocabulary.scaled(logits, self.largest)
        exponentials = scaled.exp() if self._entropy else scaled.exp_()
        self.exponentials.add_(exponentials.sum(dim=1))
        if self._entropy:
            self.weighted.add_(exponentials.mul_(scaled).sum(dim=1))

    def add_ranks(self) -> None:
        largest = self.largest.clone()
        self._vocabulary.reduce(largest, dist.ReduceOp.MAX)
        self._rise_to(largest)
        self._vocabulary.reduce(self._sums, dist.ReduceOp.SUM)

    def _rise_to(self, largest: torch.Tensor) -> None:
        difference = self.largest - largest
        factor = difference.exp()
        self.weighted.addcmul_(difference, self.exponentials).mul_(factor)
        self.exponentials.mul_(factor)
        self.largest = largest


class HeadGradients:
    """Gradients of hidden states (this rank's partial sum) and of the output weight, summed by block; None if not needed."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, needed: tuple[bool, ...]) -> None:
        self._inputs = hidden, weight
        self._hidden = torch.zeros_like(hidden, dtype=torch.float32) if needed[0] else None
        self.weight = torch.zeros_like(weight) if needed[1] else None

    def add(self, block: slice, logits_gradient: torch.Tensor) -> None:
        hidden, weight = self._inputs
        gradient = logits_gradient.to(weight.dtype)
        if self.weight is not None:
            torch.mm(gradient.t(), hidden, out=self.weight[block])
        if self._hidden is None:
            return
        if weight.dtype == torch.float32:
            self._hidden.addmm_(gradient, weight[block])
        elif self._hidden.is_cuda:  # float32 sums of a bfloat16 product in one kernel; CPUs have none
            torch.addmm(self._hidden, gradient, weight[block], out_dtype=torch.float32, out=self._hidden)
        else:
            self._hidden.add_(gradient @ weight[block])

    @property
    def hidden(self) -> torch.Tensor | None:
        return None if self._hidden is None else self._hidden.to(self._inputs[0].dtype)
