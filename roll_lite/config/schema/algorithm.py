"""Section `algorithm` and its parts: KL, reward shaping, masks, supervised data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll_lite.config.schema.base import ASCENDING, DataPath, Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, rule
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
    """Constant KL coefficient."""

    name: Literal["fixed"] = "fixed"


class AdaptiveKlConfig(Section):
    """KL coefficient that changes once per step: up if KL is above the target, down if below."""

    name: Literal["adaptive"] = "adaptive"
    target: PositiveFloat
    """Target of KL(policy || reference), in nats per token. kl_in_reward measures KL by its estimator (k3 for abs), kl_in_loss by k3
    (exactly for full)."""
    horizon: PositiveFloat = 10000.0
    """Samples over which the coefficient changes by at most about 20%; larger is slower. One step changes it by at most 20%."""


KlControllerConfig = Annotated[FixedKlConfig | AdaptiveKlConfig, Field(discriminator="name")]


class KlInRewardConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight of KL; 0: off."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """KL estimator: k1 = log(policy / reference), k2 = k1² / 2, k3 = exp(-k1) - 1 + k1, abs = |k1|, full = exact sum over the
    vocabulary."""
    controller: KlControllerConfig = Field(default_factory=FixedKlConfig)
    """Fixed or adaptive weight."""

    @rule
    def _controls(self) -> Mistakes:
        if self.controller.name == "adaptive" and self.coef == 0:
            yield "controller.name", "multiplies the term's coef, which is 0; set it"


class KlInLossConfig(KlInRewardConfig):
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """KL estimator, as for kl_in_reward."""
    unbiased_gradient: bool = False
    """Use an unbiased estimate of the gradient of KL(policy || reference), not the gradient of the KL estimate. Tokens of an older policy
    get importance weights."""

    @rule
    def _unbiased(self) -> Mistakes:
        if self.unbiased_gradient and self.estimator == "full":
            yield "unbiased_gradient", "the gradient of `full` is exact as it is; remove it"


# ---------------------------------------------------------------- rewards and masks


class RewardNormalizationConfig(Section):
    over: Literal["batch", "group", "running"]
    """Samples that give mean and standard deviation. batch: the step's training samples. group: all samples of the prompt. running: all
    training samples of the run so far, including this step's."""
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
    """linear: subtract coef * tokens / max_tokens. group: add coef/2 to the group's shortest response, falling to -coef/2 for the longest;
    incorrect samples get at most 0."""
    coef: PositiveFloat
    """Strength of the penalty."""


class OverlongConfig(Section):
    """DAPO's soft overlong punishment: penalty for responses near max_tokens."""

    buffer_tokens: PositiveInt
    """Tokens before max_tokens over which the penalty grows linearly from 0."""
    penalty: PositiveFloat = 1.0
    """Penalty at max_tokens."""


class RewardShapingConfig(Section):
    """Steps from score to reward, in this order: format bonus, length penalty, truncation penalty, overlong penalty, scale, clip,
    normalisation, domain weight."""

    length_penalty: LengthPenaltyConfig | None = None
    """Penalty for long responses; null: none."""
    overlong: OverlongConfig | None = None
    """Penalty for responses near max_tokens; null: none."""
    scale: PositiveFloat = 1.0
    """Factor of all rewards."""
    clip: PositiveFloat | None = None
    """Limit rewards to [-clip, clip]; null: off."""
    normalize: RewardNormalizationConfig | None = None
    """Normalisation of rewards; null: none."""


class MasksConfig(Section):
    """Exclusion of samples from training. Excluded samples still count in their group's baseline and in metrics by domain."""

    truncated: Literal["keep", "mask", "penalize"] = "keep"
    """Samples cut at max_tokens or max_turns. keep: train. mask: exclude. penalize: train, with truncated_penalty subtracted from the
    reward."""
    truncated_penalty: PositiveFloat = 1.0
    """Penalty of `truncated: penalize`."""
    group_mean: Annotated[tuple[float, float], ASCENDING] | None = None
    """Train only groups with a mean score in this inclusive range; null: all."""
    response_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], PositiveInt], ASCENDING] | None = None
    """Train only responses with a token count in this inclusive range; null: all."""
    function: str | None = None
    """Dotted path to your function `RewardRows -> weights [samples]` (docs/algorithms.md). Weights multiply losses; 0 excludes a sample."""


class PtxDataConfig(Section):
    train: DataPath | Annotated[list[DataPath], Field(min_length=1)]
    """Training data: .jsonl, .parquet, a folder, hf://..., or a list of these, read in order."""
    prompt: str = "prompt"
    """Column with the prompt (string or chat messages), or with the text to learn if `answer` is null."""
    answer: str | None = "answer"
    """Column with the text to learn; null: learn the prompt, as in pre-training."""


class PtxConfig(Section):
    """Supervised loss added to the actor's loss in every optimizer step (PPO-ptx): coef * mean cross-entropy of the tokens to learn, at
    temperature 1."""

    data: PtxDataConfig
    """Data to learn. Each epoch uses every row once in a seeded order, which a resumed run continues."""
    template: TemplateConfig = Field(default_factory=PlainTemplateConfig)
    """Template of the prompt; answer and end of sequence follow."""
    coef: PositiveFloat
    """Weight of the mean cross-entropy."""
    samples: PositiveInt
    """Rows per optimizer step, packed into micro-batches with the policy's samples."""
    max_tokens: Annotated[int, Field(ge=2)] = 4096
    """Maximum tokens of prompt and answer; longer rows are cut at the end."""

    @property
    def as_domain(self) -> DomainConfig:
        """DomainConfig with this data and template, for functions that load and check domain data."""
        data = DataConfig(train=self.data.train, prompt=self.data.prompt, answer=self.data.answer)
        sampling = SamplingConfig(max_prompt_tokens=2**31 - 1)  # longer ones are cut
        return DomainConfig(data=data, template=self.template, sampling=sampling, reward=RewardConfig(name="exact"))


class AlgorithmConfig(Section):
    reward: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Reward shaping."""
    masks: MasksConfig = Field(default_factory=MasksConfig)
    """Samples excluded from training."""
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantageConfig)
    """Advantage estimator."""
    whiten_advantages: bool = False
    """Normalise advantages to mean 0 and variance 1 over all sampled tokens of the batch."""
    policy_loss: PolicyLossConfig = Field(default_factory=PpoLossConfig)
    """Policy loss."""
    mismatch_correction: MismatchCorrectionConfig | None = None
    """Correction for different log-probs in engine and trainer; null: none."""
    value_loss: ValueLossConfig = Field(default_factory=ValueLossConfig)
    """Loss of the critic."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """Reduction of token losses over the mini-batch of all ranks. token_mean: mean over tokens. sequence_mean_token_mean: mean over
    sequences of token means. sequence_mean_token_sum: mean over sequences of token sums. constant: the same, each sum divided by
    aggregation_constant."""
    sequence: Literal["sample", "row"] = "sample"
    """Unit that `aggregation` counts as one sequence, if an agent's requests branch and a sample has several rows. sample: all its rows
    together. row: each row, so samples with more rows count more."""
    aggregation_constant: PositiveInt | None = None
    """Divisor in tokens for `aggregation: constant`; null: the largest max_tokens of all domains."""
    kl_in_reward: KlInRewardConfig = Field(default_factory=KlInRewardConfig)
    """KL(policy || reference) subtracted from every token's reward."""
    kl_in_loss: KlInLossConfig = Field(default_factory=KlInLossConfig)
    """KL(policy || reference) added to the loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0: off."""
    ptx: PtxConfig | None = None
    """Supervised loss on a data set; null: none."""
    old_log_probs: Literal["recompute", "current", "rollout"] = "recompute"
    """Source of old log-probs. recompute: an extra forward pass before the updates. current: the training pass, detached; only with one
    update per batch. rollout: the engine."""
    routing_replay: Literal["none", "train", "rollout"] = "none"
    """Experts used in the actor's updates (models with experts). none: the router chooses anew. train: the experts of the pass for old
    log-probs. rollout: the engine's, also in that pass. The router still learns, since its probabilities weight the experts' outputs."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Mini-batches (optimizer steps) per pass."""
    early_stop_kl: PositiveFloat | None = None
    """Limit of KL(old || new), in nats, averaged over an update's tokens. If an update exceeds it or gives NaN, the actor skips its
    remaining updates of the step. Updates skipped for a non-finite loss or gradient are not checked. null: no limit."""
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
        """True if the loss has a ratio to the engine's log-probs."""
        correction = self.mismatch_correction
        return self.old_log_probs == "rollout" or (correction is not None and correction.weight is not None)
