"""Map samples to training rows. A sample has several if its agent's conversation branched; only batches with such samples have the column
`branch`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.samples import Author, Branch


class SampleRows(NamedTuple):
    first: np.ndarray
    """[samples]: index of each sample's first row."""
    sample: np.ndarray
    """[rows]: index of each row's sample."""

    def total(self, column: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(self.first), dtype=column.dtype).index_add(0, torch.from_numpy(self.sample), column)

    def reduced(self, column: torch.Tensor, kind: Literal["amin", "amax"]) -> torch.Tensor:
        return column[self.first].scatter_reduce(0, torch.from_numpy(self.sample), column, kind)


def sample_rows(group: torch.Tensor, index: torch.Tensor, branch: torch.Tensor) -> SampleRows:
    """Map samples to rows. Rows of one sample have equal (group, index); the first has branch 0."""
    identity = torch.stack([group, index], dim=1).numpy()
    _, number = np.unique(identity, axis=0, return_inverse=True)
    first = np.flatnonzero(branch.numpy() == 0)
    place = np.empty(len(first), np.int64)
    place[number.reshape(-1)[first]] = np.arange(len(first))
    return SampleRows(first, place[number.reshape(-1)])


def sample_rows_of(rows: DataProto) -> SampleRows | None:
    """Map samples to rows; None if every sample has one row."""
    return sample_rows(rows.tensor("group"), rows.tensor("index"), rows.tensor("branch")) if "branch" in rows else None


def turn_rewards(rows: Iterable[tuple[Branch, Sequence[float]]]) -> Ragged:
    """Put each response's reward on its last token, 0 elsewhere. `rows`: (row, rewards of all responses of its sample, by turn)."""
    columns = []
    for row, rewards in rows:
        ends = np.cumsum([segment.length for segment in row.segments])
        column = torch.zeros(int(ends[-1]) - 1)
        for segment, end in zip(row.segments, ends.tolist(), strict=True):
            if segment.author is Author.POLICY and segment.turn is not None:
                column[end - 2] += rewards[segment.turn]  # entry t belongs to token t + 1
        columns.append(column)
    return Ragged.from_rows(columns)


def per_sample(rows: DataProto) -> DataProto:
    """Keep each sample's first row, with values from all its rows: sum of `response_length`, minimum of `min_version`, maximum of
    `max_version` and of `policy_tokens` (because max_tokens limits each row)."""
    of = sample_rows_of(rows)
    if of is None:
        return rows
    columns = dict(rows.take(of.first).columns)
    columns["response_length"] = of.total(rows.tensor("response_length"))
    columns["min_version"] = of.reduced(rows.tensor("min_version"), "amin")
    columns |= {name: of.reduced(rows.tensor(name), "amax") for name in ("max_version", "policy_tokens")}
    del columns["branch"]
    return DataProto(columns)
