from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch

SPREAD_RESOLUTION = 1e-12
"""Standard deviations up to this fraction of the mean count as 0: rounding errors."""


@dataclass(frozen=True)
class RewardRows:
    """Columns of the global batch: tensors [N], one entry per sample."""

    score: torch.Tensor
    correct: torch.Tensor
    format_ok: torch.Tensor
    """float32: 1 if the domain's format pattern matches; 0 without a pattern."""
    policy_tokens: torch.Tensor
    """int64: policy tokens; maximum over the sample's training rows."""
    row_tokens: torch.Tensor
    """int64: tokens after the prompt (policy's and environment's); maximum over the sample's training rows."""
    max_tokens: torch.Tensor
    truncated: torch.Tensor
    """bool: cut at max_tokens or max_turns."""
    group: torch.Tensor
    domain_number: torch.Tensor
    sample_weight: torch.Tensor
    """float32: weight given by the data."""
    domains: Sequence[str] = ()

    @staticmethod
    def of(columns: Mapping[str, torch.Tensor], domains: Sequence[str]) -> RewardRows:
        return RewardRows(**{one.name: columns[one.name] for one in fields(RewardRows) if one.name != "domains"}, domains=tuple(domains))

    def __len__(self) -> int:
        return len(self.score)


# ---------------------------------------------------------------- terms added to a score


def format_rewards(rows: RewardRows, bonus: Sequence[float], penalty: Sequence[float]) -> np.ndarray:
    number = rows.domain_number.numpy()
    return np.where(rows.format_ok.numpy() > 0, np.asarray(bonus)[number], -np.asarray(penalty)[number])


def length_rewards(rows: RewardRows, kind: Literal["linear", "group"], coef: float) -> np.ndarray:
    """linear: -coef * policy tokens / max_tokens. group: coef times Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3)."""
    lengths = as_float64(rows.policy_tokens)
    if kind == "linear":
        return -coef * lengths / as_float64(rows.max_tokens)
    places, groups = group_places(rows.group)
    shortest, longest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(shortest, places, lengths)
    np.maximum.at(longest, places, lengths)
    span = (longest - shortest)[places]
    lam = coef * (0.5 - (lengths - shortest[places]) / np.where(span > 0, span, 1.0))
    lam = np.where(rows.correct.numpy() > 0, lam, np.minimum(0.0, lam))
    return np.where(span > 0, lam, 0.0)


def overlong_rewards(rows: RewardRows, buffer_tokens: int, penalty: float) -> np.ndarray:
    """DAPO's soft overlong punishment times `penalty` (arXiv 2503.14476, eq. 13); max_tokens is the paper's L_max. An environment's tokens
    count too, as in max_tokens."""
    starts = as_float64(rows.max_tokens) - buffer_tokens
    return penalty * ((starts - as_float64(rows.row_tokens)) / buffer_tokens).clip(-1.0, 0.0)


# ---------------------------------------------------------------- normalisation


class RunningMoments:
    """Count, mean and sum of squared deviations of a run's rewards (Welford). Sums are exactly rounded, so row order does not change
    results."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0

    def update(self, values: np.ndarray) -> None:
        count = len(values)
        if count == 0:
            return
        mean = math.fsum(values) / count
        squares = math.fsum((values.astype(np.float64) - mean) ** 2)
        total = self.count + count
        delta = mean - self.mean
        self.squares += squares + delta * delta * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])


def normalized(
    rewards: np.ndarray,
    group: torch.Tensor,
    trains: np.ndarray,
    over: Literal["batch", "group", "running"],
    mean: bool,
    std: bool,
    running: RunningMoments,
) -> np.ndarray:
    """Subtract the mean (if `mean`), divide by the sample standard deviation (if `std`, unless 0). over=group: statistics of all samples of
    a group; batch: of samples with `trains`; running: of such samples in all calls."""
    if len(rewards) == 0:
        return rewards
    rewards = rewards.astype(np.float32).astype(np.float64)  # rounded like scores: 1 - 0.1 equals a score of 0.9
    if over == "group":
        places, groups = group_places(group)
        means = group_means(rewards, places, groups)
        counts = np.bincount(places, minlength=groups)
        squares = np.bincount(places, (rewards - means[places]) ** 2, groups)
        centre, spread = means[places], np.sqrt(squares / np.maximum(1, counts - 1))[places]
    else:
        moments = running if over == "running" else RunningMoments()
        moments.update(rewards[trains])
        centre, spread = np.full(len(rewards), moments.mean), np.full(len(rewards), moments.std)
    flat = spread <= SPREAD_RESOLUTION * np.hypot(centre, spread)
    shifted = np.where(flat, 0.0, rewards - centre) if mean else rewards
    return shifted / np.where(flat, 1.0, spread) if std else shifted


# ---------------------------------------------------------------- which samples train


@dataclass(frozen=True)
class Masked:
    """Training weights of samples, and causes of zero weights. Samples with weight 0 still count in their group's baseline."""

    weights: torch.Tensor
    """[N] float32: train_weight; samples with 0 do not train."""
    causes: dict[str, torch.Tensor]
    """{cause: [N] bool: True for samples masked by it}, possibly several causes per sample."""


def mask_samples(
    rows: RewardRows,
    truncated: bool,
    group_mean: tuple[float, float] | None,
    response_tokens: tuple[int, int] | None,
    function_weights: np.ndarray | None,
) -> Masked:
    """Multiply `sample_weight` by `function_weights`, the result of the user's function (None: 1). A sample gets 0 if it is truncated (if
    `truncated`), its group's mean score is outside `group_mean`, or its length outside `response_tokens`."""
    weights = as_float64(rows.sample_weight)
    causes: dict[str, np.ndarray] = {}
    if (weights != 1).any():
        causes["sample_weight"] = weights == 0
    if truncated:
        causes["truncated"] = rows.truncated.numpy()
    if group_mean is not None:
        # In float32, like scores: a group with scores of 0.2 is inside a range that ends with 0.2.
        places, groups = group_places(rows.group)
        means = group_means(as_float64(rows.score), places, groups).astype(np.float32)[places]
        causes["group_mean"] = _outside(means, *np.array(group_mean, dtype=np.float32))
    if response_tokens is not None:
        causes["response_tokens"] = _outside(rows.policy_tokens.numpy(), *response_tokens)
    if function_weights is not None:
        causes["function"] = function_weights == 0
        weights = weights * function_weights
    for masked in causes.values():
        weights = np.where(masked, 0.0, weights)
    return Masked(torch.from_numpy(weights.astype(np.float32)), {name: torch.from_numpy(masked) for name, masked in causes.items()})


def _outside(values: np.ndarray, low: Any, high: Any) -> np.ndarray:
    return (values < low) | (values > high)


# ---------------------------------------------------------------- groups


def group_places(groups: torch.Tensor) -> tuple[np.ndarray, int]:
    """Map group ids [N] to (group numbers [N] from 0, number of groups)."""
    ids, places = np.unique(groups.numpy(), return_inverse=True)
    return places, len(ids)


def group_means(values: np.ndarray, places: np.ndarray, groups: int) -> np.ndarray:
    return np.bincount(places, values, groups) / np.bincount(places, minlength=groups)


def as_float64(column: torch.Tensor) -> np.ndarray:
    return column.numpy().astype(np.float64)
