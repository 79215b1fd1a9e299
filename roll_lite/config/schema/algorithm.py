"""Sections of the algorithm: advantages, losses, KL, reward shaping."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.config.schema.base import ASCENDING, Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, UserPath, rule
from roll_lite.config.schema.domains import DataConfig, DomainConfig, PlainTemplateConfig, RewardConfig, SamplingConfig, TemplateConfig

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


# ---------------------------------------------------------------- KL


class FixedKlConfig(Section):
    """Constant coefficient."""

    name: Literal["fixed"] = "fixed"


class AdaptiveKlConfig(Section):
    """Raises the coefficient while the KL is above its target and lowers it while below, once per step."""

    name: Literal["adaptive"] = "adaptive"
    target: PositiveFloat
    """Target KL(policy || reference), in nats per token. It is measured with k3 for `abs`, and for kl_in_loss unless the estimator is
    `full`; otherwise with the estimator."""
    horizon: PositiveFloat = 10000.0
    """Number of samples over which the coefficient changes by at most about a fifth; a larger batch counts as this many."""


KlControllerConfig = Annotated[FixedKlConfig | AdaptiveKlConfig, Field(discriminator="name")]


class KlInRewardConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight; 0: off."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """k1 = log-ratio, k2 = log-ratio squared / 2, k3 = exp(-k1) - 1 + k1, abs = |k1|, full = the exact sum over the vocabulary."""
    controller: KlControllerConfig = Field(default_factory=FixedKlConfig)
    """Schedule of the weight."""

    @rule
    def _controls(self) -> Mistakes:
        if self.controller.name == "adaptive" and self.coef == 0:
            yield "controller.name", "multiplies the term's coef, which is 0; set it"


class KlInLossConfig(KlInRewardConfig):
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """Same as for kl_in_reward."""
    unbiased_gradient: bool = False
    """Use the gradient of KL(policy || reference) itself, with importance weights for samples of an older policy."""

    @rule
    def _unbiased(self) -> Mistakes:
        if self.unbiased_gradient and self.estimator == "full":
            yield "unbiased_gradient", "the gradient of `full` is exact as it is; remove it"


# ---------------------------------------------------------------- rewards and masks


class RewardNormalizationConfig(Section):
    over: Literal["batch", "group", "running"]
    """Samples that mean and standard deviation are computed over. batch: the step's samples that train; group: all samples of the prompt;
    running: all samples that trained in the run so far."""
    mean: bool = True
    """Subtract the mean."""
    std: bool = True
    """Divide by the standard deviation."""

    @rule
    def _normalizes(self) -> Mistakes:
        if not self.mean and not self.std:
            yield "", "neither takes the mean off nor divides; set mean or std, or remove it"


class LengthPenaltyConfig(Section):
    name: Literal["linear", "group"] = "linear"
    """linear: subtract coef * tokens / max_tokens. group: from +coef/2 for the shortest response of the group to -coef/2 for the longest;
    the bonus is for correct samples only."""
    coef: PositiveFloat
    """Strength."""


class OverlongConfig(Section):
    """DAPO's soft overlong punishment."""

    buffer_tokens: PositiveInt
    """Number of tokens before max_tokens from which the penalty grows linearly."""
    penalty: PositiveFloat = 1.0
    """Penalty of a response as long as max_tokens."""


class RewardShapingConfig(Section):
    """Turns scores into rewards, in this order: format, length, truncation, overlong, scale, clip, normalisation, domain weight."""

    length_penalty: LengthPenaltyConfig | None = None
    """Penalty on length."""
    overlong: OverlongConfig | None = None
    """Penalty on lengths close to max_tokens."""
    scale: PositiveFloat = 1.0
    """Factor of the reward."""
    clip: PositiveFloat | None = None
    """Limit to [-clip, clip]."""
    normalize: RewardNormalizationConfig | None = None
    """Normalisation by mean and standard deviation."""


class MasksConfig(Section):
    """Excludes samples from training. They still count in their group's baseline, and metrics report them per domain."""

    truncated: Literal["keep", "mask", "penalize"] = "keep"
    """Responses cut at max_tokens. keep: train; mask: do not train; penalize: subtract truncated_penalty from their reward and train."""
    truncated_penalty: PositiveFloat = 1.0
    """Penalty for truncated: penalize."""
    group_mean: Annotated[tuple[float, float], ASCENDING] | None = None
    """Range of a group's mean score in which it trains, ends included."""
    response_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], PositiveInt], ASCENDING] | None = None
    """Range of response lengths that train, ends included."""
    function: str | None = None
    """Dotted path to a function `RewardRows -> weights [samples]`, see docs/algorithms.md; 0 does not train."""


class PtxDataConfig(Section):
    train: UserPath | Annotated[list[UserPath], Field(min_length=1)]
    """Data files as for a domain: a .jsonl or .parquet file, a folder, or a list of them, read one after the other."""
    prompt: str = "prompt"
    """Name of the column with the prompt (a string, or a list of chat messages), or with the text if there is no answer."""
    answer: str | None = "answer"
    """Name of the column with the text to learn; null: learn the prompt itself, as in pre-training."""


class PtxConfig(Section):
    """Adds a supervised loss on a data set to the policy loss (PPO-ptx): coef * mean cross-entropy of the learned tokens, at temperature 1,
    in every optimizer step of the actor."""

    data: PtxDataConfig
    """Data to learn. Every pass uses each row once, in a seeded order that resumed runs continue."""
    template: TemplateConfig = Field(default_factory=PlainTemplateConfig)
    """Template that turns a prompt into the model's input. The answer and the end of sequence follow."""
    coef: PositiveFloat
    """Weight of the mean cross-entropy."""
    samples: PositiveInt
    """Rows per optimizer step, packed into micro-batches with the policy's."""
    max_tokens: Annotated[int, Field(ge=2)] = 4096
    """Maximal tokens of prompt and answer; longer rows are cut at the end."""

    @property
    def as_domain(self) -> DomainConfig:
        """Its files and template as a domain, for the reader of prompts."""
        data = DataConfig(train=self.data.train, prompt=self.data.prompt, answer=self.data.answer)
        sampling = SamplingConfig(max_prompt_tokens=2**31 - 1)  # longer ones are cut
        return DomainConfig(data=data, template=self.template, sampling=sampling, reward=RewardConfig(name="exact"))


class AlgorithmConfig(Section):
    reward: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Shaping: from scores to rewards."""
    masks: MasksConfig = Field(default_factory=MasksConfig)
    """Samples that do not train."""
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantageConfig)
    """Advantage estimator."""
    whiten_advantages: bool = False
    """Normalize advantages to mean 0 and variance 1 over the policy tokens of the global batch."""
    policy_loss: PolicyLossConfig = Field(default_factory=PpoLossConfig)
    """Policy loss."""
    mismatch_correction: MismatchCorrectionConfig | None = None
    """Correction for the mismatch of engine and trainer."""
    value_loss: ValueLossConfig = Field(default_factory=ValueLossConfig)
    """Value loss (with a critic)."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """Aggregation of token losses into one number; counts are those of the whole global mini-batch."""
    aggregation_constant: PositiveInt | None = None
    """Divisor of a sequence's sum for aggregation: constant, in tokens; absent: the longest max_tokens of the domains."""
    kl_in_reward: KlInRewardConfig = Field(default_factory=KlInRewardConfig)
    """KL(policy || reference) subtracted from every token's reward."""
    kl_in_loss: KlInLossConfig = Field(default_factory=KlInLossConfig)
    """KL(policy || reference) added to the loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    ptx: PtxConfig | None = None
    """Supervised loss on a data set; absent: none."""
    old_log_probs: Literal["recompute", "current", "rollout"] = "recompute"
    """Source of the old log-probs. recompute: an extra forward pass of the trainer. current: the detached training forward (one update per
    batch only). rollout: the engine."""
    routing_replay: Literal["none", "train", "rollout"] = "none"
    """Experts that the actor's updates use, in a model with experts. none: its router's current choice. train: those of the pass that
    computes the old log-probs. rollout: those of the engine, also in that pass. The router still learns, through the weights of the
    experts.
    """
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass."""
    early_stop_kl: PositiveFloat | None = None
    """Limit for KL(old || new) of an update, in nats per token: beyond it, the step's remaining actor updates are skipped."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start that train only the critic."""

    @rule
    def _current(self) -> Mistakes:
        if self.old_log_probs == "current" and (updates := self.ppo_epochs * self.mini_batches) > 1:
            given = f"ppo_epochs {self.ppo_epochs} x mini_batches {self.mini_batches} are {updates}"
            yield "old_log_probs", f"needs one update per batch, but {given}; use recompute"
        if self.old_log_probs == "current" and self.kl_in_reward.coef > 0:
            yield "old_log_probs", "kl_in_reward needs log-probs before the update, `current` has them only in it; use recompute or rollout"

    @rule
    def _replay(self) -> Mistakes:
        if self.routing_replay == "train" and self.old_log_probs != "recompute":
            left_out = f"which old_log_probs: {self.old_log_probs} leaves out; use recompute"
            yield "routing_replay", f"replays the pass that takes the old log-probs, {left_out}"

    @rule
    def _one_ratio(self) -> Mistakes:
        if self.old_log_probs == "rollout" and self.mismatch_correction is not None and self.mismatch_correction.weight is not None:
            message = "with old_log_probs: rollout the policy loss's own ratio is against the engine"
            yield "mismatch_correction.weight", f"{message}; use recompute or current, or filters alone"

    @rule
    def _full_kl(self) -> Mistakes:
        kl = self.kl_in_reward
        if kl.coef > 0 and kl.estimator == "full" and self.old_log_probs != "recompute":
            message = "needs the policy's whole distribution before the update; use old_log_probs: recompute, or another estimator"
            yield "kl_in_reward.estimator", message

    @rule
    def _full_kl_of_ptx(self) -> Mistakes:
        if self.ptx is not None and self.kl_in_loss.coef > 0 and self.kl_in_loss.estimator == "full":
            message = "would take the whole distribution of the rows of algorithm.ptx too; use another estimator, or no ptx"
            yield "kl_in_loss.estimator", message

    @property
    def weighs_by_rollout(self) -> bool:
        """True if a sample's loss is multiplied by the ratio to the policy that sampled it."""
        correction = self.mismatch_correction
        return self.old_log_probs == "rollout" or (correction is not None and correction.weight is not None)
