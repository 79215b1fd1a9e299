"""Sections of the algorithm: KL, reward shaping, supervised data, and the algorithm itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll_lite.config.schema.base import ASCENDING, Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, UserPath, rule
from roll_lite.config.schema.domains import DataConfig, DomainConfig, PlainTemplateConfig, RewardConfig, SamplingConfig, TemplateConfig
from roll_lite.config.schema.losses import (
    AdvantageConfig,
    GrpoAdvantageConfig,
    MismatchCorrectionConfig,
    PolicyLossConfig,
    PpoLossConfig,
    ValueLossConfig,
)

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
