from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll_lite.config.schema.base import (
    ASCENDING,
    DataPath,
    Mistakes,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    rule,
)
from roll_lite.config.schema.domains import DataConfig, DomainConfig, PlainTemplateConfig, RewardConfig, SamplingConfig, TemplateConfig
from roll_lite.config.schema.losses import (
    AdvantageConfig,
    GrpoAdvantageConfig,
    MismatchCorrectionConfig,
    PolicyLossConfig,
    PpoLossConfig,
    ValueLossConfig,
)
from roll_lite.config.user_function import check_function

# ---------------------------------------------------------------- KL


class FixedKlConfig(Section):
    """Constant KL coefficient."""

    name: Literal["fixed"] = "fixed"


class AdaptiveKlConfig(Section):
    """KL coefficient that rises while KL is above the target, and falls while below."""

    name: Literal["adaptive"] = "adaptive"
    target: PositiveFloat
    """Target of KL(policy || reference), in nats per token. kl_in_reward measures it with its `estimator` (k3 for abs), kl_in_loss
    with k3, or with full if configured."""
    horizon: PositiveFloat = 10000.0
    """Samples over which the coefficient changes by at most 20%; larger is slower."""


KlControllerConfig = FixedKlConfig | AdaptiveKlConfig


class KlInRewardConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight of KL; 0: off."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """KL estimator: k1 = log(policy / reference), k2 = k1² / 2, k3 = exp(-k1) - 1 + k1, abs = |k1|, full = exact over the vocabulary."""
    controller: KlControllerConfig = FixedKlConfig()
    """Fixed or adaptive weight."""

    @rule
    def _controls(self) -> Mistakes:
        if self.controller.name == "adaptive" and self.coef == 0:
            yield "controller.name", "multiplies the term's coef, which is 0; set it"


class KlInLossConfig(KlInRewardConfig):
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """KL estimator, as for kl_in_reward."""
    unbiased_gradient: bool = False
    """Use an unbiased gradient of KL(policy || reference), not the gradient of the estimate."""


# ---------------------------------------------------------------- rewards and masks


class RewardNormalizationConfig(Section):
    over: Literal["batch", "group", "running"]
    """Samples that give mean and standard deviation. batch: the step's training samples. group: all samples of the prompt. running: all
    training samples so far."""
    mean: bool = True
    """Subtract the mean."""
    std: bool = True
    """Divide by the standard deviation."""


class LengthPenaltyConfig(Section):
    name: Literal["linear", "group"] = "linear"
    """linear: subtract coef * tokens / max_tokens. group: add coef/2 for the group's shortest response, falling linearly to -coef/2 for its
    longest; incorrect samples get at most 0. Only the policy's tokens count."""
    coef: PositiveFloat
    """Strength of the penalty."""


class OverlongConfig(Section):
    """DAPO's soft overlong punishment, for responses near max_tokens. All tokens after the prompt count, also the environment's."""

    buffer_tokens: PositiveInt
    """Tokens before max_tokens over which the penalty grows linearly."""
    penalty: PositiveFloat = 1.0
    """Penalty at max_tokens."""


class RewardShapingConfig(Section):
    """Steps from score to reward, in this order: format bonus; length, truncation and overlong penalties; scale; clip; normalisation;
    domain weight."""

    length_penalty: LengthPenaltyConfig | None = None
    """Penalty for long responses."""
    overlong: OverlongConfig | None = None
    """Penalty for responses near max_tokens."""
    scale: PositiveFloat = 1.0
    """Factor of all rewards."""
    clip: PositiveFloat | None = None
    """Limit rewards to [-clip, clip]; null: off."""
    normalize: RewardNormalizationConfig | None = None
    """Normalisation of rewards."""


class MasksConfig(Section):
    """Exclusion of samples from training. Excluded samples still count in group baselines."""

    truncated: Literal["keep", "mask", "penalize"] = "keep"
    """Samples cut at max_tokens or max_turns. keep: train. mask: exclude. penalize: train with truncated_penalty."""
    truncated_penalty: PositiveFloat = 1.0
    """Amount that penalize subtracts from the reward."""
    group_mean: Annotated[tuple[float, float], ASCENDING] | None = None
    """Train only groups with a mean score in this inclusive range."""
    response_tokens: Annotated[tuple[NonNegativeInt, PositiveInt], ASCENDING] | None = None
    """Train only responses with a length in this inclusive range."""
    function: str | None = None
    """Dotted path to your function `RewardRows -> weights [samples]` (docs/algorithms.md). Weights multiply losses; 0 excludes a sample."""

    @rule
    def _callable(self) -> Mistakes:
        if self.function is not None:
            yield from check_function("function", self.function, {})


class PtxDataConfig(Section):
    train: DataPath | NonEmpty[DataPath]
    """Data: .jsonl, .parquet, a folder, hf://..., or a list of these."""
    prompt: str = "prompt"
    """Column with the prompt (string or chat messages)."""
    answer: str | None = "answer"
    """Column with the text to learn; null: learn the prompt (pre-training)."""


class PtxConfig(Section):
    """Supervised loss in the actor's optimizer steps (PPO-ptx): coef * mean cross-entropy at temperature 1."""

    data: PtxDataConfig
    """Data to learn, in a seeded order that resumed runs continue."""
    template: TemplateConfig = PlainTemplateConfig()
    """Template of the prompt; answer and end of sequence follow."""
    coef: PositiveFloat
    """Weight of the mean cross-entropy."""
    samples: PositiveInt
    """Data rows per optimizer step, packed with the policy's samples."""
    max_tokens: Annotated[int, Field(ge=2)] = 4096
    """Maximum tokens of prompt and answer; longer rows are cut, and left out if their prompt fills it."""

    @property
    def as_domain(self) -> DomainConfig:
        """Domain with this data and template, to load its prompts. Its reward is a placeholder."""
        data = DataConfig(train=self.data.train, prompt=self.data.prompt, answer=self.data.answer)
        sampling = SamplingConfig(max_prompt_tokens=2**31 - 1)  # longer rows are cut
        return DomainConfig(data=data, template=self.template, sampling=sampling, reward=RewardConfig(name="exact"))


class AlgorithmConfig(Section):
    reward: RewardShapingConfig = RewardShapingConfig()
    """Reward shaping."""
    masks: MasksConfig = MasksConfig()
    """Samples excluded from training."""
    advantage: AdvantageConfig = GrpoAdvantageConfig()
    """Advantage estimator."""
    whiten_advantages: bool = False
    """Normalise advantages to mean 0 and variance 1 over the batch's sampled tokens."""
    policy_loss: PolicyLossConfig = PpoLossConfig()
    """Policy loss."""
    mismatch_correction: MismatchCorrectionConfig | None = None
    """Correction for different log-probs in engine and trainer."""
    value_loss: ValueLossConfig = ValueLossConfig()
    """Loss of the critic."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """Reduction of token losses over the mini-batch of all ranks. token_mean: mean over tokens. sequence_mean_token_mean,
    sequence_mean_token_sum: mean over sequences of their token means or sums. constant: sequence_mean_token_sum divided by
    aggregation_constant."""
    sequence: Literal["sample", "row"] = "sample"
    """Unit that `aggregation` counts as a sequence, if an agent's requests gave a sample several training rows. sample: all its rows
    together. row: each row."""
    aggregation_constant: PositiveInt | None = None
    """Divisor in tokens for `aggregation: constant`; null: the largest max_tokens."""
    kl_in_reward: KlInRewardConfig = KlInRewardConfig()
    """KL(policy || reference) subtracted from every token's reward."""
    kl_in_loss: KlInLossConfig = KlInLossConfig()
    """KL(policy || reference) added to the loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0: off."""
    ptx: PtxConfig | None = None
    """Supervised loss on a data set."""
    old_log_probs: Literal["recompute", "current", "rollout"] = "recompute"
    """Source of old log-probs. recompute: an extra forward pass. current: the training pass, detached. rollout: the engine."""
    routing_replay: Literal["none", "train", "rollout"] = "none"
    """Expert choices in the actor's updates. none: chosen anew. train: those of the pass for old log-probs. rollout: the engine's, also in
    the pass for old log-probs. The router still learns: its probabilities weight the experts."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Mini-batches (optimizer steps) per pass."""
    early_stop_kl: PositiveFloat | None = None
    """KL(old || new), in nats per token, beyond which the actor skips the step's remaining updates."""
    critic_warmup_steps: NonNegativeInt = 0
    """First steps, which train only the critic."""

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
        """True if the loss weights tokens by the ratio of the trainer's to the engine's probability."""
        correction = self.mismatch_correction
        return self.old_log_probs == "rollout" or (correction is not None and correction.weight is not None)
