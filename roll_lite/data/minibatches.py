"""Split the global batch into mini-batches, and these over data-parallel ranks. The parallel layout changes neither a mini-batch's rows nor
their token weights."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll_lite.algorithms.losses import Aggregation, row_weights


@dataclass(frozen=True)
class MiniBatch:
    """Rows of one optimizer step, or a rank's share of them."""

    epoch: int
    samples: np.ndarray
    weights: np.ndarray
    """float32 [rows]: loss weight per policy token of a row."""


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
    owners: np.ndarray | None = None,
    rows_are_sequences: bool = False,
) -> list[MiniBatch]:
    """Shuffle the batch in each epoch and split it into `mini_batches` mini-batches. Rows with train_weight 0 and empty mini-batches are
    dropped.

    `samples`: each row's number. `owners`: number of each row's sample (None: each row is a sample). A sample's rows stay in one
    mini-batch, and count as one sequence in the loss unless `rows_are_sequences`.
    """
    cut: list[MiniBatch] = []
    owners = np.arange(len(samples)) if owners is None else owners
    sequences = np.arange(len(samples)) if rows_are_sequences else owners
    trains = train_weights != 0
    training = np.unique(owners[trains])
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(training)
        for part in np.array_split(order, mini_batches):
            rows = np.flatnonzero(np.isin(owners, part) & trains)
            if len(rows):
                _, first, place = np.unique(sequences[rows], return_index=True, return_inverse=True)
                tokens = np.bincount(place, policy_tokens[rows], len(first)).astype(np.int64)
                weights = row_weights(torch.from_numpy(tokens), aggregation, constant, torch.from_numpy(train_weights[rows][first]))
                cut.append(MiniBatch(epoch, samples[rows], weights.to(torch.float32).numpy()[place]))
    return cut


def row_costs(tokens: np.ndarray, attention_parity_tokens: float) -> np.ndarray:
    """Relative cost of each row. At `attention_parity_tokens` tokens, attention costs as much as the rest of the model."""
    return tokens * (1 + tokens / attention_parity_tokens)


def spread(mini_batches: list[MiniBatch], costs: dict[int, float], ranks: int) -> list[list[MiniBatch]]:
    """Split each mini-batch over the ranks at about equal cost, [rank][mini-batch]. `costs`: {number in column `sample`: cost}."""
    shares: list[list[MiniBatch]] = [[] for _ in range(ranks)]
    for mini_batch in mini_batches:
        for rank, rows in enumerate(balanced_partition([costs[int(sample)] for sample in mini_batch.samples], ranks)):
            shares[rank].append(MiniBatch(mini_batch.epoch, mini_batch.samples[rows], mini_batch.weights[rows]))
    return shares


def balanced_partition(costs: Sequence[float] | np.ndarray | torch.Tensor, parts: int, most_rows: int | None = None) -> list[np.ndarray]:
    """Split rows into parts of about equal cost and at most `most_rows` rows: costliest rows first, each to the cheapest part so far (on
    ties, the part with fewer rows)."""
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
