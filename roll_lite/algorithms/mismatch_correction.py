"""Correction for what engine and trainer see differently: each token's policy loss is weighted with trainer over engine.

The engine sampled the tokens, so exp(old - rollout) is the importance weight of the policy that the loss believes to have sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll_lite.algorithms.kl import clamped, clamped_log_ratio
from roll_lite.algorithms.losses import row_mean, row_sum
from roll_lite.config.schema import MismatchCorrectionConfig


@dataclass(frozen=True)
class MismatchCorrection:
    """Both [B, T-1], detached."""

    weight: torch.Tensor
    """Factor of the token's policy loss; 0 where masked. A token of weight 0 stays in the aggregation's denominator."""
    limited: torch.Tensor
    """bool: the token's weight was outside of the range."""


def mismatch_correction(
    config: MismatchCorrectionConfig, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> MismatchCorrection:
    """Weights exp(old - rollout) of tokens, of sequences (their product) or of their geometric mean, kept in [low, high].

    truncate limits them to the range (TIS), mask makes them 0 outside of it (IcePop). Inputs [B, T-1].
    """
    old = old_log_probs.detach().masked_fill(~mask, 0.0)
    log_weight = clamped_log_ratio(old, rollout_log_probs.detach().masked_fill(~mask, 0.0))
    if config.level == "sequence":
        log_weight = clamped(row_sum(log_weight)).expand_as(old)
    elif config.level == "geometric":
        log_weight = row_mean(log_weight, mask).expand_as(old)
    weight = torch.exp(log_weight)
    limited = mask & ((weight < config.low) | (weight > config.high))
    kept = weight.clamp(config.low, config.high) if config.mode == "truncate" else weight.masked_fill(limited, 0.0)
    return MismatchCorrection(kept.masked_fill(~mask, 0.0), limited)
