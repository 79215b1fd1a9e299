from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.config.schema.base import ASCENDING, BetweenZeroAndOne, Mistakes, NonNegativeFloat, PositiveFloat, Section, ZeroToOne, rule
from roll_lite.config.user_function import check_function

# ---------------------------------------------------------------- advantages

Discount = Literal["token", "turn"]


class GaeAdvantageConfig(Section):
    """Generalised advantage estimation with the critic's values."""

    name: Literal["gae"] = "gae"
    gamma: ZeroToOne = 1.0
    """Discount factor."""
    discount: Discount = "token"
    """Time step of gamma. token: one token. turn: one response of an episode."""
    lam: ZeroToOne = 0.95
    """Lambda of the actor's advantages."""
    lam_critic: ZeroToOne | None = None
    """Lambda of the critic's targets; null: lam."""
    length_adaptive: PositiveFloat | None = None
    """Replace lam by max(0, 1 - 1 / (length_adaptive * l)) for responses of l tokens."""
    bootstrap_truncated: bool = False
    """Bootstrap responses cut at a token limit with the critic's value at their end, not 0. max_turns is no such limit."""


class GrpoAdvantageConfig(Section):
    """(reward - group mean) / group standard deviation. For Dr. GRPO, set normalize_std: false and algorithm.aggregation: constant."""

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation."""


class RlooAdvantageConfig(Section):
    """Reward minus the mean of the group's other samples."""

    name: Literal["rloo"] = "rloo"


class ReinforceAdvantageConfig(Section):
    """Discounted returns, without baseline."""

    name: Literal["reinforce"] = "reinforce"
    gamma: ZeroToOne = 1.0
    """Discount factor."""
    discount: Discount = "token"
    """Time step of gamma. token: one token. turn: one response of an episode."""


class ReinforcePlusPlusAdvantageConfig(Section):
    """Discounted returns, whitened over the global batch."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: ZeroToOne = 1.0
    """Discount factor."""
    discount: Discount = "token"
    """Time step of gamma. token: one token. turn: one response of an episode."""
    baseline: Literal["none", "group"] = "none"
    """group: first subtract the group's mean from the rewards."""


class RemaxAdvantageConfig(Section):
    """Reward minus the score of a greedy response, which does not train."""

    name: Literal["remax"] = "remax"


class OpoAdvantageConfig(Section):
    """Reward minus the group's length-weighted mean reward, the least-variance on-policy baseline."""

    name: Literal["opo"] = "opo"


class GpgAdvantageConfig(Section):
    """(reward - group mean) * n / m: n samples in the batch, m of them in groups with unequal rewards. So groups with equal rewards do not
    shrink the gradient."""

    name: Literal["gpg"] = "gpg"


class GigpoAdvantageConfig(Section):
    """GRPO over episodes, plus `step_weight` times GRPO over turns of a group that respond to the same text (GiGPO, arXiv 2505.10978)."""

    name: Literal["gigpo"] = "gigpo"
    gamma: ZeroToOne = 0.95
    """Discount factor of later turns' rewards."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the turn-level advantages; the episode-level ones have weight 1."""
    normalize_std: bool = True
    """Divide both advantages by their group's standard deviation."""


class CustomAdvantageConfig(Section):
    name: Literal["custom"] = "custom"
    function: str
    """Dotted path to a function `(CreditInputs, **args) -> advantages` (docs/algorithms.md)."""
    args: dict[str, Any] = {}
    """Keyword arguments."""

    @rule
    def _callable(self) -> Mistakes:
        yield from check_function("function", self.function, self.args)


AdvantageConfig = (
    GrpoAdvantageConfig
    | GaeAdvantageConfig
    | RlooAdvantageConfig
    | ReinforceAdvantageConfig
    | ReinforcePlusPlusAdvantageConfig
    | RemaxAdvantageConfig
    | OpoAdvantageConfig
    | GpgAdvantageConfig
    | GigpoAdvantageConfig
    | CustomAdvantageConfig
)


# ---------------------------------------------------------------- losses


class PpoLossConfig(Section):
    """PPO's clipped surrogate."""

    name: Literal["ppo"] = "ppo"
    clip_low: BetweenZeroAndOne = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: PositiveFloat = 0.2
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Limit of a token's loss at negative advantages, as a multiple of |advantage|."""


class GspoLossConfig(Section):
    """PPO's clipped surrogate with one ratio per sequence, the geometric mean."""

    name: Literal["gspo"] = "gspo"
    clip_low: BetweenZeroAndOne = 3e-4
    """Ratios below 1 - clip_low are clipped."""
    clip_high: PositiveFloat = 4e-4
    """Ratios above 1 + clip_high are clipped."""


class GmpoLossConfig(Section):
    """Geometric mean of the clipped token ratios, times the sequence's advantage."""

    name: Literal["gmpo"] = "gmpo"
    log_clip_low: PositiveFloat = 0.4
    """Token log-ratios below -log_clip_low are clipped."""
    log_clip_high: PositiveFloat = 0.4
    """Token log-ratios above log_clip_high are clipped."""


class CispoLossConfig(Section):
    """Policy gradient weighted with the clipped, detached ratio: clipped tokens keep their gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: BetweenZeroAndOne | None = None
    """Lower limit of the ratio: 1 - clip_low; null: off."""
    clip_high: PositiveFloat = 4.0
    """Upper limit of the ratio: 1 + clip_high."""


class ToprLossConfig(Section):
    """Policy gradient weighted with the sequence's ratio, which is limited to a range that depends on the advantage's sign."""

    name: Literal["topr"] = "topr"
    positive: Annotated[tuple[NonNegativeFloat, NonNegativeFloat], ASCENDING] = (1.0, 1.0)
    """Range of the ratio at positive advantages."""
    negative: Annotated[tuple[NonNegativeFloat, NonNegativeFloat], ASCENDING] = (0.0, 1.0)
    """Range of the ratio at negative advantages."""


class SapoLossConfig(Section):
    """Smooth sigmoid gate around ratio 1, in place of clipping."""

    name: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """Steepness of the gate at positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Steepness of the gate at negative advantages."""


class PolicyGradientLossConfig(Section):
    """-advantage * log-prob."""

    name: Literal["policy_gradient"] = "policy_gradient"


class RaftLossConfig(Section):
    """-log-prob of samples with positive advantage."""

    name: Literal["raft"] = "raft"


class KimiLossConfig(Section):
    """(advantage - tau * log-ratio of the sequence)² / (2 tau), regularised towards the old policy."""

    name: Literal["kimi"] = "kimi"
    tau: PositiveFloat = 0.1
    """Strength of the regularisation."""


GIVEN_TO_LOSSES = ("rollout_log_probs", "ref_log_probs", "entropy")
"""Optional parameters of a user's loss, passed if the function has them."""


class CustomLossConfig(Section):
    name: Literal["custom"] = "custom"
    function: str
    """Dotted path to your function `(PolicyTerms, **args) -> PolicyLoss`, which may take rollout_log_probs, ref_log_probs and entropy per
    token (docs/algorithms.md)."""
    args: dict[str, Any] = {}
    """Keyword arguments."""

    @rule
    def _callable(self) -> Mistakes:
        yield from check_function("function", self.function, self.args, given=GIVEN_TO_LOSSES)


PolicyLossConfig = (
    PpoLossConfig
    | GspoLossConfig
    | GmpoLossConfig
    | CispoLossConfig
    | ToprLossConfig
    | SapoLossConfig
    | PolicyGradientLossConfig
    | RaftLossConfig
    | KimiLossConfig
    | CustomLossConfig
)


class CorrectionWeightConfig(Section):
    """Importance weight of token losses: trainer's / engine's probability of the sampled token."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """token: a weight per token. sequence: the product of its tokens' weights. geometric: their geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of weights outside [low, high]. truncate: limited (TIS). mask: set to 0 (IcePop)."""
    low: NonNegativeFloat = 0.0
    """Lower limit of the importance weight."""
    high: PositiveFloat | None = 2.0
    """Upper limit of the importance weight; null: unlimited."""

    @rule
    def _range(self) -> Mistakes:
        if self.high is not None and self.low >= self.high:
            yield "low", f"is not below high ({self.high})"


class CorrectionFilterConfig(Section):
    """Filter for tokens or sequences on which trainer and engine differ too much."""

    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_min", "sequence_max"] = "token"
    """Filter single tokens, or sequences by the sum, mean, minimum or maximum of their tokens' values."""
    estimator: Literal["ratio", "k1", "k2", "k3", "abs", "difference"] = "ratio"
    """Value of a token. ratio: trainer's / engine's probability (sequence_sum: product, sequence_mean: geometric mean). k1, k2, k3, abs:
    KL(engine || trainer) in nats. difference: trainer's - engine's probability."""
    low: float | None = None
    """Tokens or sequences with a smaller value are filtered out; null: no lower limit."""
    high: float | None = None
    """Tokens or sequences with a larger value are filtered out; null: no upper limit."""

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
    """Correction for sampling from another policy than the trainer's."""

    weight: CorrectionWeightConfig | None = None
    """Importance weight of token losses."""
    filters: list[CorrectionFilterConfig] = []
    """Filters; tokens that fail any get weight 0."""

    @rule
    def _corrects(self) -> Mistakes:
        if self.weight is None and not self.filters:
            yield "", "neither weighs nor filters; set weight (weight: {high: 2.0}) or filters, or remove it"


class ValueLossConfig(Section):
    clip: PositiveFloat | None = 0.2
    """PPO's value clipping: moving a value by more than this within a step does not lower the loss further; null: off."""
