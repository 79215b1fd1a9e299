"""KL(new || reference): token estimates (k1, k2, k3, abs), exact sum over the vocabulary, adaptive coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_LIMIT = 20.0


def clamped_log_ratio(log_probs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return log_probs - other, clamped to +-LOG_RATIO_LIMIT; 0 for tokens impossible under both policies."""
    impossible = (log_probs == -torch.inf) & (other == -torch.inf)
    return clamped(log_probs.masked_fill(impossible, 0.0) - other.masked_fill(impossible, 0.0))


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_estimate(new: torch.Tensor, ref: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimate KL(new || ref) of each token. For training use `kl_loss`: the gradient of this estimate is not the gradient of KL."""
    ratio = clamped_log_ratio(new, ref)
    if estimator == "k1":
        return ratio
    if estimator == "k2":
        return ratio.square() / 2
    if estimator == "abs":
        return ratio.abs()
    exact = ratio.double()  # near 0 both terms nearly cancel
    return (torch.expm1(-exact) + exact).to(ratio.dtype)


def full_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) over the vocabulary, [..., V] -> [...], differentiable in log_p. Tokens impossible under p contribute nothing; for those
    impossible only under q, the log-ratio is LOG_RATIO_LIMIT."""
    log_q = log_q.detach()
    impossible = log_p == -torch.inf
    log_ratio = log_p.masked_fill(impossible, 0.0) - log_q.masked_fill(impossible, 0.0)
    # Other log-ratios are not clamped, since none is exponentiated.
    log_ratio = log_ratio.masked_fill(log_ratio == torch.inf, LOG_RATIO_LIMIT)
    return (log_p.exp() * log_ratio).sum(-1, dtype=torch.float64).to(log_p.dtype)


def kl_loss(
    new: torch.Tensor, ref: torch.Tensor, estimator: KlEstimator, unbiased_gradient: bool = False, old: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimate each token's KL(new || ref) from log-probs. Only `new` gets a gradient; descent along it lowers KL.

    The gradient is s * grad new. With r = new - ref, s is r for k1 and k2 (unbiased on tokens sampled by the new policy), 1 - exp(-r) for
    k3, sign(r) for abs. With unbiased_gradient, s is exp(new - old) * r (unbiased on tokens sampled by the old policy).
    """
    # The clamp limits r in the gradient, but does not stop it: distant tokens are still pulled back, unless k3's exp saturates.
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
    # new - current is 0 with the gradient of new; for -inf it would be NaN.
    impossible = current == -torch.inf
    return kl_estimate(current, ref.detach(), estimator) + slope * (new.masked_fill(impossible, 0.0) - current.masked_fill(impossible, 0.0))


LARGEST_ERROR = 0.2


class KlController:
    """KL coefficient. With a target, each step multiplies it by 1 + clip(kl / target - 1, +-LARGEST_ERROR) * min(samples / horizon, 1)
    (arXiv 1909.08593). The minimum keeps it positive for batches larger than `horizon`."""

    def __init__(self, coef: float, target: float | None = None, horizon: float = math.inf) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def step(self, kl_per_token: float, samples: int) -> None:
        if self._target is None or samples == 0 or not math.isfinite(kl_per_token):
            return
        error = min(max(kl_per_token / self._target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * min(samples / self._horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self._target is not None:
            self.coef = state["coef"]
