from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch

from roll_lite.distributed.strategy.megatron.routing import Routes


@dataclass(frozen=True)
class PackedRows:
    """Layout of this rank's packed tokens; replaces Megatron's PackedSeqParams."""

    runs: tuple[tuple[int, int, int], ...]
    """Run-length encoding: (number of adjacent equal pieces, tokens per piece, tokens seen by each piece's last). A piece is a row or,
    with context parallelism, this rank's part of one."""
    places: torch.Tensor
    """[tokens] int64: position in the row."""
    starts: torch.Tensor
    """[pieces + 1] int32: index of each piece's first token, then the number of tokens."""
    longest: int
    row_of: torch.Tensor
    """[tokens] int64: row number; padding is an extra last row."""
    lengths: torch.Tensor
    """[rows] int64: full row lengths, without padding."""
    key_index: torch.Tensor | None = None
    """[total] int64: tokens that each piece attends to, by piece, as indices into the tokens gathered from all context-parallel ranks. None
    without context parallelism."""
    key_starts: torch.Tensor | None = None
    """[pieces + 1] int32: start of each piece's tokens in `key_index`, then its length."""
    routes: Routes | None = None
    # With "thd", Megatron would split tokens by row in every layer and wait for the device.
    qkv_format = "sbhd"

    @staticmethod
    def of(lengths: torch.Tensor, padding: bool = False) -> PackedRows:
        """Lay out rows. `padding`: the last one is padding."""
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        places = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], lengths)
        pieces = [(length, length) for length in lengths.tolist()]
        row_of = torch.repeat_interleave(lengths)
        return PackedRows(_runs(pieces), places, starts.int(), int(lengths.max()), row_of, lengths[: len(lengths) - padding])

    @staticmethod
    def of_rank(lengths: torch.Tensor, cut: ContextCut, padding: bool = False) -> PackedRows:
        whole = PackedRows.of(lengths, padding)
        bounds = whole.starts.tolist()
        pieces, places, keys = [], [], []
        for low, high in cut.parts:
            for begin, end in pairwise(bounds):
                first, last = max(low, begin), min(high, end)
                if first < last:
                    pieces.append((last - first, last - begin))
                    places.append(torch.arange(first - begin, last - begin))
                    keys.append(torch.arange(begin, last))
        sizes, views = (torch.tensor([0, *column]).cumsum(0).int() for column in zip(*pieces, strict=True))
        row_of = cut.own(whole.row_of)
        among_all = cut.among_all(torch.cat(keys))
        return PackedRows(_runs(pieces), torch.cat(places), sizes, whole.longest, row_of, whole.lengths, among_all, views)

    @property
    def most_tokens(self) -> int:
        return max(tokens for _, tokens, _ in self.runs)

    @property
    def most_keys(self) -> int:
        return max(keys for _, _, keys in self.runs)


def _runs(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((len(list(alike)), tokens, keys) for (tokens, keys), alike in groupby(pieces))


@dataclass(frozen=True)
class ContextCut:
    """Split of a sequence over context-parallel ranks. Of 2 * ranks equal parts, rank i gets the i-th and the i-th from the end: this
    balances causal attention."""

    tokens: int
    rank: int
    ranks: int

    @property
    def part(self) -> int:
        return self.tokens // (2 * self.ranks)

    @property
    def parts(self) -> list[tuple[int, int]]:
        return [(number * self.part, (number + 1) * self.part) for number in (self.rank, 2 * self.ranks - 1 - self.rank)]

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([tokens[low:high] for low, high in self.parts])

    def among_all(self, positions: torch.Tensor) -> torch.Tensor:
        """Convert positions in the sequence to indices into the tokens gathered from all ranks."""
        number = positions // self.part
        early = number < self.ranks
        owner = torch.where(early, number, 2 * self.ranks - 1 - number)
        return (2 * owner + (~early).long()) * self.part + positions % self.part

    def places(self) -> torch.Tensor:
        return torch.arange(self.tokens) if self.ranks == 1 else self.own(torch.arange(self.tokens))

    def find(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mask [N] of positions on this rank, their local indices)."""
        if self.ranks == 1:
            return torch.ones_like(positions, dtype=torch.bool), positions
        first = 2 * self.rank * self.part
        places = self.among_all(positions) - first
        here = (places >= 0) & (places < 2 * self.part)
        return here, places[here]


def packed(
    ids: torch.Tensor, lengths: torch.Tensor, tokens_divisor: int, rank: int, ranks: int
) -> tuple[torch.Tensor, PackedRows, ContextCut]:
    """Pack rows, with a row of padding up to a multiple of `tokens_divisor`. Return (this rank's token ids, layout, context-parallel
    split)."""
    missing = -len(ids) % tokens_divisor if len(ids) else tokens_divisor
    if missing:
        ids, lengths = torch.cat([ids, ids.new_zeros(missing)]), torch.cat([lengths, lengths.new_tensor([missing])])
    cut = ContextCut(len(ids), rank, ranks)
    if ranks == 1:
        return ids, PackedRows.of(lengths, missing > 0), cut
    return cut.own(ids), PackedRows.of_rank(lengths, cut, missing > 0), cut


def on_device(rows: PackedRows, to: Callable[[torch.Tensor], torch.Tensor]) -> PackedRows:
    key_index, key_starts = (None if each is None else to(each) for each in (rows.key_index, rows.key_starts))
    places, starts, row_of, lengths = map(to, (rows.places, rows.starts, rows.row_of, rows.lengths))
    routes = None if rows.routes is None else rows.routes.on_device(to)
    return replace(
        rows, places=places, starts=starts, row_of=row_of, lengths=lengths, key_index=key_index, key_starts=key_starts, routes=routes
    )
