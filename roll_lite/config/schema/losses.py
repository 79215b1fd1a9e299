"""Sections of advantages, policy losses, mismatch correction and value loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.config.schema.base import ASCENDING, Mistakes, NonNegativeFloat, PositiveFloat, Section, rule

# ---------------------------------------------------------------- advantages


class GaeAdvantageConfig(Section):
    """Generalised advantage estimation with the critic's values."""

    name: Literal["gae"] = "gae"
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount factor."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of the actor's advantages."""
    lam_critic: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lambda of the critic's targets; absent: lam."""
    length_adaptive: PositiveFloat | None = None
    """Lets the actor's lambda depend on the response length l: 1 - 1 / (length_adaptive * l), at least 0. Replaces lam."""
    bootstrap_truncated: bool = False
    """Bootstrap responses cut at max_tokens with the critic's value at their end, instead of 0."""


class GrpoAdvantageConfig(Section):
    """(reward - group mean) / group standard deviation. Dr. GRPO is normalize_std: false with aggregation: constant."""

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation."""


class RlooAdvantageConfig(Section):
    """Reward minus the mean reward of the group's other samples."""

    name: Literal["rloo"] = "rloo"


class ReinforceAdvantageConfig(Section):
    """Discounted returns, without a baseline."""

    name: Literal["reinforce"] = "reinforce"
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount factor."""


class ReinforcePlusPlusAdvantageConfig(Section):
    """Discounted returns, whitened over the global batch."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount factor."""
    baseline: Literal["none", "group"] = "none"
    """group: subtract the group's mean from the rewards first."""


class RemaxAdvantageConfig(Section):
    """Reward minus the score of a greedy response to the same prompt, generated beside the group and not trained on."""

    name: Literal["remax"] = "remax"


class OpoAdvantageConfig(Section):
    """Reward minus the length-weighted mean reward of the group, the on-policy baseline of least variance."""

    name: Literal["opo"] = "opo"


class GpgAdvantageConfig(Section):
    """(reward - group mean) * samples / samples in groups whose rewards differ before KL, so that groups without advantage do not shrink
    the gradient."""

    name: Literal["gpg"] = "gpg"


class CustomAdvantageConfig(Section):
    """Advantage estimator of the user."""

    name: Literal["custom"] = "custom"
    function: str
    """Dotted path to a function `(CreditInputs, **args) -> advantages`, see docs/algorithms.md."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


AdvantageConfig = Annotated[
    GrpoAdvantageConfig
    | GaeAdvantageConfig
    | RlooAdvantageConfig
    | ReinforceAdvantageConfig
    | ReinforcePlusPlusAdvantageConfig
    | RemaxAdvantageConfig
    | OpoAdvantageConfig
    | GpgAdvantageConfig
    | CustomAdvantageConfig,
    Field(discriminator="name"),
]


# ---------------------------------------------------------------- losses


class PpoLossConfig(Section):
    """PPO's clipped surrogate."""

    name: Literal["ppo"] = "ppo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Upper clip of the ratio: 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Limit of the loss at negative advantages: dual_clip * |advantage|; null: off."""


class GspoLossConfig(Section):
    """PPO's clipped surrogate with one ratio per sequence: the geometric mean of its tokens' ratios."""

    name: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """Lower clip of the sequence's ratio: 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """Upper clip of the sequence's ratio: 1 + clip_high."""


class GmpoLossConfig(Section):
    """Geometric mean of the tokens' clipped ratios, times the sequence's advantage."""

    name: Literal["gmpo"] = "gmpo"
    log_clip_low: PositiveFloat = 0.4
    """Lower clip of a token's log-ratio: -log_clip_low."""
    log_clip_high: PositiveFloat = 0.4
    """Upper clip of a token's log-ratio: log_clip_high."""


class CispoLossConfig(Section):
    """Policy gradient weighted with the clipped ratio. The weight has no gradient, so clipping removes no token's gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Lower limit of the weight: 1 - clip_low; null: off."""
    clip_high: PositiveFloat = 4.0
    """Upper limit of the weight: 1 + clip_high."""


class ToprLossConfig(Section):
    """Policy gradient weighted with the sequence's ratio, which is limited to one range for positive advantages and another for negative
    ones."""

    name: Literal["topr"] = "topr"
    positive: Annotated[tuple[NonNegativeFloat, NonNegativeFloat], ASCENDING] = (1.0, 1.0)
    """Range of the weight at positive advantages."""
    negative: Annotated[tuple[NonNegativeFloat, NonNegativeFloat], ASCENDING] = (0.0, 1.0)
    """Range of the weight at negative advantages."""


class SapoLossConfig(Section):
    """Sigmoid gate around ratio 1 instead of clipping."""

    name: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """Steepness of the gate at positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Steepness of the gate at negative advantages."""


class PolicyGradientLossConfig(Section):
    """-advantage * log-prob."""

    name: Literal["policy_gradient"] = "policy_gradient"


class RaftLossConfig(Section):
    """-log-prob of the samples with a positive advantage."""

    name: Literal["raft"] = "raft"


class KimiLossConfig(Section):
    """(advantage - tau * log-ratio of the sequence)² / (2 tau): a policy gradient with a pull towards the old policy."""

    name: Literal["kimi"] = "kimi"
    tau: PositiveFloat = 0.1
    """Strength of the pull."""


GIVEN_TO_LOSSES = ("rollout_log_probs", "ref_log_probs", "entropy")
"""Parameters that a user's loss gets besides the terms, if it has them."""


class CustomLossConfig(Section):
    """Policy loss of the user."""

    name: Literal["custom"] = "custom"
    function: str
    """Dotted path to a function `(PolicyTerms, **args) -> PolicyLoss`, see docs/algorithms.md. Parameters named rollout_log_probs,
    ref_log_probs and entropy get these values per token."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


PolicyLossConfig = Annotated[
    PpoLossConfig
    | GspoLossConfig
    | GmpoLossConfig
    | CispoLossConfig
    | ToprLossConfig
    | SapoLossConfig
    | PolicyGradientLossConfig
    | RaftLossConfig
    | KimiLossConfig
    | CustomLossConfig,
    Field(discriminator="name"),
]


class CorrectionWeightConfig(Section):
    """Multiplies each token's policy loss with trainer's probability / engine's probability of the sampled token."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """token: one weight per token. sequence: the product over the response. geometric: its geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: limit the weight to the range (TIS). mask: weight 0 outside the range (IcePop)."""
    low: NonNegativeFloat = 0.0
    """Lower end of the range."""
    high: PositiveFloat | None = 2.0
    """Upper end of the range; null: unlimited."""

    @rule
    def _range(self) -> Mistakes:
        if self.high is not None and self.low >= self.high:
            yield "low", f"is not below high ({self.high})"


class CorrectionFilterConfig(Section):
    """Removes the policy loss of tokens, or whole sequences, on which trainer and engine differ too much."""

    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_min", "sequence_max"] = "token"
    """token: filter each token by its number. Others: filter the sequence by the sum, mean, minimum or maximum over its tokens."""
    estimator: Literal["ratio", "k1", "k2", "k3", "abs", "difference"] = "ratio"
    """Number of a token. ratio: trainer's probability / engine's probability; over a sequence, its sum is the product, its mean the
    geometric mean. k1, k2, k3, abs: KL(engine || trainer) as for kl_in_reward, in nats. difference: trainer's probability - engine's."""
    low: float | None = None
    """Lower limit; null: unlimited."""
    high: float | None = None
    """Upper limit; null: unlimited."""

    @rule
    def _range(self) -> Mistakes:
        low, high, agreement = self.low, self.high, 1.0 if self.estimator == "ratio" else 0.0
        message = f"takes tokens on which trainer and engine agree: their {self.estimator} is {agreement:g}"
        if low is None and high is None:
            yield "", "has no range, everything passes; set low or high, or remove it"
        if low is not None and high is not None and low >= high:
            yield "low", f"is not below high ({high})"
        elif low is not None and low > agreement:
            yield "low", message
        elif high is not None and high < agreement:
            yield "high", message


class MismatchCorrectionConfig(Section):
    """Corrects for tokens that the engine sampled from a different policy than the trainer's: one weight and any number of filters."""

    weight: CorrectionWeightConfig | None = None
    """Importance weight; null: 1."""
    filters: list[CorrectionFilterConfig] = Field(default_factory=list)
    """Filters that tokens must all pass to keep their weight; other tokens get 0."""

    @rule
    def _corrects(self) -> Mistakes:
        if self.weight is None and not self.filters:
            yield "", "neither weighs nor filters; set weight (weight: {high: 2.0}) or filters, or remove it"


class ValueLossConfig(Section):
    clip: PositiveFloat | None = 0.2
    """Maximal distance of new values from the old ones; null: no clipping."""
