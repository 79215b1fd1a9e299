"""The configuration: typed, strict, frozen. Everything a user can write in YAML is declared here, once.

A field's description is its documentation: `docs/configuration.md` is generated from this file.
What relates several fields to each other is checked in `checks.py`; what follows from them is computed in `arithmetic.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from roll_lite.config.files import kind_of
from roll_lite.config.shipped import found


def from_current_folder(path: Path) -> Path:
    """The one rule for paths, the shell's: relative to the folder the run is started in. Absolute from then on, so that workers agree.
    What the package ships is found from everywhere. ValueError where nobody could tell what is there.
    """
    try:
        path = found(path)
    except RuntimeError:
        raise ValueError(f"there is no home folder {path.parts[0]}") from None
    kind_of(path)
    return path


def _below(limit: int, what: str) -> AfterValidator:
    def check(number: int) -> int:
        if number >= limit:
            raise ValueError(f"is not below {limit:,}, {what}")
        return number

    return AfterValidator(check)


PositiveInt = Annotated[int, Field(gt=0), _below(2**31, "the limit for all numbers here")]
NonNegativeFloat = Annotated[float, Field(ge=0)]
TimeLimit = Annotated[float, Field(ge=0)] | None
PositiveFloat = Annotated[float, Field(gt=0)]
UserPath = Annotated[Path, AfterValidator(from_current_folder)]


class Refused(Exception):
    """A field was read whose value the schema has refused: nothing can be said of it."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise Refused(name)
            return super().__getattr__(name)

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings as keyword arguments, without the name by which a variant is chosen."""
        return {field: value for field, value in self if field != "name"}


# ---------------------------------------------------------------- model and optimisation


class ModelConfig(Section):
    path: UserPath
    """Folder with the model in Hugging Face format (config.json, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of training and inference. float32 on a CPU, bfloat16 on GPUs."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises: step i of n runs at i/n of lr."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (never applied to biases and norms)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's denominator offset."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 switches clipping off."""


# ---------------------------------------------------------------- strategies (unions keyed on `name`)


class MegatronStrategyConfig(Section):
    """Training and forward passes on Megatron-Core."""

    name: Literal["megatron"] = "megatron"
    tensor_parallel: PositiveInt = 1
    """Ranks that share every layer's matrices."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that share the layers."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence (needs tensor_parallel > 1)."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    recompute: Literal["none", "full"] = "none"
    """Recompute activations of whole layers in the backward pass instead of keeping them."""


class EngineStrategyConfig(Section):
    """What all real engines have; switching from one to another changes the name only."""

    name: str
    tensor_parallel: PositiveInt = 1
    """Devices of one engine replica."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus response in tokens; derived from the domains where absent."""
    max_running_requests: PositiveInt = 256
    """Requests that an engine decodes at the same time."""
    max_batched_tokens: PositiveInt = 8192
    """Tokens that an engine processes in one forward pass; on a CPU vLLM takes at least max_model_len, which the start says."""
    kv_cache_mb: PositiveInt | None = None
    """Size of the key/value cache; on GPUs derived from gpu_memory_utilization where absent, on a CPU 256."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory: vLLM takes no more; SGLang's weights and key/value cache fill it, activations, CUDA graphs come on top."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the engine itself, passed on as they are."""


class VllmStrategyConfig(EngineStrategyConfig):
    """Rollouts on vLLM."""

    name: Literal["vllm"] = "vllm"


class SglangStrategyConfig(EngineStrategyConfig):
    """Rollouts on SGLang."""

    name: Literal["sglang"] = "sglang"


class HfStrategyConfig(Section):
    """Forward passes of Hugging Face transformers: any architecture that it knows, a whole model on each device."""

    name: Literal["hf"] = "hf"


class ScriptedStrategyConfig(Section):
    """A stand-in engine with declared lengths, delays and failures: scheduler tests and simulations only."""

    name: Literal["scripted"] = "scripted"
    response_tokens: PositiveInt = 8
    """Length of every response."""
    seconds_per_token: NonNegativeFloat = 0.0
    """Time that one token takes."""
    failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of requests that fail."""


TrainStrategyConfig = MegatronStrategyConfig
InferStrategyConfig = Annotated[VllmStrategyConfig | SglangStrategyConfig | ScriptedStrategyConfig, Field(discriminator="name")]
RewardModelStrategyConfig = Annotated[HfStrategyConfig | MegatronStrategyConfig, Field(discriminator="name")]

_MOST_DEVICES = _below(65536, "more than a cluster has")
Devices = Annotated[PositiveInt, _MOST_DEVICES] | list[Annotated[int, Field(ge=0), _MOST_DEVICES]]


# ---------------------------------------------------------------- roles


class ForwardRoleConfig(Section):
    """A role that runs forward passes only (the reference)."""

    devices: Devices = 1
    """Number of devices, or the list of device numbers, counted over all nodes. On a machine without GPUs a device is a CPU slot."""
    strategy: TrainStrategyConfig = Field(default_factory=MegatronStrategyConfig)
    """How the model is laid out."""
    micro_batch_size: PositiveInt = 8
    """Samples in one forward pass of a rank."""
    offload: bool = False
    """Free this role's memory while it is idle."""
    threads: PositiveInt = 1
    """CPU threads of each process."""


class TrainRoleConfig(ForwardRoleConfig):
    """A role that trains (the actor)."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer and learning rate."""
    train_micro_batch_size: PositiveInt | None = None
    """Samples in one forward and backward pass of a rank; micro_batch_size where absent."""


class CriticRoleConfig(TrainRoleConfig):
    """The value model."""

    init: Literal["actor", "reward_model", "path"] = "actor"
    """Where the weights come from: the actor's model with a fresh value head, a reward model's checkpoint with its head, or a value
    model saved by roll_lite."""
    path: UserPath | None = None
    """The checkpoint's folder, for `init: reward_model` and `init: path`."""


class InferRoleConfig(Section):
    """The engines that generate."""

    devices: Devices = 1
    """Number of devices, or the list of device numbers. devices / strategy.tensor_parallel is the number of engine replicas."""
    strategy: InferStrategyConfig = Field(default_factory=VllmStrategyConfig)
    """The engine."""
    offload: bool = False
    """Free the engines' memory while the actor trains."""
    threads: PositiveInt = 1
    """CPU threads of each engine."""


class RewardModelConfig(Section):
    """A sequence-classification model with one output, which scores responses for the domains whose reward is of type `model`."""

    path: UserPath
    """Folder with the checkpoint in Hugging Face format: a ForSequenceClassification model with one label, and its tokenizer."""
    devices: Devices = 1
    """Number of devices, or the list of device numbers. hf: one copy of the model on each."""
    strategy: RewardModelStrategyConfig = Field(default_factory=HfStrategyConfig)
    """How the model is run and laid out."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of its weights and forward passes. float32 on a CPU, bfloat16 on GPUs."""
    micro_batch_size: PositiveInt = 8
    """Samples in one forward pass of a rank."""
    max_length: PositiveInt | None = None
    """Longest text in tokens, the model's max_position_embeddings where absent. A longer one is a failure, never cut."""
    offload: bool = False
    """Free this model's memory while nothing is being generated."""
    threads: PositiveInt = 1
    """CPU threads of each process."""


class JudgeServerConfig(Section):
    """A language model that gives verdicts: vLLM's OpenAI-compatible server, started with the run, for the domains whose reward of type
    `judge` names it."""

    path: UserPath
    """Folder with the model in Hugging Face format."""
    devices: Devices = 1
    """Number of devices, or the list of device numbers. devices / strategy.tensor_parallel is the number of servers."""
    strategy: VllmStrategyConfig = Field(default_factory=VllmStrategyConfig)
    """The engine; max_model_len is the model's own where absent. engine_args may hold any of the server's arguments."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision; auto is the checkpoint's own."""
    threads: PositiveInt = 1
    """CPU threads of each server."""
    start_timeout_s: PositiveFloat = 900.0
    """How long a server may take to load its model."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often a server that dies is started again before the run fails. Verdicts wait or fail in the meantime, and are retried."""


# ---------------------------------------------------------------- domains


class DataFilterConfig(Section):
    """Rows that are left out; how many is said at the start."""

    prompt_tokens: tuple[Annotated[int, Field(ge=0)], PositiveInt] | None = None
    """Keep prompts (template applied) whose length lies in this range, ends included; held-out ones, too."""
    difficulty: str | None = None
    """Name of a column with a number, such as the share of samples that a model has solved. Only `train` needs it."""
    difficulty_range: tuple[float, float] | None = None
    """Keep rows of `train` whose difficulty lies in this range, ends included; of held-out prompts all are kept."""


DataFiles = UserPath | Annotated[list[UserPath], Field(min_length=1)] | Annotated[dict[UserPath, PositiveFloat], Field(min_length=1)]


class DataConfig(Section):
    train: DataFiles
    """Prompts to train on: a .jsonl or .parquet file, or a folder with a data set saved by Hugging Face `datasets`. Or several: a list is
    one after the other; a mapping of paths to shares gives each its share of the domain's prompts, whatever its length."""
    validation: DataFiles | None = None
    """Held-out prompts; all of them, whatever the shares."""
    tag: str | None = None
    """Name of a column that says which domain a row belongs to, for files that several domains share."""
    tags: list[str] = Field(default_factory=list)
    """The tags of this domain's rows. A row whose tag belongs to no domain that reads its file is an error."""
    filter: DataFilterConfig = Field(default_factory=DataFilterConfig)
    """Which rows to leave out."""
    prompt: str = "prompt"
    """Name of the column with the prompt (a string, or a list of chat messages)."""
    answer: str | None = "answer"
    """Name of the column with the reference answer."""
    weight: str | None = None
    """Name of a column with the weight of a prompt's samples in the loss; 1 for all where absent."""


class TemplateConfig(Section):
    type: Literal["plain", "chat"] = "plain"
    """plain: `text` with the prompt filled in. chat: the tokenizer's chat template."""
    text: str = "{prompt}"
    """For `plain`: the text that the model sees; {prompt} stands for the prompt's column."""
    system: str | None = None
    """For `chat`: a system message."""


LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.01, 2.0
"""vLLM samples at its least one below that, and refuses more."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=GREATEST_TEMPERATURE)] = 1.0
    """Sampling temperature; training log-probs are taken at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k most likely tokens; 0 is off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are an error."""
    max_tokens: PositiveInt = 1024
    """Longest response."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Shortest response."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=32)
    """Texts that end a response, as part of it. One that is complete within the first min_tokens tokens does not."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Tokens that end a response, beside the model's own end of sequence; the response ends with the token."""


class FormatConfig(Section):
    """A bonus for responses of a certain form, whatever their answer."""

    pattern: str
    """Regular expression that has to match somewhere in the response (`.` matches line breaks; anchor with ^ and $ where needed)."""
    bonus: float = 0.1
    """Added to the score of responses that match."""
    penalty: NonNegativeFloat = 0.0
    """Taken off the score of responses that do not."""


class RewardTermConfig(Section):
    """A further term of a domain's reward."""

    type: str
    """As for the reward itself; `length`, `repetition` and `format` are made for this."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    weight: float = 1.0
    """Factor of its value; negative for a penalty."""


class RewardConfig(Section):
    """How a sample is scored: by a function of a known type, or by one of the user's own, and by further terms."""

    type: str
    """A known type (docs/rewards.md), or a dotted path to a function `sample -> score`, sync or async, for one sample or for a list."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    terms: list[RewardTermConfig] = Field(default_factory=list)
    """Added to its value, each times its weight. Whether a sample is correct is the reward's own say."""
    workers: PositiveInt = 1
    """Processes that score this domain's samples."""
    timeout_s: PositiveFloat = 30.0
    """Time after which scoring one sample counts as failed."""
    start_timeout_s: PositiveFloat = 120.0
    """Time for a worker to start: to import the function and whatever it needs."""
    retries: Annotated[int, Field(ge=0)] = 1
    """How often a failed scoring is tried again before the sample is reported as failed."""
    weight: PositiveFloat = 1.0
    """Factor of this domain's rewards, after everything that algorithm.reward does to them."""
    format: FormatConfig | None = None
    """Bonus for the form of a response."""


class DomainConfig(Section):
    data: DataConfig
    """Where the prompts come from."""
    template: TemplateConfig = Field(default_factory=TemplateConfig)
    """How a prompt becomes the model's input."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """How responses are sampled in training."""
    reward: RewardConfig
    """How responses are scored."""
    share: PositiveFloat = 1.0
    """Weight of the domain in the mix; shares need not add up to one."""
    samples_per_prompt: PositiveInt | None = None
    """Group size of this domain; rollout.samples_per_prompt where absent."""


# ---------------------------------------------------------------- rollouts


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 32
    """Prompts (sample groups) in one training batch, over all domains."""
    samples_per_prompt: PositiveInt = 8
    """Responses sampled for each prompt."""
    request_timeout_s: PositiveFloat = 600.0
    """Time for an engine to generate one response, from when it has begun with it: waiting in the engine does not count."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a failed generation is tried again before the sample is reported as failed."""
    keep_mask: bool = False
    """Bring along which tokens survived top-k, top-p and min-p, and take training log-probs over the same tokens."""
    max_mismatch: PositiveFloat | None = 0.2
    """Nats by which the log-probs of engines and trainer may differ on average over the tokens of the first batch; beyond, they hold
    different models and the run ends. In bfloat16 0.01 to 0.05 is usual. null: any difference."""


# ---------------------------------------------------------------- algorithm: advantages


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
    """(reward - group mean) * samples / samples of groups that have spread: flat groups do not thin out the gradient."""

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


# ---------------------------------------------------------------- algorithm: losses


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


class CustomLossConfig(Section):
    """A user's own loss."""

    name: Literal["custom"] = "custom"
    function: str
    """Dotted path to a function `(PolicyTerms, **args) -> PolicyLoss`, see docs/algorithms.md."""
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


class MismatchCorrectionConfig(Section):
    """Weights each token's policy loss with (trainer's probability / engine's probability) of what the engine sampled."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """token: each token's own weight. sequence: the product over the response. geometric: its geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: limit the weight to the range (TIS). mask: weight 0 outside of it (IcePop)."""
    low: NonNegativeFloat = 0.0
    """Lower end of the range."""
    high: PositiveFloat = 2.0
    """Upper end of the range."""


class ValueLossConfig(Section):
    clip: PositiveFloat | None = 0.2
    """New values may move this far from the old ones; null switches clipping off."""


# ---------------------------------------------------------------- algorithm: KL


class FixedKlConfig(Section):
    """The coefficient stays what it is."""

    name: Literal["fixed"] = "fixed"


class AdaptiveKlConfig(Section):
    """The coefficient rises while the KL is above its target and falls while it is below, once per step."""

    name: Literal["adaptive"] = "adaptive"
    target: PositiveFloat
    """KL(policy || reference) to hold, in nats per token."""
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


# ---------------------------------------------------------------- algorithm: rewards and masks


class RewardNormalizationConfig(Section):
    over: Literal["batch", "group", "running"]
    """Whose mean and standard deviation: the step's samples, those of the prompt, or all samples of the run so far."""
    mean: bool = True
    """Take the mean off."""
    std: bool = True
    """Divide by the standard deviation."""


class LengthPenaltyConfig(Section):
    kind: Literal["linear", "group"] = "linear"
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
    old_log_probs: Literal["recompute", "current", "rollout"] = "recompute"
    """recompute: an extra forward pass of the trainer. current: the detached training forward (one update per batch only).
    rollout: the engine's own."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass."""
    early_stop_kl: PositiveFloat | None = None
    """The step's remaining actor updates are left out once KL(old || new) of an update exceeds this, in nats per token."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which only the critic trains."""


# ---------------------------------------------------------------- run


class RayConfig(Section):
    address: str | None = None
    """Address of an existing Ray cluster; RAY_ADDRESS is honoured too. A local one is started where absent."""
    object_store_mb: Annotated[PositiveInt, Field(ge=80)] = 512
    """Size of a local cluster's object store."""
    placement_timeout_s: PositiveFloat = 60.0
    """How long to wait until the cluster has room for all workers."""
    start_timeout_s: PositiveFloat = 300.0
    """How long Ray itself may take to start, or to let the run in."""


class ValidationConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations; 0 validates before the first and after the last step only."""
    samples_per_prompt: PositiveInt = 1
    """Responses sampled for each held-out prompt."""
    temperature: Annotated[float, Field(ge=0, le=GREATEST_TEMPERATURE)] = 1.0
    """Sampling temperature of validation; 0 is greedy."""
    enabled: bool = True
    """Validate at all."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 writes none during the run."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""
    resume: Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Checkpoint folder to go on from, or a run's folder to take its newest."""
    export_model: bool = True
    """Write the final model in Hugging Face format."""


class BatchFilesConfig(Section):
    """Token ids, log-probs, advantages and mini-batches of every step in the run's folder, from which `examples/recompute.py` computes
    losses and weights once more."""

    write: Literal["auto", "always", "never"] = "auto"
    """auto: where a step has at most 262,144 tokens."""
    copy_models_mb: Annotated[int, Field(ge=0)] = 256
    """Models up to this size are copied into the run's folder before training; of larger ones path and checksums are kept."""


class TrackerConfig(Section):
    type: str
    """jsonl, tensorboard, wandb, mlflow, swanlab, or the dotted path to a class of your own, package.module.Class."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Of `wandb.init` or `swanlab.init`; mlflow's tracking_uri, experiment_name and run_name; those of your class."""


class WeightSyncConfig(Section):
    bucket_mb: PositiveInt = 256
    """Size of one transfer."""
    verify_weights: bool = False
    """Compare checksums of trainer and engines after each update."""
    timeout_s: PositiveFloat = 300.0
    """Time after which an update counts as failed."""


class LimitsConfig(Section):
    """Seconds after which something counts as hung, phase by phase (as `time/<phase>` measures them): the run ends and says who did not
    answer, and where it stood. 0 or null: no limit. Work that only takes long needs a larger number, nothing else."""

    start: TimeLimit = 3600.0
    """Until all models and engines are ready, from when Ray runs; that has ray.start_timeout_s."""
    sync_weights: TimeLimit = 3600.0
    """New weights to all engines; weight_sync.timeout_s is the limit for one transfer."""
    generate: TimeLimit = 14400.0
    """All prompts of a step; one request has rollout.request_timeout_s."""
    log_probs: TimeLimit = 7200.0
    """Log-probs and values of a step."""
    advantages: TimeLimit = 3600.0
    """Rewards, KL and advantages of a step."""
    train: TimeLimit = 14400.0
    """All updates of a step."""
    validation: TimeLimit = 14400.0
    """One validation."""
    checkpoint: TimeLimit = 7200.0
    """Writing a checkpoint or the final model."""
    other: TimeLimit = 3600.0
    """Every call that belongs to no phase: moving a role to its devices, resuming."""
    silence: TimeLimit = 300.0
    """A process that answers nothing at all, working or idle: stopped, or never giving Python's lock back. Counts once all are ready."""


class RunConfig(Section):
    """The root."""

    experiment: str
    """Name of the run's folder under run_dir."""
    run_dir: UserPath = Field(default=Path("runs"), validate_default=True)
    """Where runs are written: run_dir/experiment/start time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of prompt order, sampling and training."""
    deterministic: bool = False
    """Repeat a run sample for sample (CPU, synchronous); resumed, it goes on like one that was not interrupted."""
    steps: PositiveInt = 100
    """Training steps."""
    model: ModelConfig
    """The model that is trained."""
    actor_train: TrainRoleConfig = Field(default_factory=TrainRoleConfig)
    """The policy in training."""
    actor_infer: InferRoleConfig = Field(default_factory=InferRoleConfig)
    """The policy in the engines."""
    reference: ForwardRoleConfig | None = None
    """The frozen policy that KL is measured against."""
    critic: CriticRoleConfig | None = None
    """The value model (GAE)."""
    reward_models: dict[str, RewardModelConfig] = Field(default_factory=dict)
    """Reward models by name, for rewards of type `model`; domains may share one."""
    judges: dict[str, JudgeServerConfig] = Field(default_factory=dict)
    """Judges by name, for rewards of type `judge`; domains may share one."""
    domains: Annotated[dict[str, DomainConfig], Field(min_length=1)]
    """Reward domains by name."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Batch sizes and limits of generation."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantages, losses, KL, epochs."""
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    """Held-out accuracy."""
    batches: BatchFilesConfig = Field(default_factory=BatchFilesConfig)
    """What is kept of each step's batch."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints and the final model."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """How new weights reach the engines."""
    trackers: list[TrackerConfig] = Field(default_factory=lambda: [TrackerConfig(type="jsonl"), TrackerConfig(type="tensorboard")])
    """Where metrics go."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """The Ray cluster."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """When something that does not answer counts as hung."""

    _as_written: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What came from the environment is written down as it was written: as `${oc.env:NAME}`."""
        data: dict[str, Any] = handler(self)
        for path, text in self._as_written.items():
            section: Any = data
            for key in path[:-1]:
                section = section[int(key) if isinstance(section, list) else key]
            section[int(path[-1]) if isinstance(section, list) else path[-1]] = text
        return data
