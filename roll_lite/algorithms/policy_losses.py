"""The policy losses: each takes `PolicyTerms` that are filled and gives a `PolicyLoss`, both [B, T-1].

A loss of whole sequences puts the sequence's loss on every policy token of its row, so that `sequence_mean_token_mean` is the
mean over sequences. Tokens without advantage have no gradient in any loss but Kimi's and count as clipped in none.
"""

from __future__ import annotations

from typing import assert_never

import torch

from roll_lite.algorithms.kl import clamped
from roll_lite.algorithms.losses import PolicyLoss, PolicyTerms, row_mean, row_sum
from roll_lite.config.schema import (
    CispoLossConfig,
    CustomLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    KimiLossConfig,
    PolicyGradientLossConfig,
    PolicyLossConfig,
    PpoLossConfig,
    RaftLossConfig,
    SapoLossConfig,
    ToprLossConfig,
)
from roll_lite.data.user_function import load_function


def policy_loss(config: PolicyLossConfig, terms: PolicyTerms) -> PolicyLoss:
    """The configured loss of each token. Rows without policy tokens have loss 0 and no gradient."""
    terms = terms.filled()
    match config:
        case PpoLossConfig():
            return ppo(terms, config.clip_low, config.clip_high, config.dual_clip)
        case GspoLossConfig():
            return gspo(terms, config.clip_low, config.clip_high)
        case GmpoLossConfig():
            return gmpo(terms, config.log_clip_low, config.log_clip_high)
        case CispoLossConfig():
            return cispo(terms, config.clip_low, config.clip_high)
        case ToprLossConfig():
            return topr(terms, config.positive, config.negative)
        case SapoLossConfig():
            return sapo(terms, config.tau_positive, config.tau_negative)
        case PolicyGradientLossConfig():
            return _unclipped(-terms.advantages * terms.log_probs, terms)
        case RaftLossConfig():
            return _unclipped(-terms.log_probs * (terms.advantages > 0), terms)
        case KimiLossConfig():
            return kimi(terms, config.tau)
        case CustomLossConfig():
            return _custom(config, terms)
        case _:
            assert_never(config)


def ppo(terms: PolicyTerms, clip_low: float, clip_high: float, dual_clip: float | None) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (arXiv 1707.06347); clip-higher is clip_high > clip_low.

    dual_clip (arXiv 1912.09729): with A < 0 at most dual_clip * |A|; a ratio beyond it has no gradient and counts as clipped high.
    """
    ratio, advantages = terms.ratio, terms.advantages
    loss = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    ratio = ratio.detach()
    high = (advantages > 0) & (ratio > 1 + clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
        high |= (advantages < 0) & (ratio > dual_clip)
    return PolicyLoss(loss, ratio, (advantages < 0) & (ratio < 1 - clip_low), high)


def gspo(terms: PolicyTerms, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO's surrogate with one ratio per sequence, exp(mean of its log-ratios), and one advantage (arXiv 2507.18071).

    Token advantages that differ within a row are averaged.
    """
    ratio = torch.exp(clamped(row_mean(terms.log_ratio, terms.mask)))
    advantages = row_mean(terms.advantages, terms.mask)
    loss = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    ratio = ratio.detach()
    low, high = (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)
    return _of_rows(terms, loss, ratio, low, high)


def gmpo(terms: PolicyTerms, log_clip_low: float, log_clip_high: float) -> PolicyLoss:
    """-A * geometric mean of the tokens' ratios, each clipped on the side where PPO would clip it (arXiv 2507.20673).

    A is the row's mean advantage. A clipped token has no gradient, the others of its row keep theirs. `ratio` is the token's.
    """
    log_ratio, advantages = terms.log_ratio, row_mean(terms.advantages, terms.mask)
    limited = torch.where(advantages > 0, log_ratio.clamp(max=log_clip_high), log_ratio.clamp(min=-log_clip_low))
    loss = -advantages * torch.exp(row_mean(limited, terms.mask))
    log_ratio = log_ratio.detach()
    return PolicyLoss(
        torch.where(terms.mask, loss, 0.0),
        log_ratio.exp(),
        (advantages < 0) & (log_ratio < -log_clip_low),
        (advantages > 0) & (log_ratio > log_clip_high),
    )


def cispo(terms: PolicyTerms, clip_low: float | None, clip_high: float) -> PolicyLoss:
    """-weight * A * log-prob with the detached weight clip(ratio, 1 - clip_low, 1 + clip_high) (arXiv 2506.13585).

    Every token keeps a gradient: clipped here means that its weight was limited, whatever the advantage's sign.
    """
    ratio = terms.ratio.detach()
    lowest = 0.0 if clip_low is None else 1 - clip_low
    return _weighted(terms, ratio, ratio.clamp(lowest, 1 + clip_high))


def topr(terms: PolicyTerms, positive: tuple[float, float], negative: tuple[float, float]) -> PolicyLoss:
    """-weight * A * log-prob, the weight being the sequence's ratio (the product of its tokens'), detached (arXiv 2503.14286).

    It is limited to `positive` where A > 0 and to `negative` elsewhere; clipped means limited. Its loss is a sum over tokens:
    `sequence_mean_token_sum` is the paper's.
    """
    ratio = torch.exp(clamped(row_sum(terms.log_ratio.detach())))
    weight = torch.where(terms.advantages > 0, ratio.clamp(*positive), ratio.clamp(*negative))
    return _weighted(terms, torch.where(terms.mask, ratio, 1.0), weight)


def sapo(terms: PolicyTerms, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """-4 / tau * sigmoid(tau * (ratio - 1)) * A (arXiv 2511.20347): the gradient fades with the distance from ratio 1."""
    ratio = terms.ratio
    positive, negative = (torch.sigmoid(tau * (ratio - 1)) * (4 / tau) for tau in (tau_positive, tau_negative))
    return _unclipped(-torch.where(terms.advantages > 0, positive, negative) * terms.advantages, terms)


def kimi(terms: PolicyTerms, tau: float) -> PolicyLoss:
    """(A - tau * s)**2 / (2 * tau), s the sum of the row's log-ratios, A its mean advantage (arXiv 2501.12599).

    Its gradient is -(A - tau * s) * grad s: the plain policy gradient of the sequence as tau goes to 0. s itself is not clamped, its
    tokens are: nothing is exponentiated, and a clamp would end the pull towards the old policy where it is needed most.
    """
    advantages = row_mean(terms.advantages, terms.mask)
    loss = (advantages - tau * row_sum(terms.log_ratio)).square() / (2 * tau)
    return _unclipped(torch.where(terms.mask, loss, 0.0), terms)


def _clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def _weighted(terms: PolicyTerms, ratio: torch.Tensor, weight: torch.Tensor) -> PolicyLoss:
    """Policy gradient with detached weights [B, T-1] that came from the ratios by limiting them."""
    trains = terms.advantages != 0
    return PolicyLoss(-weight * terms.advantages * terms.log_probs, ratio, trains & (weight > ratio), trains & (weight < ratio))


def _unclipped(loss: torch.Tensor, terms: PolicyTerms) -> PolicyLoss:
    never = torch.zeros_like(terms.mask)
    return PolicyLoss(loss, terms.ratio.detach(), never, never)


def _of_rows(terms: PolicyTerms, loss: torch.Tensor, ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> PolicyLoss:
    """What holds for rows, all [B, 1], on each of their policy tokens."""
    mask = terms.mask
    return PolicyLoss(torch.where(mask, loss, 0.0), torch.where(mask, ratio, 1.0), mask & low, mask & high)


def _custom(config: CustomLossConfig, terms: PolicyTerms) -> PolicyLoss:
    """What the user's function makes of the terms, masked entries of which are 0; a bare tensor is taken for the loss."""
    where = "algorithm.policy_loss.function"
    function = load_function(config.function, where, "(PolicyTerms, **args) -> PolicyLoss")
    result = function(terms, **config.args)
    if isinstance(result, torch.Tensor):
        result = _unclipped(result, terms)
    if not isinstance(result, PolicyLoss):
        raise ValueError(f"{where}: {config.function} returned {type(result).__name__}, expected a PolicyLoss or a tensor [B, T-1]")
    for name in ("loss", "ratio", "clipped_low", "clipped_high"):
        field = getattr(result, name)
        if not isinstance(field, torch.Tensor) or field.shape != terms.mask.shape:
            shape = tuple(field.shape) if isinstance(field, torch.Tensor) else type(field).__name__
            raise ValueError(f"{where}: {config.function}: {name} is {shape}, expected a tensor {tuple(terms.mask.shape)}")
    if terms.log_probs.requires_grad and torch.is_grad_enabled() and not result.loss.requires_grad:
        raise ValueError(f"{where}: {config.function}: the loss does not depend on terms.log_probs; without a gradient nothing is learned")
    # Where the model itself has gone wrong, the function is not to blame: the strategy leaves such a step out.
    broken = ~torch.isfinite(result.loss) & torch.isfinite(terms.log_probs) & terms.mask
    if bool(broken.any()):
        row, token = broken.nonzero()[0].tolist()
        raise ValueError(f"{where}: {config.function}: the loss of row {row}, token {token} is {float(result.loss[row, token].detach())}")
    return PolicyLoss(
        torch.where(terms.mask, result.loss, 0.0),
        torch.where(terms.mask, result.ratio.detach(), 1.0),
        terms.mask & result.clipped_low.bool(),
        terms.mask & result.clipped_high.bool(),
    )
