"""Rows one behind the other in a single sequence of tokens, and the part of it that a context-parallel rank has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch

from roll_lite.distributed.strategy.megatron.routing import Routes


@dataclass(frozen=True)
class PackedRows:
    """The tokens that a rank has: which others each of them sees, and where in its row it stands.

    Goes through Megatron's layers in the place of its own PackedSeqParams, of whose formats it declares the one in which rotary
    embeddings come ready for every token: those of `thd` are cut and joined row by row in every layer, waiting for the device each time.
    """

    runs: tuple[tuple[int, int, int], ...]
    """(pieces, tokens of each, tokens that each sees) of neighbours that are alike. A piece is a row or, where ranks share the tokens,
    consecutive tokens of one; its last token sees all that the piece sees, the one before it one less."""
    places: torch.Tensor
    """[tokens] int64: of each token in its row, from 0."""
    starts: torch.Tensor
    """[pieces + 1] int32: where each piece begins, and where the last one ends."""
    longest: int
    """Tokens of the longest row."""
    row_of: torch.Tensor
    """[tokens] int64: of each token its row; padding is a row behind the last one."""
    lengths: torch.Tensor
    """[rows] int64: all tokens of each row."""
    seen: torch.Tensor | None = None
    """[sum of what the pieces see] int64: what each piece sees, among the tokens of all ranks, in the order of the ranks. None where a
    piece sees itself alone."""
    seen_starts: torch.Tensor | None = None
    """[pieces + 1] int32: where it begins there."""
    routes: Routes | None = None
    """To experts, where they are recorded or replayed."""
    qkv_format = "sbhd"

    @staticmethod
    def of(lengths: torch.Tensor, padding: bool = False) -> PackedRows:
        """All of them, the last one being padding or not. On the host."""
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        places = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], lengths)
        pieces = [(length, length) for length in lengths.tolist()]
        row_of = torch.repeat_interleave(lengths)
        return PackedRows(_runs(pieces), places, starts.int(), int(lengths.max()), row_of, lengths[: len(lengths) - padding])

    @staticmethod
    def of_rank(lengths: torch.Tensor, cut: ContextCut, padding: bool = False) -> PackedRows:
        """Those that a rank has."""
        whole = PackedRows.of(lengths, padding)
        bounds = whole.starts.tolist()
        pieces, places, seen = [], [], []
        for low, high in cut.parts:
            for begin, end in pairwise(bounds):
                first, last = max(low, begin), min(high, end)
                if first < last:
                    pieces.append((last - first, last - begin))
                    places.append(torch.arange(first - begin, last - begin))
                    seen.append(torch.arange(begin, last))
        sizes, views = (torch.tensor([0, *column]).cumsum(0).int() for column in zip(*pieces, strict=True))
        row_of = cut.own(whole.row_of)
        among_all = cut.among_all(torch.cat(seen))
        return PackedRows(_runs(pieces), torch.cat(places), sizes, whole.longest, row_of, whole.lengths, among_all, views)

    @property
    def most_tokens(self) -> int:
        """Of a piece."""
        return max(tokens for _, tokens, _ in self.runs)

    @property
    def most_seen(self) -> int:
        return max(seen for _, _, seen in self.runs)


def _runs(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((len(list(alike)), tokens, seen) for (tokens, seen), alike in groupby(pieces))


@dataclass(frozen=True)
class ContextCut:
    """How `ranks` share `tokens`: cut into twice as many parts, of which a rank has one from the beginning and the one as far from the end,
    so that all have about as many tokens to look back at."""

    tokens: int
    rank: int
    ranks: int

    @property
    def part(self) -> int:
        """Tokens of a part."""
        return self.tokens // (2 * self.ranks)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Where this rank's begin and end."""
        return [(number * self.part, (number + 1) * self.part) for number in (self.rank, 2 * self.ranks - 1 - self.rank)]

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's, of what all of them have."""
        return torch.cat([tokens[low:high] for low, high in self.parts])

    def among_all(self, positions: torch.Tensor) -> torch.Tensor:
        """Where the tokens lie when the ranks' are put one behind the other."""
        number = positions // self.part
        early = number < self.ranks
        owner = torch.where(early, number, 2 * self.ranks - 1 - number)
        return (2 * owner + (~early).long()) * self.part + positions % self.part

    def places(self) -> torch.Tensor:
        """Where this rank's tokens lie among all of them."""
        return torch.arange(self.tokens) if self.ranks == 1 else self.own(torch.arange(self.tokens))

    def find(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the tokens this rank has, [N] bool, and where among its own those lie."""
        if self.ranks == 1:
            return torch.ones_like(positions, dtype=torch.bool), positions
        first = 2 * self.rank * self.part
        places = self.among_all(positions) - first
        here = (places >= 0) & (places < 2 * self.part)
        return here, places[here]


def packed(
    ids: torch.Tensor, lengths: torch.Tensor, token_multiple: int, rank: int, ranks: int
) -> tuple[torch.Tensor, PackedRows, ContextCut]:
    """This rank's token ids, its rows, and how the ranks share all of them. What is missing to a multiple is a further row of padding, of
    which nothing is asked; so is the one that the model runs where there are no rows."""
    missing = -len(ids) % token_multiple if len(ids) else token_multiple
    if missing:
        ids, lengths = torch.cat([ids, ids.new_zeros(missing)]), torch.cat([lengths, lengths.new_tensor([missing])])
    cut = ContextCut(len(ids), rank, ranks)
    if ranks == 1:
        return ids, PackedRows.of(lengths, missing > 0), cut
    return cut.own(ids), PackedRows.of_rank(lengths, cut, missing > 0), cut


def on_device(rows: PackedRows, to: Callable[[torch.Tensor], torch.Tensor]) -> PackedRows:
    seen, seen_starts = (None if each is None else to(each) for each in (rows.seen, rows.seen_starts))
    places, starts, row_of, lengths = map(to, (rows.places, rows.starts, rows.row_of, rows.lengths))
    routes = None if rows.routes is None else rows.routes.on_device(to)
    return replace(rows, places=places, starts=starts, row_of=row_of, lengths=lengths, seen=seen, seen_starts=seen_starts, routes=routes)
