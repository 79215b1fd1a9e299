"""Losses as users write them, right and wrong ones."""

from __future__ import annotations

import torch

from roll_lite.algorithms.losses import PolicyLoss, PolicyTerms


def bare(terms: PolicyTerms, scale: float = 1.0) -> torch.Tensor:
    return -scale * terms.advantages * terms.log_probs


def whole(terms: PolicyTerms, bound: float) -> PolicyLoss:
    ratio = terms.ratio
    high = ratio.detach() > bound
    return PolicyLoss(-ratio.clamp(max=bound) * terms.advantages + 1.0, ratio, torch.zeros_like(high), high)


def mean(terms: PolicyTerms) -> torch.Tensor:
    return bare(terms).mean()


def number(terms: PolicyTerms) -> float:
    return 0.0


def infinite(terms: PolicyTerms) -> torch.Tensor:
    return -terms.log_probs / (terms.advantages * 0)


def detached(terms: PolicyTerms) -> torch.Tensor:
    return bare(terms).detach()


def asks(
    terms: PolicyTerms, rollout_log_probs: torch.Tensor, *, entropy: torch.Tensor, ref_log_probs: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    return -terms.advantages * (terms.log_probs + 2 * rollout_log_probs + 3 * ref_log_probs) - scale * entropy
