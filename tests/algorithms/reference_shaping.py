"""Rewards and their shaping in plain Python, one sample and one formula at a time, written from the papers: nothing of roll_lite in it.

- Kimi k1.5 (arXiv 2501.12599), section 2.3.3: the length reward.
- DAPO (arXiv 2503.14476), eq. 13: soft overlong punishment.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def kimi_length_rewards(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Of the responses to one prompt."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    rewards = []
    for length, right in zip(lengths, correct, strict=True):
        lam = 0.5 - (length - shortest) / (longest - shortest)
        rewards.append(lam if right else min(0.0, lam))
    return rewards


def dapo_overlong(length: int, longest: int, cache: int) -> float:
    if length <= longest - cache:
        return 0.0
    if longest - cache < length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def normalised(values: Sequence[float], over: Sequence[float], mean: bool, std: bool) -> list[float]:
    """By the sample mean and the standard deviation (ddof 1) of `over`; a spread of zero divides nothing."""
    centre = statistics.fmean(over)
    spread = statistics.stdev(over) if len(over) > 1 else 0.0
    if max(over) == min(over):
        spread = 0.0
    return [(value - (centre if mean else 0.0)) / (spread if std and spread else 1.0) for value in values]


def placed(rewards: Sequence[float], mask: Sequence[Sequence[bool]], kl: Sequence[Sequence[float]], coef: float) -> list[list[float]]:
    """Token rewards: KL on each policy token, the reward on the last."""
    tokens = []
    for reward, chosen, row in zip(rewards, mask, kl, strict=True):
        out = [-coef * k if on else 0.0 for on, k in zip(chosen, row, strict=True)]
        places = [t for t, on in enumerate(chosen) if on]
        if places:
            out[places[-1]] += reward
        tokens.append(out)
    return tokens


def moments(values: Sequence[float]) -> tuple[int, float, float]:
    """(count, mean, sum of squared deviations)"""
    mean = math.fsum(values) / len(values)
    return len(values), mean, math.fsum((value - mean) ** 2 for value in values)
