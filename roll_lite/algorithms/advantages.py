"""Advantages and whitening.

Token tensors are [B, T-1]; entry t belongs to token t + 1. The bool mask is True for tokens that the policy generated; others, such as tool
output, are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from roll_lite.algorithms import kernels
from roll_lite.algorithms.kernels import Whitening

STD_OFFSET = 1e-6

VARIANCE_OFFSET = 1e-8


# ---------------------------------------------------------------- token rewards


def last_policy_token(mask: torch.Tensor) -> torch.Tensor:
    """Index of each row's last policy token, [B]; -1 for rows without policy tokens."""
    # Byte search from the end: under 1 ms at 512 x 32k, where an argmax over positions takes tens of ms.
    return torch.tensor([row.tobytes().rfind(1) for row in mask.numpy()], dtype=torch.int64)


def token_rewards(rewards: torch.Tensor, mask: torch.Tensor, kl_rewards: torch.Tensor | None = None) -> torch.Tensor:
    """Put each row's reward on its last policy token and add kl_rewards, [B, T-1]."""
    # float64, since a token's KL may be millions of times smaller than the reward.
    # numpy allocates huge pages and zeroes lazily: torch.zeros takes 60 ms at 512 x 32k.
    tokens = torch.from_numpy(np.zeros(mask.shape))
    if kl_rewards is not None:
        torch.where(mask, kl_rewards.double(), torch.zeros((), dtype=torch.float64), out=tokens)
    last = last_policy_token(mask)
    rows = (last >= 0).nonzero().squeeze(1)
    tokens[rows, last[rows]] += rewards[rows].double()
    return tokens


# ---------------------------------------------------------------- advantages of tokens


def gae(
    token_rewards: torch.Tensor | None,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
    lam_critic: float | None = None,
    bootstrap: torch.Tensor | None = None,
    last_token_reward: torch.Tensor | None = None,
    whitening: Whitening | None = None,
    per_turn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) of GAE. Returns: values plus advantages computed with lam_critic (None: lam).

    lam: one number, or [B]. last_token_reward [B]: added to the reward of each row's last policy token. bootstrap [B]: value after that
    token (None: 0). per_turn: gamma discounts only from turn to turn; a turn is an unbroken run of policy tokens.
    """
    rows = (last_token_reward, lam, lam if lam_critic is None else lam_critic, bootstrap)
    outputs = (values.dtype, values.dtype)
    advantages, returns = kernels.recurrence(kernels.gae, mask, (token_rewards, values), gamma, rows, outputs, whitening, per_turn)
    return advantages, returns


def length_adaptive_lambda(policy_tokens: torch.Tensor, alpha: float) -> torch.Tensor:
    """VAPO's lambda of GAE, [B]."""
    return (1 - 1 / (alpha * policy_tokens.double().clamp(min=1))).clamp(min=0)


def reinforce(
    token_rewards: torch.Tensor | None,
    mask: torch.Tensor,
    gamma: float,
    last_token_reward: torch.Tensor | None = None,
    whitening: Whitening | None = None,
    per_turn: bool = False,
) -> torch.Tensor:
    """Discounted return of each policy token. Arguments as in `gae`."""
    dtype = torch.float32 if token_rewards is None else token_rewards.dtype
    kernel, rows = kernels.discounted_returns, (last_token_reward,)
    (returns,) = kernels.recurrence(kernel, mask, (token_rewards,), gamma, rows, (dtype,), whitening, per_turn)
    return returns


def spread_over_tokens(advantages: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert advantages.shape == mask.shape[:1], f"a row tensor {list(advantages.shape)} beside a mask {list(mask.shape)}"
    spread = kernels.empty(mask.shape, dtype)
    return torch.where(mask, advantages.detach().to(spread.dtype)[:, None], torch.zeros((), dtype=spread.dtype), out=spread)


def policy_token_counts(mask: torch.Tensor) -> torch.Tensor:
    # torch's sum over a bool tensor takes 20 times as long.
    return torch.from_numpy(np.count_nonzero(mask.numpy(), axis=1).astype(np.int64))


# ---------------------------------------------------------------- advantages of samples
#
# Functions of the global batch's rewards, [N] -> [N] float64. Rows with equal group ids form a group; sizes may differ. A group with equal
# rewards (also a group of one) has advantage exactly 0, so that rounding errors are not scaled up to a signal.


@dataclass(frozen=True)
class _Groups:
    rewards: torch.Tensor
    member: torch.Tensor
    size: torch.Tensor
    mean: torch.Tensor
    flat: torch.Tensor
    """[N] bool: all rewards of the row's group are equal."""

    @classmethod
    def of(cls, rewards: torch.Tensor, groups: torch.Tensor) -> _Groups:
        exact = rewards.double()
        ids, member = torch.unique(groups, return_inverse=True)
        highest, lowest = (
            exact.new_zeros(len(ids)).scatter_reduce(0, member, exact, kind, include_self=False) for kind in ("amax", "amin")
        )
        size = _sum_of_group(torch.ones_like(exact), member)
        return cls(exact, member, size, _sum_of_group(exact, member) / size, (highest == lowest)[member])

    def advantages(self, estimate: torch.Tensor) -> torch.Tensor:
        return torch.where(self.flat, 0.0, estimate)


def _sum_of_group(x: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    groups = int(member.max()) + 1 if len(member) else 0
    return x.new_zeros(groups).index_add(0, member, x)[member]


def grpo(rewards: torch.Tensor, groups: torch.Tensor, normalize_std: bool, before_kl: torch.Tensor | None = None) -> torch.Tensor:
    """Subtract the group mean (Dr. GRPO). With `normalize_std`, also divide by the group's standard deviation (GRPO). A group whose rewards
    without KL (`before_kl` [N]) are equal then gets 0: the division would magnify small KL differences."""
    of = _Groups.of(rewards, groups)
    if normalize_std and before_kl is not None:
        of = replace(of, flat=_Groups.of(before_kl, groups).flat)
    centered = of.rewards - of.mean
    if normalize_std:
        variance = _sum_of_group(centered.square(), of.member) / (of.size - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + STD_OFFSET)
    return of.advantages(centered)


def discounted_turns(rewards: torch.Tensor, rows: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return each turn's reward plus the discounted rewards of the row's later turns. Turns are sorted by row, then by time."""
    returns = rewards.double().clone()
    for turn in range(len(returns) - 2, -1, -1):
        if rows[turn] == rows[turn + 1]:
            returns[turn] += gamma * returns[turn + 1]
    return returns


def minus_group_mean(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return grpo(rewards, groups, normalize_std=False)


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Subtract the mean reward of the other samples in the group."""
    of = _Groups.of(rewards, groups)
    return of.advantages((of.rewards - of.mean) * of.size / (of.size - 1).clamp(min=1))


def opo(rewards: torch.Tensor, groups: torch.Tensor, policy_tokens: torch.Tensor) -> torch.Tensor:
    """Subtract the group's mean reward, in which a sample's weight is its number of policy tokens. A group without policy tokens gets 0."""
    of = _Groups.of(rewards, groups)
    lengths = policy_tokens.double()
    total = _sum_of_group(lengths, of.member)
    baseline = _sum_of_group(lengths * of.rewards, of.member) / total.clamp(min=1)
    return of.advantages(torch.where(total > 0, of.rewards - baseline, 0.0))


def gpg(
    rewards: torch.Tensor, groups: torch.Tensor, before_kl: torch.Tensor | None = None, trains: torch.Tensor | None = None
) -> torch.Tensor:
    """Subtract the group mean, and multiply by n / m: of n samples, m are in groups with unequal rewards. Otherwise groups with equal
    rewards would shrink the gradient. before_kl [N]: rewards without KL, which decide if a group's rewards are equal. trains [N]
    bool: samples to count; None: all."""
    of = _Groups.of(rewards, groups)
    spread = ~(of if before_kl is None else _Groups.of(before_kl, groups)).flat
    counted = torch.ones_like(spread) if trains is None else trains
    return of.advantages((of.rewards - of.mean) * (int(counted.sum()) / max(1, int((counted & spread).sum()))))


def remax(rewards: torch.Tensor, baseline_scores: torch.Tensor) -> torch.Tensor:
    """Subtract the score of the greedy response to the prompt."""
    return rewards.double() - baseline_scores.double()


# ---------------------------------------------------------------- whitening
#
# Over the policy tokens of the global batch; moments are (count, sum, sum of squared deviations from the mean), float64.


def merged_moments(parts: torch.Tensor) -> torch.Tensor:
    """Merge moments, [N, 3] -> [3]."""
    counts, sums, squares = parts.unbind(1)
    count, total = counts.sum(), sums.sum()
    shifts = torch.where(counts > 0, sums / counts.clamp(min=1), 0.0) - total / count.clamp(min=1)
    return torch.stack([count, total, (squares + counts * shifts.square()).sum()])


def mean_and_scale(moments: torch.Tensor) -> tuple[float, float]:
    count, total, squares = moments.tolist()
    return total / max(1.0, count), (squares / max(1.0, count - 1.0) + VARIANCE_OFFSET) ** -0.5


def whiten_tokens(advantages: torch.Tensor, mask: torch.Tensor, whitening: Whitening) -> torch.Tensor:
    return kernels.shift_and_scale(advantages, mask, *whitening(kernels.row_moments(advantages, mask)))


def whiten_samples(advantages: torch.Tensor, policy_tokens: torch.Tensor, whitening: Whitening) -> torch.Tensor:
    """Whiten the samples' advantages [B]. A sample's weight is its number of policy tokens."""
    exact, counts = advantages.double(), policy_tokens.double()
    mean, scale = whitening(torch.stack([counts, counts * exact, torch.zeros_like(exact)], dim=1))
    return (exact - mean) * scale
