"""Token losses [B, T-1], correction of the engine-trainer mismatch, and row weights.

Pass `PolicyTerms.filled()` to policy losses. Sequence-level losses repeat the sequence's loss on each policy token. Tokens with advantage 0
have no gradient (except in Kimi's loss) and do not count as clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from roll_lite.algorithms.kl import LOG_RATIO_LIMIT, KlEstimator, clamped, clamped_log_ratio, kl_estimate

ROUNDING = 1e-4
"""Minimum relative change of a ratio by its limits to count as clipped; smaller changes are float32 rounding."""

# ---------------------------------------------------------------- inputs and result of a policy loss


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of a policy loss, [B, T-1]. Gradients flow to log_probs only."""

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    def filled(self) -> PolicyTerms:
        """Put zeros outside the mask, so that NaN there reaches neither loss nor gradient. Tokens with advantage 0 that are impossible
        under both policies also get log-probs 0."""
        masked, advantages = ~self.mask, self.advantages.detach()
        impossible = (self.log_probs == -torch.inf) & (self.old_log_probs == -torch.inf)
        nothing = masked | (impossible & (advantages == 0))
        return PolicyTerms(
            self.log_probs.masked_fill(nothing, 0.0),
            self.old_log_probs.detach().masked_fill(nothing, 0.0),
            advantages.masked_fill(masked, 0.0),
            self.mask,
        )

    @property
    def log_ratio(self) -> torch.Tensor:
        return clamped_log_ratio(self.log_probs, self.old_log_probs)

    @property
    def beyond_low(self) -> torch.Tensor:
        """[B, T-1] bool: the log-ratio is below -LOG_RATIO_LIMIT, so it is clamped and has no gradient."""
        return self.mask & (self.log_probs.detach() - self.old_log_probs < -LOG_RATIO_LIMIT)

    @property
    def beyond_high(self) -> torch.Tensor:
        return self.mask & (self.log_probs.detach() - self.old_log_probs > LOG_RATIO_LIMIT)

    @property
    def ratio(self) -> torch.Tensor:
        return torch.exp(self.log_ratio)


@dataclass(frozen=True)
class PolicyLoss:
    """Result of a policy loss, [B, T-1], detached except `loss`."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """New / old probability of the token (sequence-level losses: of the sequence); 1 where masked."""
    clipped_low: torch.Tensor
    """bool: the ratio is below its clip range, so the token has no gradient. In cispo and topr the token keeps its gradient, its
    weight raised to the bound."""
    clipped_high: torch.Tensor
    """bool: like clipped_low, for a ratio above its clip range."""


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum each row in float64, [B, T-1] -> [B, 1]: padding then does not change the result."""
    return x.sum(1, keepdim=True, dtype=torch.float64).to(x.dtype)


def row_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of each row over policy tokens, [B, 1]; 0 for a row without policy tokens."""
    return (x.sum(1, keepdim=True, dtype=torch.float64) / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


# ---------------------------------------------------------------- policy losses


def ppo(terms: PolicyTerms, clip_low: float, clip_high: float, dual_clip: float | None) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (arXiv 1707.06347). dual_clip (arXiv 1912.09729) limits the loss to
    dual_clip * |A| for A < 0."""
    ratio, advantages = terms.ratio, terms.advantages
    loss = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    ratio = ratio.detach()
    high = (advantages > 0) & (ratio > 1 + clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
        high |= (advantages < 0) & (ratio > dual_clip)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    trains = advantages != 0
    return PolicyLoss(loss, ratio, low | (trains & terms.beyond_low), high | (trains & terms.beyond_high))


def gspo(terms: PolicyTerms, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO with one ratio per sequence, exp(mean of token log-ratios), and the sequence's mean advantage (arXiv 2507.18071)."""
    ratio = torch.exp(row_mean(terms.log_ratio, terms.mask))
    advantages = row_mean(terms.advantages, terms.mask)
    loss = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    ratio = ratio.detach()
    low, high = (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)
    beyond = (advantages != 0) & ~low & ~high  # in sequences that keep their gradient
    mask = terms.mask
    return PolicyLoss(
        torch.where(mask, loss, 0.0),
        torch.where(mask, ratio, 1.0),
        mask & (low | (beyond & terms.beyond_low)),
        mask & (high | (beyond & terms.beyond_high)),
    )


def gmpo(terms: PolicyTerms, log_clip_low: float, log_clip_high: float) -> PolicyLoss:
    """-A * geometric mean of the clipped token ratios (arXiv 2507.20673). A is the row's mean advantage. Ratios are clipped from above if A
    > 0, else from below. Only clipped tokens lose their gradient."""
    log_ratio, advantages = terms.log_ratio, row_mean(terms.advantages, terms.mask)
    limited = torch.where(advantages > 0, log_ratio.clamp(max=log_clip_high), log_ratio.clamp(min=-log_clip_low))
    loss = -advantages * torch.exp(row_mean(limited, terms.mask))
    log_ratio, trains = log_ratio.detach(), advantages != 0
    low = ((advantages < 0) & (log_ratio < -log_clip_low)) | (trains & terms.beyond_low)
    high = ((advantages > 0) & (log_ratio > log_clip_high)) | (trains & terms.beyond_high)
    return PolicyLoss(torch.where(terms.mask, loss, 0.0), log_ratio.exp(), low, high)


def cispo(terms: PolicyTerms, clip_low: float | None, clip_high: float) -> PolicyLoss:
    """-weight * A * log-prob with detached weight clip(ratio, 1 - clip_low, 1 + clip_high) (arXiv 2506.13585). Tokens with a limited weight
    count as clipped, but keep their gradient."""
    ratio = terms.ratio.detach()
    lowest = 0.0 if clip_low is None else 1 - clip_low
    return _weighted(terms, ratio, ratio.clamp(lowest, 1 + clip_high), terms.mask)


def topr(terms: PolicyTerms, positive: tuple[float, float], negative: tuple[float, float]) -> PolicyLoss:
    """-weight * A * log-prob (arXiv 2503.14286). The weight is the sequence's detached ratio, limited to `positive` for A > 0, else to
    `negative`. A range (x, x) is a fixed weight and never counts as clipped."""
    ratio = torch.exp(clamped(row_sum(terms.log_ratio.detach())))
    above = terms.advantages > 0
    weight = torch.where(above, ratio.clamp(*positive), ratio.clamp(*negative))
    limits = torch.where(above, positive[0] < positive[1], negative[0] < negative[1])
    return _weighted(terms, torch.where(terms.mask, ratio, 1.0), weight, limits)


def policy_gradient(terms: PolicyTerms) -> PolicyLoss:
    return unclipped(-_weighted_log_probs(terms.advantages, terms), terms)


def raft(terms: PolicyTerms) -> PolicyLoss:
    """-log-prob of tokens with positive advantage (arXiv 2304.06767)."""
    return unclipped(-_weighted_log_probs((terms.advantages > 0).to(terms.log_probs.dtype), terms), terms)


def sapo(terms: PolicyTerms, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """-4 / tau * sigmoid(tau * (ratio - 1)) * A (arXiv 2511.20347). tau is tau_positive for A > 0, else tau_negative."""
    ratio = terms.ratio
    positive, negative = (torch.sigmoid(tau * (ratio - 1)) * (4 / tau) for tau in (tau_positive, tau_negative))
    loss = -torch.where(terms.advantages > 0, positive, negative) * terms.advantages
    return _clamp_only_loss(loss, terms, terms.advantages != 0)


def kimi(terms: PolicyTerms, tau: float) -> PolicyLoss:
    """(A - tau * s)**2 / (2 * tau), where s is the sum of a row's clamped log-ratios and A its mean advantage (arXiv 2501.12599). As tau
    goes to 0, the gradient becomes the policy gradient."""
    advantages = row_mean(terms.advantages, terms.mask)
    # s is not clamped: nothing is exponentiated, and a clamp would end the pull towards the old policy where it is needed most.
    loss = (advantages - tau * row_sum(terms.log_ratio)).square() / (2 * tau)
    return _clamp_only_loss(torch.where(terms.mask, loss, 0.0), terms, terms.mask)


def _clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def _weighted(terms: PolicyTerms, ratio: torch.Tensor, weight: torch.Tensor, limits: torch.Tensor) -> PolicyLoss:
    """Loss -weight * A * log-prob. `weight`: the detached, limited ratio. `limits` bool: tokens that may count as clipped."""
    counted = limits & (terms.advantages != 0)
    low, high = weight > ratio * (1 + ROUNDING), weight < ratio * (1 - ROUNDING)
    return PolicyLoss(-_weighted_log_probs(weight * terms.advantages, terms), ratio, counted & low, counted & high)


def _weighted_log_probs(weight: torch.Tensor, terms: PolicyTerms) -> torch.Tensor:
    """Compute weight * log-prob; 0 for weight 0, even if the log-prob is -inf."""
    return weight * terms.log_probs.masked_fill(weight == 0, 0.0)


def unclipped(loss: torch.Tensor, terms: PolicyTerms) -> PolicyLoss:
    never = torch.zeros_like(terms.mask)
    return PolicyLoss(loss, terms.ratio.detach(), never, never)


def _clamp_only_loss(loss: torch.Tensor, terms: PolicyTerms, trains: torch.Tensor) -> PolicyLoss:
    """Wrap a loss limited only by the clamp of the log-ratio."""
    return PolicyLoss(loss, terms.ratio.detach(), trains & terms.beyond_low, trains & terms.beyond_high)


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "topr": topr,
    "sapo": sapo,
    "policy_gradient": policy_gradient,
    "raft": raft,
    "kimi": kimi,
}


# ---------------------------------------------------------------- mismatch between engine and trainer


#
# Log-probs [B, T-1] of the engine's tokens, detached: `trained` by the policy that the loss assumes to have sampled them, `rollout` by the
# engine. A token of weight 0 stays in the aggregation's denominator.


def mismatch_weights(
    trained: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    level: Literal["token", "sequence", "geometric"],
    mode: Literal["truncate", "mask"],
    low: float,
    high: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute importance weights exp(trained - rollout), and a bool mask of weights outside [low, high]. `level`: `sequence` is the product
    of token weights, `geometric` their geometric mean. `mode`: `truncate` limits weights to the range (TIS), `mask` zeroes those outside
    (IcePop)."""
    log_weight = _log_ratio(trained, rollout, mask)
    if level == "sequence":
        log_weight = clamped(row_sum(log_weight)).expand_as(log_weight)
    elif level == "geometric":
        log_weight = row_mean(log_weight, mask).expand_as(log_weight)
    weight = torch.exp(log_weight)
    limited = mask & ((weight < low) | (weight > (torch.inf if high is None else high)))
    kept = weight.clamp(low, high) if mode == "truncate" else weight.masked_fill(limited, 0.0)
    return kept.masked_fill(~mask, 0.0), limited


def within(
    trained: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_min", "sequence_max"],
    estimator: KlEstimator | Literal["ratio", "difference"],
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    """Mask (bool) of tokens to keep: the mismatch of the token (or its sequence, by `level`) is in [low, high]. `estimator`: `ratio` is
    exp(trained - rollout), `difference` the trainer's minus the engine's probability; k1, k2, k3 and abs estimate KL(rollout || trained).
    NaN is not kept."""
    log_ratio = _log_ratio(trained, rollout, mask)
    if estimator == "ratio":
        found = torch.exp(clamped(_of_sequence(log_ratio, mask, level)))
    elif estimator == "difference":
        found = _of_sequence((trained.exp() - rollout.exp()).masked_fill(~mask, 0.0), mask, level)
    else:
        found = _of_sequence(kl_estimate(-log_ratio, torch.zeros_like(log_ratio), estimator), mask, level)
    inside = (found >= (-torch.inf if low is None else low)) & (found <= (torch.inf if high is None else high))
    return mask & inside


def _log_ratio(trained: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return clamped_log_ratio(*(x.detach().masked_fill(~mask, 0.0) for x in (trained, rollout)))


def _of_sequence(x: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Reduce x [B, T-1] to one value per row, [B, 1]; level `token` returns x. Undefined for rows without policy tokens."""
    if level == "token":
        return x
    if level == "sequence_sum":
        return row_sum(x)
    if level == "sequence_mean":
        return row_mean(x, mask)
    lowest = level == "sequence_min"
    nothing = torch.inf if lowest else -torch.inf
    column = torch.nn.functional.pad(x.masked_fill(~mask, nothing), (0, 1), value=nothing)  # T - 1 may be 0
    return column.amin(1, keepdim=True) if lowest else column.amax(1, keepdim=True)


# ---------------------------------------------------------------- critic and entropy


@dataclass(frozen=True)
class ValueLoss:
    loss: torch.Tensor
    clipped: torch.Tensor
    """bool: new and old value differ by more than clip."""


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float | None
) -> ValueLoss:
    """Half the squared error of values against returns. With `clip` (PPO): the larger of this and the error of values limited to old_values
    +- clip."""
    values = values.masked_fill(~mask, 0.0)
    returns = returns.detach().masked_fill(~mask, 0.0)
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(loss=0.5 * error, clipped=torch.zeros_like(mask))
    old = old_values.detach().masked_fill(~mask, 0.0)
    moved = values - old
    clipped_error = (old + moved.clamp(-clip, clip) - returns).square()
    return ValueLoss(loss=0.5 * torch.maximum(error, clipped_error), clipped=moved.detach().abs() > clip)


def entropy_loss(entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -entropy.masked_fill(~mask, 0.0)


# ---------------------------------------------------------------- from token losses to one number

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]


def row_weights(
    policy_tokens: torch.Tensor, mode: Aggregation, constant: int | None = None, train_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Loss weight of each row per policy token, [B]. `policy_tokens` [B]: of ALL rows of the global mini-batch. Rows without policy tokens
    or with train_weight 0 get 0 and are not counted; other train_weights multiply the weight. Mode `constant` (Dr. GRPO): 1 / (rows *
    constant)."""
    factors = torch.ones_like(policy_tokens, dtype=torch.float64) if train_weights is None else train_weights.double()
    counted = (policy_tokens > 0) & (factors != 0)
    tokens = policy_tokens.double().masked_fill(~counted, 0.0)
    rows = counted.sum().clamp(min=1)
    if mode == "token_mean":
        weights = factors / tokens.sum().clamp(min=1)
    elif mode == "sequence_mean_token_mean":
        weights = factors / (rows * tokens.clamp(min=1))
    elif mode == "sequence_mean_token_sum":
        weights = factors / rows
    elif mode == "constant":
        if constant is None or constant < 1:
            raise ValueError(f"algorithm.aggregation_constant: {constant!r}: aggregation `constant` needs a positive number of tokens")
        weights = factors / (rows * constant)
    else:
        raise ValueError(
            f"algorithm.aggregation: unknown mode {mode!r}; one of token_mean, sequence_mean_token_mean, sequence_mean_token_sum, constant"
        )
    return torch.where(counted, weights, 0.0).float()
