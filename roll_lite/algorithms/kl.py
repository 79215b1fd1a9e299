"""KL divergence from the reference: estimates from the log-probs of sampled tokens, the exact sum over a vocabulary, and controllers of its
coefficient.

KL always means KL(new || ref). With r = log new - log ref: k1 = r, k2 = r**2 / 2, k3 = exp(-r) - 1 + r (non-negative, low variance), abs =
|r|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this range before anything is made of them, exp above all."""


def clamped_log_ratio(log_probs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log_probs - other, limited to +-LOG_RATIO_LIMIT; 0 for a token that is impossible for both. Any shape."""
    impossible = (log_probs == -torch.inf) & (other == -torch.inf)
    return clamped(log_probs.masked_fill(impossible, 0.0) - other.masked_fill(impossible, 0.0))


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
    exact = ratio.double()  # near 0 both terms nearly cancel: float32 leaves little of them
    return (torch.expm1(-exact) + exact).to(ratio.dtype)


def full_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of whole distributions, sum over v of p * (log p - log q). [..., V] -> [...], differentiable in log_p.

    What p never chooses adds nothing to value or gradient, also where q never chooses it either: -inf in truncated vocabularies
    is no NaN. Log-ratios are not clamped, for none is exponentiated; only where q alone says -inf, LOG_RATIO_LIMIT stands for infinity.
    """
    log_q = log_q.detach()
    impossible = log_p == -torch.inf
    log_ratio = log_p.masked_fill(impossible, 0.0) - log_q.masked_fill(impossible, 0.0)
    log_ratio = log_ratio.masked_fill(log_ratio == torch.inf, LOG_RATIO_LIMIT)
    return (log_p.exp() * log_ratio).sum(-1, dtype=torch.float64).to(log_p.dtype)


def kl_loss(
    new: torch.Tensor, ref: torch.Tensor, estimator: KlEstimator, unbiased_gradient: bool = False, old: torch.Tensor | None = None
) -> torch.Tensor:
    """The estimate of each token with a gradient that is worth having; gradients flow to `new` only.

    Back-propagating k1 itself gives grad log new, whose expectation is 0: no pull towards ref at all. In its place k1 has the
    score-function gradient r * grad log new, which is the unbiased one for KL(new || ref) on tokens that `new` sampled; k2's own
    gradient is the same. k3's own gradient, (1 - exp(-r)) * grad log new, is the expectation
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
    # The difference is 0 and has the gradient of new; that of -inf would be NaN.
    impossible = current == -torch.inf
    return kl_estimate(current, ref.detach(), estimator) + slope * (new.masked_fill(impossible, 0.0) - current.masked_fill(impossible, 0.0))


LARGEST_ERROR = 0.2
"""However far the KL is off its target, the coefficient reacts to no more than this relative error."""


class KlController:
    """Holds the coefficient. With a target it is multiplied after each step with
    1 + clip(kl / target - 1, +-LARGEST_ERROR) * min(samples / horizon, 1).

    Ziegler et al. (arXiv 1909.08593). A step counts for at most one horizon, so that no batch can turn the coefficient's sign.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: float = math.inf) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def step(self, kl_per_token: float, samples: int) -> None:
        """Move the coefficient, once per training step over all domains. `kl`: measured in this step; ignored if not finite, since its
        update is skipped."""
        if self._target is None or samples == 0 or not math.isfinite(kl_per_token):
            return
        error = min(max(kl_per_token / self._target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * min(samples / self._horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """A fixed coefficient stays the configured one: changing it for a resumed run is the user's right."""
        if self._target is not None:
            self.coef = state["coef"]
