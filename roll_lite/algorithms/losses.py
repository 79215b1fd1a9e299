"""What the losses of single tokens are made from and made into, all [B, T-1] and 0 where masked; value loss and entropy bonus.

The policy losses are in `policy_losses.py`. How token losses become one number is `aggregation.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll_lite.algorithms.kl import clamped_log_ratio


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy loss is made from, all [B, T-1]; a rank that has run out of rows has B = 0. Gradients flow to log_probs only."""

    log_probs: torch.Tensor
    """Of the policy in training."""
    old_log_probs: torch.Tensor
    """Of the policy before the step."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool: the tokens that count."""

    def filled(self) -> PolicyTerms:
        """Masked entries 0, so that NaN there reaches neither loss nor gradient; what gets no gradient is detached."""
        masked = ~self.mask
        return PolicyTerms(
            self.log_probs.masked_fill(masked, 0.0),
            self.old_log_probs.detach().masked_fill(masked, 0.0),
            self.advantages.detach().masked_fill(masked, 0.0),
            self.mask,
        )

    @property
    def log_ratio(self) -> torch.Tensor:
        """log(new / old) of each token, clamped; of filled terms 0 where masked."""
        return clamped_log_ratio(self.log_probs, self.old_log_probs)

    @property
    def ratio(self) -> torch.Tensor:
        """new / old probability of each token; of filled terms 1 where masked."""
        return torch.exp(self.log_ratio)


@dataclass(frozen=True)
class PolicyLoss:
    """All [B, T-1]; every field but `loss` is detached."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """new / old probability as the loss judges it: the token's, or its sequence's where the loss looks at sequences; 1 where masked."""
    clipped_low: torch.Tensor
    """bool: no gradient because the ratio fell out of its range below. For losses that limit a weight and cut no token off: the
    weight was raised to its lower bound."""
    clipped_high: torch.Tensor
    """bool: no gradient because the ratio rose out of its range above. For losses that limit a weight: it was lowered to its bound."""


@dataclass(frozen=True)
class ValueLoss:
    """Both [B, T-1]."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """bool: the new value moved out of its range and the clipped error is the larger one: no gradient."""


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float | None
) -> ValueLoss:
    """0.5 * max((v - R)**2, (clip(v, old - clip, old + clip) - R)**2); without clip only the first. Inputs [B, T-1]."""
    values = values.masked_fill(~mask, 0.0)
    returns = returns.detach().masked_fill(~mask, 0.0)
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(loss=0.5 * error, clipped=torch.zeros_like(mask))
    old = old_values.detach().masked_fill(~mask, 0.0)
    clipped_error = (old + (values - old).clamp(-clip, clip) - returns).square()
    return ValueLoss(loss=0.5 * torch.maximum(error, clipped_error), clipped=(clipped_error > error).detach())


def entropy_loss(entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Minus the entropy of each token's distribution: to minimise it is to explore. [B, T-1] -> [B, T-1]."""
    return -entropy.masked_fill(~mask, 0.0)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """[B, T-1], 0 where masked -> [B, 1] of the same dtype, added up in float64: how far rows are padded changes nothing."""
    return x.sum(1, keepdim=True, dtype=torch.float64).to(x.dtype)


def row_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T-1], 0 where masked -> [B, 1], the mean over the row's policy tokens; 0 without any."""
    return (x.sum(1, keepdim=True, dtype=torch.float64) / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)
