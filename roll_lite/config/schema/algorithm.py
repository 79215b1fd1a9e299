"""Sections: advantages, losses, KL, shaping of rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.config.schema.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section, UserPath
from roll_lite.config.schema.domains import DataConfig, DomainConfig, PlainTemplateConfig, RewardConfig, SamplingConfig, TemplateConfig

# ---------------------------------------------------------------- advantages


class GaeAdvantageConfig(Section):
    """Generalised advantage estimation over the critic's values."""

    name: Literal["gae"] = "gae"
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of the actor's advantages."""
    lam_critic: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lambda of the critic's targets; lam where absent."""
    length_adaptive: PositiveFloat | None = None
    """The actor's lambda follows the response's length l: 1 - 1 / (length_adaptive * l), at least 0. Replaces lam."""
    bootstrap_truncated: bool = False
    """A response cut at max_tokens goes on with the critic's value of its end instead of 0."""


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
    """Discount."""


class ReinforcePlusPlusAdvantageConfig(Section):
    """Discounted returns, whitened over the global batch."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount."""
    baseline: Literal["none", "group"] = "none"
    """group: the group's mean is taken off the rewards first."""


class RemaxAdvantageConfig(Section):
    """Reward minus the score of a greedy response to the same prompt, which is generated beside the group and not trained on."""

    name: Literal["remax"] = "remax"


class OpoAdvantageConfig(Section):
    """Reward minus the length-weighted mean reward of the group, the baseline of least variance on-policy."""

    name: Literal["opo"] = "opo"


class GpgAdvantageConfig(Section):
    """(reward - group mean) * samples / samples of groups with spread before KL: flat groups do not thin out the gradient."""

    name: Literal["gpg"] = "gpg"


class CustomAdvantageConfig(Section):
    """A user's own estimator."""

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
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With a negative advantage the loss is at most dual_clip * |advantage|; null is off."""


class GspoLossConfig(Section):
    """PPO's clipped surrogate with one ratio per sequence: the geometric mean of its tokens' ratios."""

    name: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The sequence's ratio is clipped from below at 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence's ratio is clipped from above at 1 + clip_high."""


class GmpoLossConfig(Section):
    """Geometric mean of the tokens' clipped ratios, times the sequence's advantage."""

    name: Literal["gmpo"] = "gmpo"
    log_clip_low: PositiveFloat = 0.4
    """A token's log-ratio is clipped from below at -log_clip_low."""
    log_clip_high: PositiveFloat = 0.4
    """A token's log-ratio is clipped from above at log_clip_high."""


class CispoLossConfig(Section):
    """Policy gradient weighted with the clipped ratio, which gets no gradient itself: no token is cut off."""

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The weight is at least 1 - clip_low; null is off."""
    clip_high: PositiveFloat = 4.0
    """The weight is at most 1 + clip_high."""


class ToprLossConfig(Section):
    """Policy gradient weighted with the sequence's ratio, limited to one range for good samples and another for bad ones."""

    name: Literal["topr"] = "topr"
    positive: tuple[NonNegativeFloat, NonNegativeFloat] = (1.0, 1.0)
    """Range of the weight where the advantage is positive."""
    negative: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 1.0)
    """Range of the weight where the advantage is negative."""


class SapoLossConfig(Section):
    """A sigmoid gate around ratio 1 in place of the clip."""

    name: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """Steepness of the gate where the advantage is negative."""


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
"""What a user's loss gets besides the terms, if it has parameters of these names."""


class CustomLossConfig(Section):
    """A user's own loss."""

    name: Literal["custom"] = "custom"
    function: str
    """Dotted path to a function `(PolicyTerms, **args) -> PolicyLoss`, see docs/algorithms.md. Parameters named rollout_log_probs,
    ref_log_probs and entropy get these of every token."""
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
    """Multiplies each token's policy loss with (trainer's probability / engine's probability) of what the engine sampled."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """token: each token's own weight. sequence: the product over the response. geometric: its geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: limit the weight to the range (TIS). mask: weight 0 outside of it (IcePop)."""
    low: NonNegativeFloat = 0.0
    """Lower end of the range."""
    high: PositiveFloat | None = 2.0
    """Upper end of the range; null: none."""


class CorrectionFilterConfig(Section):
    """Takes the policy loss of tokens, or of whole sequences, on which trainer and engine differ too much."""

    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_min", "sequence_max"] = "token"
    """token: each token by its own number. Otherwise the whole sequence, by the sum, mean, minimum or maximum over its tokens."""
    estimator: Literal["ratio", "k1", "k2", "k3", "abs", "difference"] = "ratio"
    """The number of a token. ratio: trainer's probability / engine's probability; its sum over a sequence is the product, its mean the
    geometric mean. k1, k2, k3, abs: KL(engine || trainer) as for kl_in_reward, in nats. difference: trainer's probability - engine's."""
    low: float | None = None
    """Less is left out; null: no lower end."""
    high: float | None = None
    """More is left out; null: no upper end."""


class MismatchCorrectionConfig(Section):
    """One weight and any number of filters, for tokens that the engine sampled from another policy than the trainer's."""

    weight: CorrectionWeightConfig | None = None
    """Importance weight; null: 1."""
    filters: list[CorrectionFilterConfig] = Field(default_factory=list)
    """What passes all of them keeps its weight, what does not gets 0."""


class ValueLossConfig(Section):
    clip: PositiveFloat | None = 0.2
    """New values may move this far from the old ones; null switches clipping off."""


# ---------------------------------------------------------------- KL


class FixedKlConfig(Section):
    """The coefficient stays what it is."""

    name: Literal["fixed"] = "fixed"


class AdaptiveKlConfig(Section):
    """The coefficient rises while the KL is above its target and falls while it is below, once per step."""

    name: Literal["adaptive"] = "adaptive"
    target: PositiveFloat
    """KL(policy || reference) to hold, in nats per token, as the estimator measures it; k3 for `abs`, and in the loss but for `full`."""
    horizon: PositiveFloat = 10000.0
    """Samples over which the coefficient moves by about a fifth at most; a larger batch counts as this many."""


KlControllerConfig = Annotated[FixedKlConfig | AdaptiveKlConfig, Field(discriminator="name")]


class KlInRewardConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight; 0 switches the term off."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """k1 = log-ratio, k2 = log-ratio squared / 2, k3 = exp(-k1) - 1 + k1, abs = |k1|, full = the exact sum over the vocabulary."""
    controller: KlControllerConfig = Field(default_factory=FixedKlConfig)
    """What becomes of the weight in the course of the run."""


class KlInLossConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight; 0 switches the term off."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """As for kl_in_reward."""
    controller: KlControllerConfig = Field(default_factory=FixedKlConfig)
    """What becomes of the weight in the course of the run."""
    unbiased_gradient: bool = False
    """Give the estimate the gradient of KL(policy || reference) itself, weighted for samples of an older policy."""


# ---------------------------------------------------------------- rewards and masks


class RewardNormalizationConfig(Section):
    over: Literal["batch", "group", "running"]
    """Whose mean and standard deviation: the step's samples that train, all of the prompt's, or all of the run so far that trained."""
    mean: bool = True
    """Take the mean off."""
    std: bool = True
    """Divide by the standard deviation."""


class LengthPenaltyConfig(Section):
    name: Literal["linear", "group"] = "linear"
    """linear: coef * tokens / max_tokens is taken off. group: by where the length stands between the group's shortest and longest,
    from +coef/2 to -coef/2, a bonus for correct samples only."""
    coef: PositiveFloat
    """Strength."""


class OverlongConfig(Section):
    """DAPO's soft overlong punishment."""

    buffer_tokens: PositiveInt
    """The penalty starts this many tokens before max_tokens and grows linearly."""
    penalty: PositiveFloat = 1.0
    """Taken off a response that is as long as max_tokens."""


class RewardShapingConfig(Section):
    """From scores to rewards, in this order: format, length, truncation, overlong, scale, clip, normalisation, domain weight."""

    length_penalty: LengthPenaltyConfig | None = None
    """Penalty on length."""
    overlong: OverlongConfig | None = None
    """Penalty on coming close to max_tokens."""
    scale: PositiveFloat = 1.0
    """Factor."""
    clip: PositiveFloat | None = None
    """Limit to [-clip, clip]."""
    normalize: RewardNormalizationConfig | None = None
    """Shift and scale."""


class MasksConfig(Section):
    """Samples that do not train. They still count in their group's baseline, and are reported per domain."""

    truncated: Literal["keep", "mask", "penalize"] = "keep"
    """Responses cut at max_tokens: train as any other, do not train, or train with truncated_penalty taken off their reward."""
    truncated_penalty: PositiveFloat = 1.0
    """For truncated: penalize."""
    group_mean: tuple[float, float] | None = None
    """Groups train only if the mean of their scores lies in this range, ends included."""
    response_tokens: tuple[Annotated[int, Field(ge=0)], PositiveInt] | None = None
    """Responses train only if their length lies in this range, ends included."""
    function: str | None = None
    """Dotted path to a function `RewardRows -> weights [samples]`, see docs/algorithms.md; 0 does not train."""


class PtxDataConfig(Section):
    train: UserPath | Annotated[list[UserPath], Field(min_length=1)]
    """As of a domain: a .jsonl or .parquet file, a folder, or several of them one after the other."""
    prompt: str = "prompt"
    """Name of the column with the prompt (a string, or a list of chat messages), or with the text where there is no answer."""
    answer: str | None = "answer"
    """Name of the column with the text to be learned; null: the prompt itself is learned, as in pre-training."""


class PtxConfig(Section):
    """A supervised loss beside the policy's, on rows of a data set (PPO-ptx): coef * mean cross-entropy of what is learned, at temperature
    1, in every optimizer step of the actor."""

    data: PtxDataConfig
    """What is learned. Each row once per pass, in a seeded order that a resumed run goes on with."""
    template: TemplateConfig = Field(default_factory=PlainTemplateConfig)
    """How a prompt becomes the model's input. The answer and the end of sequence follow it."""
    coef: PositiveFloat
    """Weight of the mean cross-entropy."""
    samples: PositiveInt
    """Rows in every optimizer step, packed into micro-batches with the policy's."""
    max_tokens: Annotated[int, Field(ge=2)] = 4096
    """Prompt and answer; what is longer is cut at the end."""

    @property
    def as_domain(self) -> DomainConfig:
        """Its files and template, for those who read a domain's prompts."""
        data = DataConfig(train=self.data.train, prompt=self.data.prompt, answer=self.data.answer)
        sampling = SamplingConfig(max_prompt_tokens=2**31 - 1)  # longer ones are cut
        return DomainConfig(data=data, template=self.template, sampling=sampling, reward=RewardConfig(name="exact"))


class AlgorithmConfig(Section):
    reward: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """How scores become rewards."""
    masks: MasksConfig = Field(default_factory=MasksConfig)
    """Which samples train."""
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantageConfig)
    """Advantage estimator."""
    whiten_advantages: bool = False
    """Shift and scale the advantages to mean 0 and variance 1 over the global batch's policy tokens."""
    policy_loss: PolicyLossConfig = Field(default_factory=PpoLossConfig)
    """Policy loss."""
    mismatch_correction: MismatchCorrectionConfig | None = None
    """Correction for what engine and trainer see differently."""
    value_loss: ValueLossConfig = Field(default_factory=ValueLossConfig)
    """Value loss (with a critic)."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """How token losses become one number; always over the counts of the whole global mini-batch."""
    aggregation_constant: PositiveInt | None = None
    """For aggregation: constant, the tokens that a sequence's sum is divided by; the longest max_tokens of the domains where absent."""
    kl_in_reward: KlInRewardConfig = Field(default_factory=KlInRewardConfig)
    """KL(policy || reference) taken off every token's reward."""
    kl_in_loss: KlInLossConfig = Field(default_factory=KlInLossConfig)
    """KL(policy || reference) added to the loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    ptx: PtxConfig | None = None
    """Learn a data set beside the policy's samples; none where absent."""
    old_log_probs: Literal["recompute", "current", "rollout"] = "recompute"
    """recompute: an extra forward pass of the trainer. current: the detached training forward (one update per batch only).
    rollout: the engine's own."""
    routing_replay: Literal["none", "train", "rollout"] = "none"
    """Which experts the actor's updates use, of a model with experts. none: those that its router chooses by then. train: those of the
    pass that takes the old log-probs. rollout: those of the engine, in that pass as well. The router goes on learning, through the weights
    that it gives them."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass."""
    early_stop_kl: PositiveFloat | None = None
    """The step's remaining actor updates are left out once KL(old || new) of an update exceeds this, in nats per token."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which only the critic trains."""

    @property
    def weighs_by_rollout(self) -> bool:
        """A sample's loss has the ratio to the policy that sampled it as a factor."""
        correction = self.mismatch_correction
        return self.old_log_probs == "rollout" or (correction is not None and correction.weight is not None)
