"""KL divergence from the reference: estimates from the log-probs of tokens that `new` sampled, and the exact sum over a vocabulary.

KL always means KL(new || ref). With r = log new - log ref: k1 = r, k2 = r**2 / 2, k3 = exp(-r) - 1 + r (non-negative, low
variance), abs = |r|.
"""

from __future__ import annotations

from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this range before anything is made of them, exp above all."""


def clamped_log_ratio(log_probs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log_probs - other, limited to +-LOG_RATIO_LIMIT. Any shape."""
    return clamped(log_probs - other)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """A log-ratio, or a sum of them, limited to +-LOG_RATIO_LIMIT. Any shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_estimate(new: torch.Tensor, ref: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """The estimate of each token, without meaning for its gradient (see `kl_loss`). Same shape as the inputs."""
    ratio = clamped_log_ratio(new, ref)
    if estimator == "k1":
        return ratio
    if estimator == "k2":
        return ratio.square() / 2
    if estimator == "abs":
        return ratio.abs()
    return torch.expm1(-ratio) + ratio


def full_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of whole distributions, sum over v of p * (log p - log q). [..., V] -> [...], differentiable in log_p.

    What p never chooses adds nothing to value or gradient, also where q never chooses it either: -inf in truncated vocabularies
    is no NaN. Where q alone says -inf the clamp makes the sum large instead of infinite.
    """
    log_q = log_q.detach()
    impossible = log_p == -torch.inf
    log_ratio = clamped_log_ratio(log_p.masked_fill(impossible, 0.0), log_q.masked_fill(impossible, 0.0))
    return (log_p.exp() * log_ratio).sum(-1)


def kl_loss(
    new: torch.Tensor, ref: torch.Tensor, estimator: KlEstimator, unbiased_gradient: bool = False, old: torch.Tensor | None = None
) -> torch.Tensor:
    """The estimate of each token with a gradient that is worth having; gradients flow to `new` only.

    Back-propagating k1 itself gives grad log new, whose expectation is 0: no pull towards ref at all. With the
    score-function term added, k1 has the gradient r * grad log new, which is the unbiased one for KL(new || ref) on tokens
    that `new` sampled; k2's own gradient is the same. k3's own gradient, (1 - exp(-r)) * grad log new, is the expectation
    of another divergence, KL(ref || new): it vanishes in the same place and is what GRPO uses. abs pulls every token with the
    same force, sign(r) * grad log new.
    unbiased_gradient: any estimate's value with the gradient (new / old) * r * grad log new, that of KL(new || ref) also on tokens
    that an older policy sampled; without `old` its ratio is 1.
    The clamp bounds r in the gradient and does not cut it off, so that a token far away is still pulled; only where the exp
    of k3 saturates is there none.
    """
    current = new.detach()
    log_ratio = clamped_log_ratio(current, ref.detach())
    if unbiased_gradient:
        slope = log_ratio if old is None else torch.exp(clamped_log_ratio(current, old.detach())) * log_ratio
    elif estimator == "k3":
        slope = torch.where(log_ratio > -LOG_RATIO_LIMIT, -torch.expm1(-log_ratio), 0.0)
    elif estimator == "abs":
        slope = log_ratio.sign()
    else:
        slope = log_ratio
    return kl_estimate(current, ref.detach(), estimator) + slope * (new - current)
