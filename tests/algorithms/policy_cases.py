"""Every policy loss with its independent reference, and a batch with everything that goes wrong with masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import reference_losses as reference
import torch
from reference_losses import Row, Token

from roll_lite.algorithms.losses import PolicyTerms
from roll_lite.config.schema.losses import (
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

LOSSES: dict[str, tuple[PolicyLossConfig, Callable[[Row], list[Token]]]] = {
    "ppo": (PpoLossConfig(clip_low=0.2, clip_high=0.28), partial(reference.ppo, low=0.2, high=0.28)),
    "dual_clip": (PpoLossConfig(clip_low=0.1, clip_high=0.1, dual_clip=1.3), partial(reference.ppo, low=0.1, high=0.1, dual=1.3)),
    "gspo": (GspoLossConfig(clip_low=0.05, clip_high=0.08), partial(reference.gspo, low=0.05, high=0.08)),
    "gmpo": (GmpoLossConfig(log_clip_low=0.2, log_clip_high=0.3), partial(reference.gmpo, log_low=0.2, log_high=0.3)),
    "cispo": (CispoLossConfig(clip_high=0.3), partial(reference.cispo, low=None, high=0.3)),
    "cispo_both": (CispoLossConfig(clip_low=0.2, clip_high=0.3), partial(reference.cispo, low=0.2, high=0.3)),
    "topr": (ToprLossConfig(), partial(reference.topr, positive=(1.0, 1.0), negative=(0.0, 1.0))),
    "topr_wide": (
        ToprLossConfig(positive=(0.9, 1.5), negative=(0.5, 1.1)),
        partial(reference.topr, positive=(0.9, 1.5), negative=(0.5, 1.1)),
    ),
    "sapo": (SapoLossConfig(tau_positive=1.0, tau_negative=2.0), partial(reference.sapo, tau_positive=1.0, tau_negative=2.0)),
    "policy_gradient": (PolicyGradientLossConfig(), reference.policy_gradient),
    "raft": (RaftLossConfig(), reference.raft),
    "kimi": (KimiLossConfig(tau=0.3), partial(reference.kimi, tau=0.3)),
    "custom": (CustomLossConfig(function="user_losses.bare", args={"scale": 1.0}), reference.policy_gradient),
}


@dataclass(frozen=True)
class Case:
    terms: PolicyTerms
    """NaN, infinities wherever the mask is 0."""

    def row(self, number: int, new: torch.Tensor | None = None) -> Row:
        """`new`: other log-probs in the row than those at which gradients are stopped."""
        mask = self.terms.mask[number]
        frozen = self.terms.log_probs.detach()
        columns = (frozen if new is None else new, self.terms.old_log_probs, self.terms.advantages, frozen)
        return Row(*(x[number][mask].tolist() for x in columns))


def case(seed: int = 0, spread: float = 0.4, extremes: bool = True) -> Case:
    """9 rows: ragged, with tool gaps, one without any policy token, one of one token, one with advantage 0, one with huge ratios
    (unless without extremes)."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 9, 12

    def normal() -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, columns, generator=generator) < 0.7
    mask[:, :2] = False
    mask[1] = False
    mask[2] = torch.arange(columns) == 5
    mask[3] = (torch.arange(columns) >= 3) & (torch.arange(columns) < 9)
    new = normal() * 0.3 - 2
    old = new + normal() * spread
    advantages = normal()
    advantages[4] = 0.0
    advantages[5:] = advantages[5:, :1]
    if extremes:
        old[6, 4:7] = torch.tensor([-30.0, 0.0, -2.0])
        new[6, 4:7] = torch.tensor([-0.5, -40.0, -2.5])
        mask[6, 4:7] = True
    garbage = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)[torch.arange(columns) % 3].expand(rows, columns)
    return Case(PolicyTerms(*(torch.where(mask, x, garbage) for x in (new, old, advantages)), mask))
