"""Reward shaping and sample masks: the way from scores to the rewards that advantages use. Works on the rows of the whole global batch, in
float64; arrays are [N]."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

SPREAD_RESOLUTION = 1e-12
"""A standard deviation below this share of the root mean square is float64's rounding of a mean, not spread."""


@dataclass(frozen=True)
class RewardRows:
    """Facts about the global batch's samples, without tokens. All tensors are [N]; names are those of the columns."""

    score: torch.Tensor
    """float32, as the reward function gave it."""
    correct: torch.Tensor
    """float32, 1 or 0."""
    format_ok: torch.Tensor
    """float32, 1 where the domain's format pattern matches; 0 without a pattern."""
    policy_tokens: torch.Tensor
    """int64, length of the response in tokens that the policy chose."""
    max_tokens: torch.Tensor
    """int64, what the row's domain allows."""
    truncated: torch.Tensor
    """bool, cut at max_tokens."""
    group: torch.Tensor
    """int64, equal for the samples of a prompt; says nothing about positions."""
    domain_number: torch.Tensor
    """int64, place in `domains`."""
    sample_weight: torch.Tensor
    """float32, what the data says; 1 by default."""
    domains: Sequence[str] = ()
    """Names."""

    COLUMNS = ("score", "correct", "format_ok", "policy_tokens", "max_tokens", "truncated", "group", "domain_number", "sample_weight")

    @staticmethod
    def of(columns: Mapping[str, torch.Tensor], domains: Sequence[str]) -> RewardRows:
        """Build from a batch's columns of these names."""
        return RewardRows(**{name: columns[name] for name in RewardRows.COLUMNS}, domains=tuple(domains))

    def __len__(self) -> int:
        return len(self.score)


# ---------------------------------------------------------------- what is added to a score


def format_rewards(rows: RewardRows, bonus: Sequence[float], penalty: Sequence[float]) -> np.ndarray:
    """Format reward by domain: the bonus if the pattern matches, otherwise minus the penalty."""
    number = rows.domain_number.numpy()
    changes: np.ndarray = np.where(rows.format_ok.numpy() > 0, np.asarray(bonus)[number], -np.asarray(penalty)[number])
    return changes


def length_rewards(rows: RewardRows, kind: Literal["linear", "group"], coef: float) -> np.ndarray:
    """linear: -coef * tokens / max_tokens. group: Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3) times coef."""
    lengths = as_float64(rows.policy_tokens)
    rewards: np.ndarray
    if kind == "linear":
        rewards = -coef * lengths / as_float64(rows.max_tokens)
        return rewards
    places, groups = group_places(rows.group)
    shortest, longest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(shortest, places, lengths)
    np.maximum.at(longest, places, lengths)
    span = (longest - shortest)[places]
    lam = coef * (0.5 - (lengths - shortest[places]) / np.where(span > 0, span, 1.0))
    lam = np.where(rows.correct.numpy() > 0, lam, np.minimum(0.0, lam))
    rewards = np.where(span > 0, lam, 0.0)
    return rewards


def overlong_rewards(rows: RewardRows, buffer_tokens: int, penalty: float) -> np.ndarray:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) times `penalty`; max_tokens is the paper's L_max."""
    starts = as_float64(rows.max_tokens) - buffer_tokens
    rewards: np.ndarray = penalty * ((starts - as_float64(rows.policy_tokens)) / buffer_tokens).clip(-1.0, 0.0)
    return rewards


# ---------------------------------------------------------------- normalisation


class RunningMoments:
    """Count, mean and sum of squared deviations (Welford's, merged over batches as Chan, Golub and LeVeque do), in float64.

    Sums within a batch are exactly rounded, so that the order of its rows changes nothing. Lives on the driver, saved with it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0

    def update(self, values: np.ndarray) -> None:
        """values [n]; none is fine."""
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
        """ddof 1; 0 for less than two numbers."""
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
    """Normalise rewards: subtract the mean and divide by the standard deviation (ddof 1), as configured. `running` takes in the rewards
    first.

    trains [N] bool: samples that count in the statistics of a batch or of the run; in a group, which is a baseline, all count. Without
    spread nothing is divided, and the result is exactly 0. Rewards are compared as float32, like scores: 1 - 0.1 and a score of 0.9 are
    equal.
    """
    if len(rewards) == 0:
        return rewards
    rewards = rewards.astype(np.float32).astype(np.float64)
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
    result: np.ndarray = shifted / np.where(flat, 1.0, spread) if std else shifted
    return result


# ---------------------------------------------------------------- which samples train


@dataclass(frozen=True)
class Masked:
    """A sample that does not train still counts in its group's baseline."""

    weights: torch.Tensor
    """[N] float32, the column train_weight: 0 does not train."""
    causes: dict[str, torch.Tensor]
    """Samples kept from training, [N] bool by cause. A sample may have several causes."""


def mask_samples(
    rows: RewardRows,
    truncated: bool,
    group_mean: tuple[float, float] | None,
    response_tokens: tuple[int, int] | None,
    function_weights: np.ndarray | None,
) -> Masked:
    """The data's sample weights times those of the user's function, 0 wherever there is a cause not to train: cut at max_tokens, a group
    whose mean score, or a response whose length lies outside of its range."""
    weights = as_float64(rows.sample_weight)
    causes: dict[str, np.ndarray] = {}
    if (weights != 1).any():
        causes["sample_weight"] = weights == 0
    if truncated:
        causes["truncated"] = rows.truncated.numpy()
    if group_mean is not None:
        # As float32, which the scores are: a group that scores 0.2 throughout lies in a range that ends with 0.2.
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
    outside: np.ndarray = (values < low) | (values > high)
    return outside


# ---------------------------------------------------------------- groups


def group_places(groups: torch.Tensor) -> tuple[np.ndarray, int]:
    """Group ids [N] -> places [N] counted from 0, and the number of groups."""
    ids, places = np.unique(groups.numpy(), return_inverse=True)
    return places, len(ids)


def group_means(values: np.ndarray, places: np.ndarray, groups: int) -> np.ndarray:
    """[groups] float64."""
    return np.bincount(places, values, groups) / np.bincount(places, minlength=groups)


def as_float64(column: torch.Tensor) -> np.ndarray:
    return column.numpy().astype(np.float64)
