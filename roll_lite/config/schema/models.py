from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.problems import did_you_mean
from roll_lite.config.schema.base import (
    BetweenZeroAndOne,
    Mistakes,
    ModelFolder,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    UserPath,
    below,
    rule,
)

# ---------------------------------------------------------------- model and optimisation


Dtype = Literal["float32", "bfloat16"]


class ModelConfig(Section):
    path: ModelFolder
    """Model folder in Hugging Face format, or name on the hub: owner/name or hf://owner/name?revision=... (docs/data.md)."""
    dtype: Dtype = "bfloat16"
    """Precision of weights. Use float32 on CPUs and bfloat16 on GPUs."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW of Megatron-Core, with float32 moments and master weights."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up: step i of n uses i/n of lr. Omitted steps count."""
    decay: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Schedule after warm-up. linear, cosine: decay to min_lr by the run's end. wsd: lr until the last decay_steps, then
    decay_shape."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps of wsd's final decay to min_lr."""
    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape f of wsd's decay, min_lr + f(x) * (lr - min_lr), x from 0 to 1. linear: 1 - x; cosine: (1 + cos(pi x)) / 2; exponential: 2 *
    0.5^x - 1; minus_sqrt: 1 - sqrt(x)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, except of biases and norms."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    eps: PositiveFloat = 1e-8
    """Term added to AdamW's denominator."""
    on_host: bool = False
    """Keep moments and compute updates in host memory. Saves 8 bytes of device memory per trained weight, but copies gradients and weights
    in every step."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global gradient norm; above it gradients are scaled down. 0: off."""
    stop_after_skipped: NonNegativeInt = 5
    """Consecutive skipped updates (loss or gradient not finite) that end the run; 0: never."""

    @rule
    def _least(self) -> Mistakes:
        if self.min_lr > self.lr:
            yield "min_lr", f"is more than lr ({self.lr})"

    @rule
    def _wsd(self) -> Mistakes:
        if self.decay == "wsd" and self.decay_steps is None:
            yield "decay_steps", "decay: wsd needs the number of optimizer steps at the end of the run that it falls over"


FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", *FEED_FORWARD)


class LoraConfig(Section):
    """Low-rank adapters, trained instead of the weights: y = W x + alpha / rank * B A x."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters."""
    targets: NonEmpty[str] = [*LINEAR_LAYERS]
    """Linear layers with adapters: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. In models with experts, gate_proj,
    up_proj and down_proj are those of all experts."""
    path: UserPath | None = None
    """Folder of initial adapters in PEFT's format, with this rank, alpha and targets."""
    export: Literal["merged", "adapter"] = "merged"
    """Format of `checkpoint.export_model`. merged: all weights. adapter: adapters alone, in PEFT's format."""
    engines: Literal["merged", "adapter"] = "merged"
    """Content of weight updates. merged: all weights. adapter: only adapters, far less to send, but slightly slower generation; not for
    adapters of experts."""

    @rule
    def _layers(self) -> Mistakes:
        for name, count in Counter(self.targets).items():
            if name not in LINEAR_LAYERS:
                yield "targets", f"no such linear layer {name!r}; {did_you_mean(name, LINEAR_LAYERS)}"
            if count > 1:
                yield "targets", f"lists {name} more than once"


# ---------------------------------------------------------------- strategies (unions keyed on `name`)


class MegatronStrategyConfig(Section):
    """Training and forward passes with Megatron-Core."""

    name: Literal["megatron"] = "megatron"
    tensor_parallel: PositiveInt = 1
    """Ranks that split every layer's matrices."""
    pipeline_parallel: PositiveInt = 1
    """Ranks (stages) that split the model by layers."""
    virtual_pipeline_parallel: PositiveInt = 1
    """Interleaved model parts per stage. More parts: less waiting, more communication."""
    pipeline_layers: NonEmpty[NonNegativeInt] | None = None
    """Layers of each pipeline part, in layer order: pipeline_parallel x virtual_pipeline_parallel numbers. Part i (from 0) is on stage i %
    pipeline_parallel. Fewer in the first (embeddings) and last part (output layer) balance the stages. null: equal numbers."""
    context_parallel: PositiveInt = 1
    """Ranks that split the tokens of a micro-batch, for long samples."""
    expert_parallel: PositiveInt = 1
    """Ranks that divide the experts; each holds whole experts."""
    expert_tensor_parallel: PositiveInt = 1
    """Ranks that split every expert's matrices."""
    sequence_parallel: bool = False
    """Split activations outside tensor-parallel layers along the sequence, to save memory."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """Implementation of layers: PyTorch, or NVIDIA's Transformer Engine with fused kernels. auto: transformer_engine if installed, with a
    GPU and without lora; else torch."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass, to save memory. selective: only in recompute_modules; full: in whole layers."""
    recompute_modules: NonEmpty[Literal["mlp", "moe", "core_attn"]] | None = None
    """Modules for `recompute: selective`. mlp: most of a layer's activations. moe: router and experts, with their communication. core_attn:
    attention. null: mlp, and also moe if the model has experts."""

    @rule
    def _sequence(self) -> Mistakes:
        if self.sequence_parallel and self.tensor_parallel == 1:
            yield "sequence_parallel", "needs tensor_parallel > 1; use false"

    @rule
    def _parts(self) -> Mistakes:
        pipeline, virtual, layers = self.pipeline_parallel, self.virtual_pipeline_parallel, self.pipeline_layers
        if virtual > 1 and pipeline == 1:
            yield "virtual_pipeline_parallel", "needs pipeline_parallel > 1; use 1"
        elif layers is not None and len(layers) != pipeline * virtual:
            product = f"pipeline_parallel {pipeline}" + (f" x virtual_pipeline_parallel {virtual}" if virtual > 1 else "")
            yield "pipeline_layers", f"has {len(layers)} numbers, {product} needs {pipeline * virtual}"
        elif layers is not None and 0 in layers[1:-1]:
            ends = "only the first part, with the embeddings, and the last, with the output layer"
            yield "pipeline_layers", f"{ends}, can do without layers"


class SpeculationConfig(Section):
    """Speculative decoding without a draft model: one pass checks a draft of several tokens. Responses keep the model's distribution."""

    name: Literal["ngram"] = "ngram"
    """Source of drafts. ngram: the text that followed an earlier occurrence of the last tokens, in the prompt or response."""
    tokens: Annotated[int, Field(ge=1, le=128)] = 4
    """Maximum tokens of a draft."""
    min_match: PositiveInt = 2
    """Minimum tokens that must match an earlier occurrence."""
    max_match: Annotated[int, Field(ge=1, le=16)] = 4
    """Maximum tokens that are compared; the longest match is used."""

    @rule
    def _matches(self) -> Mistakes:
        if self.min_match > self.max_match:
            yield "min_match", f"is more than max_match ({self.max_match})"


class EngineStrategyConfig(Section):
    """Settings shared by vLLM and SGLang."""

    name: str
    tensor_parallel: PositiveInt = 1
    """Devices of an engine replica, which split every layer's matrices."""
    expert_parallel: PositiveInt = 1
    """1: each device holds a slice of every expert. Equal to tensor_parallel: each holds whole experts."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus response in tokens; null: from the domains' sampling."""
    max_running_requests: PositiveInt = 256
    """Maximum requests decoded by an engine at a time."""
    max_batched_tokens: PositiveInt = 8192
    """Maximum tokens in an engine's forward pass; longer prompts are split, except by vLLM on a CPU."""
    kv_cache_mb: PositiveInt | None = None
    """KV cache size in MB. null: from gpu_memory_utilization on GPUs, 256 on a CPU."""
    gpu_memory_utilization: PositiveShare = 0.85
    """Share of a GPU's memory for an engine. vLLM stays within this share; SGLang uses more memory, for activations and CUDA graphs."""
    enforce_eager: bool = False
    """Run without CUDA graphs: faster start, slower generation."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8 (GPUs only): half the weight memory, faster matrix products. The engines' policy then differs from the trainer's: use
    algorithm.mismatch_correction (docs/gpu.md)."""
    speculation: SpeculationConfig | None = None
    """Speculative decoding, for vLLM in actor_infer: faster if responses repeat text (docs/gpu.md). null: off."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM or SGLang."""

    @rule
    def _limits(self) -> Mistakes:
        """Check that a forward pass has room for all running requests with their drafts: cut drafts would make a response depend on other
        requests."""
        tokens = 1 + (self.speculation.tokens if self.speculation else 0)
        if self.max_batched_tokens < (least := self.max_running_requests * tokens):
            needed = "at least one token" if tokens == 1 else f"up to {tokens} tokens (1 + speculation.tokens)"
            yield "max_batched_tokens", f"every running request takes {needed} of a pass; use at least {least}"


class VllmStrategyConfig(EngineStrategyConfig):
    name: Literal["vllm"] = "vllm"


class SglangStrategyConfig(EngineStrategyConfig):
    name: Literal["sglang"] = "sglang"

    @rule
    def _no_speculation(self) -> Mistakes:
        if self.speculation is not None:
            message = "SGLang's ignores min_p, leaves top_p and top_k out of log-probs and samples greedily on CPUs"
            yield "speculation", f"{message}; use null, or vllm"


class HfStrategyConfig(Section):
    """Forward passes with Hugging Face transformers; each device holds a whole model."""

    name: Literal["hf"] = "hf"


TrainStrategyConfig = MegatronStrategyConfig
InferStrategyConfig = VllmStrategyConfig | SglangStrategyConfig
RewardModelStrategyConfig = HfStrategyConfig | MegatronStrategyConfig

ON_A_NODE = re.compile(r"node(\d{1,4}):(\d{1,4})(?:-(\d{1,4}))?")
_MOST_DEVICES = below(65536, "more than a cluster has")


def _on_a_node(text: str) -> str:
    if not ON_A_NODE.fullmatch(text):
        raise ValueError(f"{text!r} names no devices of a node; write node0:3, or node0:0-3 for several")
    return text


_NodeDevices = Annotated[str, AfterValidator(_on_a_node)]
Devices = Annotated[PositiveInt, _MOST_DEVICES] | list[Annotated[int, Field(ge=0), _MOST_DEVICES] | _NodeDevices]


# ---------------------------------------------------------------- roles


class ForwardRoleConfig(Section):
    devices: Devices = 1
    """Number of devices, or a list: [0, 1], numbered over all nodes, or [node0:0-3, node1:0-3] (needs placement.nodes). Without GPUs a
    device is a CPU slot."""
    strategy: TrainStrategyConfig = MegatronStrategyConfig()
    """Megatron-Core's parallel layout and settings."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum tokens in a rank's forward pass, up to which samples are packed; a longer sample runs alone. Lower it if memory runs out."""
    micro_batch_size: PositiveInt | None = None
    """Maximum samples in a rank's forward pass; null: unlimited."""
    offload: bool = False
    """Free this role's device memory while it is idle."""
    restarts: NonNegativeInt = 3
    """Maximum restarts per hour after a rank died or hung; then the run ends. Trained roles repeat the updates since the newest checkpoint,
    or since the initial weights."""
    threads: PositiveInt = 1
    """CPU threads per process."""


class TrainRoleConfig(ForwardRoleConfig):
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate."""
    balance_coef: NonNegativeFloat = 0.0
    """Weight of Switch Transformer's load-balancing loss for models with experts; 0: off. config.json's router_aux_loss_coef is ignored: it
    would pull the policy away from the rewards."""
    compare_replicas_every: NonNegativeInt = 10
    """Steps between checksum comparisons of data-parallel replicas; a difference ends the run. 0: never."""
    train_micro_batch_tokens: PositiveInt | None = None
    """micro_batch_tokens override for training; null: none."""
    train_micro_batch_size: PositiveInt | None = None
    """micro_batch_size override for training; null: none."""

    @property
    def in_training(self) -> tuple[int, int | None]:
        """Limits of a training micro-batch: (tokens, samples or None)."""
        return self.train_micro_batch_tokens or self.micro_batch_tokens, self.train_micro_batch_size or self.micro_batch_size


class EmaConfig(Section):
    """Exponential moving average of the actor's weights, in float32 in host memory; exported as `model_ema/`."""

    decay: BetweenZeroAndOne = 0.99
    """Share of the old average kept per update; 0.99 averages over about 100 updates."""


class ActorRoleConfig(TrainRoleConfig):
    lora: LoraConfig | None = None
    """Low-rank adapters; all other weights are frozen."""
    ema: EmaConfig | None = None
    """Moving average of the weights."""

    @rule
    def _adapters_and_average(self) -> Mistakes:
        if self.lora is not None and self.ema is not None:
            yield "ema", "is an average of all weights, of which only adapters train; remove it, or lora"

    @rule
    def _adapters_and_router(self) -> Mistakes:
        if self.lora is not None and self.balance_coef > 0:
            yield "balance_coef", "the router stays as it is where adapters train; use 0, or no lora"

    @rule
    def _adapters_of_stages(self) -> Mistakes:
        layers, stages = self.strategy.pipeline_layers, self.strategy.pipeline_parallel
        if self.lora is not None and layers and not all(any(layers[stage::stages]) for stage in range(stages)):
            yield "strategy.pipeline_layers", "a stage without layers has no adapters to train; give it some"

    @rule
    def _adapters_and_kernels(self) -> Mistakes:
        if self.lora is not None and self.strategy.layers == "transformer_engine":
            yield "strategy.layers", "it has norms inside the matrix products that adapters (lora) are put beside; use torch, or auto"


class RefreshConfig(Section):
    """Periodic replacement of the reference by the actor. Needs a run folder that all nodes share."""

    every: PositiveInt
    """Steps between replacements."""
    weights: Literal["actor", "ema"] = "actor"
    """actor: the actor's weights; ema: their moving average (actor_train.ema)."""


class ReferenceRoleConfig(ForwardRoleConfig):
    refresh: RefreshConfig | None = None
    """Periodic update from the actor; null: never."""


class CriticRoleConfig(TrainRoleConfig):
    init: Literal["actor", "reward_model", "path"] = "actor"
    """Initial weights. actor: the actor's, with a new value head. reward_model or path: those of the model at `path`, with its value
    head."""
    path: ModelFolder | None = None
    """Reward model, or value model exported by roll_lite: folder or name on the hub."""

    @rule
    def _source(self) -> Mistakes:
        if self.init == "actor" and self.path is not None:
            yield "path", "is not used with init: actor; remove it, or use init: path or init: reward_model"
        if self.init != "actor" and self.path is None:
            yield "path", f"init: {self.init} needs the checkpoint's folder"


class InferRoleConfig(Section):
    devices: Devices = 1
    """Number of devices, or a list of them. Each replica takes strategy.tensor_parallel devices; more than placement.devices_per_node are
    spread equally over several nodes."""
    replicas_per_device: PositiveInt = 1
    """Engine replicas per device, which share strategy.gpu_memory_utilization. Needs tensor_parallel 1."""
    strategy: InferStrategyConfig = VllmStrategyConfig()
    """Engine (vllm or sglang) and its settings."""
    dtype: Dtype | None = None
    """Precision in engines; null: model.dtype."""
    offload: bool = False
    """Free the engines' device memory while the actor trains."""
    restarts: NonNegativeInt = 3
    """Maximum restarts of a lost engine per hour; then the run continues without it, or ends if none is left. 0 also turns off moving
    drained nodes' requests to other engines early."""
    most_replicas: PositiveInt | None = None
    """Maximum engine replicas. Replicas beyond `devices` start when nodes with free devices join, and end when their node leaves."""
    threads: PositiveInt = 1
    """CPU threads per engine."""

    @rule
    def _whole_devices(self) -> Mistakes:
        if self.replicas_per_device > 1 and (size := self.strategy.tensor_parallel) > 1:
            yield "replicas_per_device", f"a replica has {size} devices of its own (tensor_parallel); use 1"

    @rule
    def _joining(self) -> Mistakes:
        if self.most_replicas is not None and self.replicas_per_device > 1:
            yield "most_replicas", "engines that join have devices of their own; use actor_infer.replicas_per_device: 1"
        if self.most_replicas is not None and self.restarts == 0:
            yield "most_replicas", "an engine joins as a lost one returns, and actor_infer.restarts is 0; raise it"


class RewardModelConfig(Section):
    """Sequence-classification model with one output, for rewards of type `model`."""

    path: ModelFolder
    """Folder, or name on the hub, of a ForSequenceClassification model with one label."""
    devices: Devices = 1
    """Number of devices, or a list."""
    strategy: RewardModelStrategyConfig = HfStrategyConfig()
    """hf, or megatron with its parallel layout."""
    dtype: Dtype = "bfloat16"
    """Precision of weights. Use float32 on CPUs and bfloat16 on GPUs."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum tokens in a rank's forward pass; with hf, padding counts."""
    micro_batch_size: PositiveInt = 8
    """Maximum samples in a rank's forward pass, and in one call to a copy of the model."""
    max_length: PositiveInt | None = None
    """Longest text in tokens; longer ones score 0. null: the model's max_position_embeddings."""
    offload: bool = False
    """Free this model's device memory while nothing is generated."""
    threads: PositiveInt = 1
    """CPU threads per process."""


class JudgeServerConfig(Section):
    """Judge model in vLLM's OpenAI-compatible server, for rewards of type `judge`."""

    path: ModelFolder
    """Model folder in Hugging Face format, or name on the hub."""
    devices: Devices = 1
    """Number of devices, or a list of them. Each server takes strategy.tensor_parallel devices."""
    strategy: VllmStrategyConfig = VllmStrategyConfig()
    """Engine settings. max_model_len defaults to the model's; engine_args takes any server argument."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto: the checkpoint's."""
    threads: PositiveInt = 1
    """CPU threads per server."""
    start_timeout_s: PositiveFloat = 900.0
    """Seconds for a server to load the model."""
    restarts: NonNegativeInt = 3
    """Maximum restarts per hour of each server, and of the worker process that runs the server; then the run fails."""

    @rule
    def _no_speculation(self) -> Mistakes:
        if self.strategy.speculation is not None:
            yield "strategy.speculation", "is for actor_infer; give a judge engine_args: {speculative_config: {...}}"
