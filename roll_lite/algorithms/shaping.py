"""From scores to rewards: everything between what a reward function says of a sample and what an advantage is made of.

On the driver, over the rows of the whole global batch, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll_lite.algorithms.running_moments import RunningMoments
from roll_lite.config.schema import (
    FormatConfig,
    LengthPenaltyConfig,
    MasksConfig,
    OverlongConfig,
    RewardNormalizationConfig,
    RewardShapingConfig,
)

SPREAD_RESOLUTION = 1e-6
"""Scores are float32: a standard deviation below this share of their root mean square is rounding, not spread."""


@dataclass(frozen=True)
class RewardRows:
    """What is known of the global batch's samples, tokens aside. All tensors [N]; the names are those of the columns."""

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
        """From a batch's columns of these names."""
        return RewardRows(**{name: columns[name] for name in RewardRows.COLUMNS}, domains=tuple(domains))

    def __len__(self) -> int:
        return len(self.score)


@dataclass(frozen=True)
class DomainRewards:
    """A domain's own settings of its rewards."""

    weight: float = 1.0
    format: FormatConfig | None = None


def shape_rewards(
    rows: RewardRows,
    config: RewardShapingConfig,
    domains: Sequence[DomainRewards],
    masks: MasksConfig,
    running: RunningMoments,
) -> torch.Tensor:
    """Rewards [N] float32. `domains` by domain number. `running` takes the batch in, once, where the normalisation is over it.

    In this order: format, length penalty, truncation penalty, overlong, scale, clip, normalisation, domain weight.
    """
    rewards = _array(rows.score) + _format(rows, domains)
    if config.length_penalty is not None:
        rewards += _length(rows, config.length_penalty)
    if masks.truncated == "penalize":
        rewards -= masks.truncated_penalty * _array(rows.truncated)
    if config.overlong is not None:
        rewards += _overlong(rows, config.overlong)
    rewards = _scaled_and_clipped(rewards, config)
    if config.normalize is not None:
        rewards = _normalized(rewards, rows, config.normalize, running)
    return torch.from_numpy((rewards * _domain_weights(rows, domains)).astype(np.float32))


def shape_baseline(scores: torch.Tensor, rows: RewardRows, config: RewardShapingConfig, domains: Sequence[DomainRewards]) -> torch.Tensor:
    """Rewards [N] float32 of greedy baselines, of which the score is all that is known: scale, clip and domain weight."""
    rewards = _scaled_and_clipped(_array(scores), config)
    return torch.from_numpy((rewards * _domain_weights(rows, domains)).astype(np.float32))


def group_places(groups: torch.Tensor) -> tuple[np.ndarray, int]:
    """Group ids [N] -> places [N] counted from 0, and the number of groups."""
    ids, places = np.unique(groups.numpy(), return_inverse=True)
    return places, len(ids)


def group_means(values: np.ndarray, places: np.ndarray, groups: int) -> np.ndarray:
    """[groups] float64."""
    return np.bincount(places, values, groups) / np.bincount(places, minlength=groups)


def _array(column: torch.Tensor) -> np.ndarray:
    return column.numpy().astype(np.float64)


def _domain_weights(rows: RewardRows, domains: Sequence[DomainRewards]) -> np.ndarray:
    weights: np.ndarray = np.array([domain.weight for domain in domains], dtype=np.float64)[rows.domain_number.numpy()]
    return weights


def _scaled_and_clipped(rewards: np.ndarray, config: RewardShapingConfig) -> np.ndarray:
    scaled = rewards * config.scale
    return scaled if config.clip is None else scaled.clip(-config.clip, config.clip)


def _format(rows: RewardRows, domains: Sequence[DomainRewards]) -> np.ndarray:
    """Bonus where the pattern matches, minus the penalty where it does not, 0 in domains without a pattern."""
    bonus = np.array([domain.format.bonus if domain.format else 0.0 for domain in domains])
    penalty = np.array([domain.format.penalty if domain.format else 0.0 for domain in domains])
    number = rows.domain_number.numpy()
    changes: np.ndarray = np.where(rows.format_ok.numpy() > 0, bonus[number], -penalty[number])
    return changes


def _length(rows: RewardRows, config: LengthPenaltyConfig) -> np.ndarray:
    """linear: -coef * tokens / max_tokens. group: Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3) times coef."""
    lengths = _array(rows.policy_tokens)
    rewards: np.ndarray
    if config.kind == "linear":
        rewards = -config.coef * lengths / _array(rows.max_tokens)
        return rewards
    places, groups = group_places(rows.group)
    shortest, longest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(shortest, places, lengths)
    np.maximum.at(longest, places, lengths)
    span = (longest - shortest)[places]
    lam = config.coef * (0.5 - (lengths - shortest[places]) / np.where(span > 0, span, 1.0))
    lam = np.where(rows.correct.numpy() > 0, lam, np.minimum(0.0, lam))
    rewards = np.where(span > 0, lam, 0.0)
    return rewards


def _overlong(rows: RewardRows, config: OverlongConfig) -> np.ndarray:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) times `penalty`; max_tokens is the paper's L_max."""
    starts = _array(rows.max_tokens) - config.buffer_tokens
    rewards: np.ndarray = config.penalty * ((starts - _array(rows.policy_tokens)) / config.buffer_tokens).clip(-1.0, 0.0)
    return rewards


def _normalized(rewards: np.ndarray, rows: RewardRows, config: RewardNormalizationConfig, running: RunningMoments) -> np.ndarray:
    """Standard deviations have ddof 1; without spread nothing is divided, and what the mean leaves is exactly 0."""
    if len(rewards) == 0:
        return rewards
    if config.over == "group":
        places, groups = group_places(rows.group)
        means = group_means(rewards, places, groups)
        counts = np.bincount(places, minlength=groups)
        squares = np.bincount(places, (rewards - means[places]) ** 2, groups)
        mean, std = means[places], np.sqrt(squares / np.maximum(1, counts - 1))[places]
    else:
        moments = running if config.over == "running" else RunningMoments()
        moments.update(rewards)
        mean, std = np.full(len(rewards), moments.mean), np.full(len(rewards), moments.std)
    flat = std <= SPREAD_RESOLUTION * np.hypot(mean, std)
    shifted = np.where(flat, 0.0, rewards - mean) if config.mean else rewards
    result: np.ndarray = shifted / np.where(flat, 1.0, std) if config.std else shifted
    return result
