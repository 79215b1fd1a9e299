"""Advantage estimators written from their papers: plain loops over Python lists, one response (its policy tokens) or one group at a time.

Imports nothing of roll_lite. The papers' symbols where they help.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float, last_value: float = 0.0) -> list[float]:
    """arXiv 1506.02438, eq. 16: sum over l of (gamma lam)^l delta_{t+l}, literally. last_value is V after the last token."""
    n = len(rewards)
    after = [*values[1:], last_value]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [math.fsum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


def lambda_returns(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float, last_value: float = 0.0) -> list[float]:
    """The critic's targets as the lambda-weighted mean of n-step returns (Sutton and Barto, 12.3), not by way of advantages.

    G^(n)_t = r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n V_{t+n}; the one that reaches the end takes what weight is left.
    """
    length = len(rewards)
    after = [*values, last_value]
    targets = []
    for t in range(length):
        target = 0.0
        for n in range(1, length - t + 1):
            n_step = math.fsum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * after[t + n]
            target += n_step * ((1 - lam) * lam ** (n - 1) if t + n < length else lam ** (n - 1))
        targets.append(target)
    return targets


def vapo_lambda(length: int, alpha: float) -> float:
    """arXiv 2504.05118, section 4.2: sum over t of lam^t, 1 / (1 - lam), is alpha * l; never below 0."""
    return max(0.0, 1.0 - 1.0 / (alpha * length))


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    return [math.fsum(gamma**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]


def grpo(group: Sequence[float], epsilon: float = 1e-6) -> list[float]:
    """arXiv 2402.03300, section 4.1.2; the standard deviation of the sample (ddof 1)."""
    mean = math.fsum(group) / len(group)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (len(group) - 1))
    return [(r - mean) / (std + epsilon) for r in group]


def dr_grpo(group: Sequence[float]) -> list[float]:
    """arXiv 2503.20783, section 3.2."""
    mean = math.fsum(group) / len(group)
    return [r - mean for r in group]


def rloo(group: Sequence[float]) -> list[float]:
    """arXiv 2402.14740, eq. 8: each sample against the mean of the k - 1 others."""
    k = len(group)
    return [group[i] - math.fsum(group[j] for j in range(k) if j != i) / (k - 1) for i in range(k)]


def opo(group: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """arXiv 2505.23585, eq. 10: b = sum of l_i r_i / sum of l_i."""
    baseline = math.fsum(length * r for length, r in zip(lengths, group, strict=True)) / sum(lengths)
    return [r - baseline for r in group]


def gpg(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """arXiv 2504.02546, eq. 6 and 7, F_norm = 1: alpha = B / (B - M), with M the samples of groups that give no gradient."""
    samples = sum(len(group) for group in groups)
    without = sum(len(group) for group in groups if all(r == group[0] for r in group))
    return [[samples / (samples - without) * a for a in dr_grpo(group)] for group in groups]


def reinforce_plus_plus(responses: Sequence[Sequence[float]], gamma: float, epsilon: float = 1e-8) -> list[list[float]]:
    """arXiv 2501.03262, section 3: returns of every token, normalised with mean and variance over all tokens of the batch."""
    returns = [discounted_returns(rewards, gamma) for rewards in responses]
    flat = [g for row in returns for g in row]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((g - mean) ** 2 for g in flat) / (len(flat) - 1)
    return [[(g - mean) / math.sqrt(variance + epsilon) for g in row] for row in returns]


def remax(reward: float, greedy_reward: float) -> float:
    """arXiv 2310.10505, algorithm 2."""
    return reward - greedy_reward
