"""Advantages of whole samples, from the rewards of the whole global batch: [N] -> [N] float64.

Groups are told apart by id, wherever their rows stand, and may be uneven. A group without spread, a group of one among them, has
advantage exactly 0: rounding must not be scaled up to a signal, and a group of one says nothing about its sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

STD_OFFSET = 1e-6
"""Added to a group's standard deviation."""


@dataclass(frozen=True)
class _Groups:
    """Rewards, and what each row's group says of it; all [N]."""

    rewards: torch.Tensor
    member: torch.Tensor
    """Number of the row's group, 0 and up."""
    size: torch.Tensor
    mean: torch.Tensor
    flat: torch.Tensor
    """bool: all rewards of the group are equal."""

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
        """The estimate, exactly 0 in flat groups."""
        return torch.where(self.flat, 0.0, estimate)


def _sum_of_group(x: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """The sum over each row's group, as a number per row. [N], [N] -> [N]."""
    groups = int(member.max()) + 1 if len(member) else 0
    return x.new_zeros(groups).index_add(0, member, x)[member]


def grpo(rewards: torch.Tensor, groups: torch.Tensor, normalize_std: bool, before_kl: torch.Tensor | None = None) -> torch.Tensor:
    """Reward minus its group's mean, optionally over the group's standard deviation (ddof 1). Without it: Dr. GRPO.

    before_kl [N]: the rewards without what their samples pay for KL. A group without spread in these gets 0 where the deviation would be
    divided by: it would be KL's alone, and be scaled up to a signal however small it is.
    """
    of = _Groups.of(rewards, groups)
    if normalize_std and before_kl is not None:
        of = replace(of, flat=_Groups.of(before_kl, groups).flat)
    centered = of.rewards - of.mean
    if normalize_std:
        variance = _sum_of_group(centered.square(), of.member) / (of.size - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + STD_OFFSET)
    return of.advantages(centered)


def minus_group_mean(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The rewards of REINFORCE++ with the group as baseline."""
    return grpo(rewards, groups, normalize_std=False)


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean reward of the group's other samples, which is (reward - group mean) * n / (n - 1)."""
    of = _Groups.of(rewards, groups)
    return of.advantages((of.rewards - of.mean) * of.size / (of.size - 1).clamp(min=1))


def opo(rewards: torch.Tensor, groups: torch.Tensor, policy_tokens: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean reward weighted with the samples' lengths. A group of empty responses has no such mean: 0."""
    of = _Groups.of(rewards, groups)
    lengths = policy_tokens.double()
    total = _sum_of_group(lengths, of.member)
    baseline = _sum_of_group(lengths * of.rewards, of.member) / total.clamp(min=1)
    return of.advantages(torch.where(total > 0, of.rewards - baseline, 0.0))


def gpg(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(reward - group mean) * samples / samples of groups with spread: flat groups do not thin out the gradient."""
    of = _Groups.of(rewards, groups)
    spread = int((~of.flat).sum())
    return of.advantages((of.rewards - of.mean) * (len(of.rewards) / max(1, spread)))


def remax(rewards: torch.Tensor, baseline_scores: torch.Tensor) -> torch.Tensor:
    """Reward minus the score of the greedy response to the same prompt; needs no group."""
    return rewards.double() - baseline_scores.double()
