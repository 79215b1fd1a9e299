"""Rows of optimizer steps, and their distribution over data-parallel ranks. Mini-batches are cut from the global batch: their rows and
token weights do not depend on the layout."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll_lite.algorithms.losses import Aggregation, row_weights


@dataclass(frozen=True)
class MiniBatch:
    """Rows of an optimizer step, or a rank's share of them."""

    epoch: int
    samples: np.ndarray
    """int64 [rows]: numbers of the `sample` column."""
    weights: np.ndarray
    """float32 [rows]: loss weight of each policy token of the row."""

    def share(self, rows: np.ndarray) -> MiniBatch:
        return MiniBatch(self.epoch, self.samples[rows], self.weights[rows])


def cut_mini_batches(
    samples: np.ndarray,
    policy_tokens: np.ndarray,
    train_weights: np.ndarray,
    *,
    epochs: int,
    mini_batches: int,
    aggregation: Aggregation,
    constant: int | None = None,
    seed: int,
) -> list[MiniBatch]:
    """Cut `epochs` passes, each in its own seeded order, into `mini_batches` parts whose sizes differ by at most one; rows with
    train_weight 0 and empty parts are left out."""
    cut: list[MiniBatch] = []
    training = np.flatnonzero(train_weights)
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(training)
        for rows in np.array_split(order, mini_batches):
            rows = np.sort(rows)
            if len(rows):
                weights = row_weights(torch.from_numpy(policy_tokens[rows]), aggregation, constant, torch.from_numpy(train_weights[rows]))
                cut.append(MiniBatch(epoch, samples[rows], weights.to(torch.float32).numpy()))
    return cut


def row_costs(tokens: np.ndarray, attention_par: float) -> np.ndarray:
    """Relative cost by row length: attention is quadratic, and equals the rest at `attention_par` tokens."""
    return tokens * (1 + tokens / attention_par)


def spread(mini_batches: list[MiniBatch], costs: dict[int, float], ranks: int) -> list[list[MiniBatch]]:
    """Split each mini-batch over the ranks by about equal cost; returns the shares by rank. `costs`: by sample number."""
    shares: list[list[MiniBatch]] = [[] for _ in range(ranks)]
    for mini_batch in mini_batches:
        for rank, rows in enumerate(balanced_partition([costs[int(sample)] for sample in mini_batch.samples], ranks)):
            shares[rank].append(mini_batch.share(rows))
    return shares


def balanced_partition(costs: Sequence[float] | np.ndarray | torch.Tensor, parts: int, most_rows: int | None = None) -> list[np.ndarray]:
    """Split rows into parts of about equal cost and at most `most_rows` rows. Returns ascending row numbers per part.

    Rows go, costliest first, to the cheapest part; ties go to fewer rows, then to the lower number. No part is empty if there are enough
    rows."""
    if parts < 1:
        raise ValueError(f"balanced_partition: {parts} is no number of parts")
    each = np.asarray(costs)
    members: list[list[int]] = [[] for _ in range(parts)]
    lightest: list[tuple[float, int, int]] = [(0, 0, part) for part in range(parts)]
    for row in np.argsort(-each, kind="stable").tolist():
        load, rows, part = lightest[0]
        members[part].append(row)
        if rows + 1 == most_rows:
            heapq.heappop(lightest)
        else:
            heapq.heapreplace(lightest, (load + each[row].item(), rows + 1, part))
    return [np.sort(np.array(rows, dtype=np.int64)) for rows in members]
