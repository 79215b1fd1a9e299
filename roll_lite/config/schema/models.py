"""Sections of models, training, serving, and roles."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.problems import did_you_mean
from roll_lite.config.schema.base import Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, UserPath, below, rule

# ---------------------------------------------------------------- model and optimisation


class ModelConfig(Section):
    path: UserPath
    """Folder in Hugging Face format (config.json, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of training and inference: float32 on CPUs, bfloat16 on GPUs."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW of Megatron-Core: float32 moments and, for bfloat16 weights, float32 main weights."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of warm-up: step i of n has i/n of lr."""
    decay: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up. wsd (warm-up, stable, decay): lr until the run's last decay_steps."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps of wsd's decay to min_lr, at the end of the run."""
    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of wsd's decay from lr to min_lr. The learning rate is min_lr + f(x) * (lr - min_lr), where x grows from 0 to 1 over
    decay_steps. linear: f(x) = 1 - x; cosine: (1 + cos(pi x)) / 2; exponential: 2 * 0.5^x - 1; minus_sqrt: 1 - sqrt(x)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices, embeddings, output layer and value head; not of biases and norms."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    eps: PositiveFloat = 1e-8
    """Offset of AdamW's denominator."""
    on_host: bool = False
    """Keep moments and compute updates on the host. Saves eight bytes of device memory per trained weight, but copies gradients and
    weights to the host and weights back in every optimizer step."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; above it gradients are scaled down. 0: no clipping."""
    stop_after_skipped: Annotated[int, Field(ge=0)] = 5
    """Skipped updates in a row that end the run, across steps and resumptions; 0: unlimited. An update is skipped if loss or gradient is
    not finite; samples of the first are saved in the run's skipped/."""

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
"""Linear layers of attention and MLP, as in Hugging Face."""


class LoraConfig(Section):
    """Low-rank adapters, trained instead of the weights: y = W x + alpha / rank * B A x. A starts random, B at zero."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale: B A x is multiplied by alpha / rank."""
    targets: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: list(LINEAR_LAYERS))
    """Linear layers with adapters: of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. The last three include every
    expert's."""
    path: UserPath | None = None
    """Folder of initial adapters in PEFT's format (adapter_config.json, adapter_model.safetensors), with equal rank, alpha and targets."""
    export: Literal["merged", "adapter"] = "merged"
    """Model that `checkpoint.export_model` writes: with merged adapters, or the adapters alone in PEFT's format."""
    engines: Literal["merged", "adapter"] = "merged"
    """Weight updates of engines: all weights with merged adapters, or the adapters alone, which engines add to model.path's weights. The
    latter sends much less but costs a little per token. Not for adapters of experts."""

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
    """Ranks that share every layer's matrices."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that share the layers."""
    virtual_pipeline_parallel: PositiveInt = 1
    """Parts of the model per pipeline rank, interleaved: ranks wait less but exchange more (needs pipeline_parallel > 1)."""
    pipeline_layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Number of layers of each pipeline part, in layer order: first the first parts of all stages, then the second ones (pipeline_parallel
    x virtual_pipeline_parallel numbers). The first and the last part also hold embeddings and output layer; fewer layers balance that, 0
    leaves them alone. Absent: equal numbers; if layers remain, the first parts get one more each."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of every micro-batch, for samples too long for one."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts: each holds whole ones, and tokens are sent to them."""
    expert_tensor_parallel: PositiveInt = 1
    """Ranks that share every expert's matrices, like tensor_parallel for the rest."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence (needs tensor_parallel > 1)."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """transformer_engine: NVIDIA's kernels, with norms fused into matrix products and all experts in one call. auto: these if installed,
    with a GPU and without lora; else torch."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of storing them. selective: in recompute_modules; full: in whole layers."""
    recompute_modules: Annotated[list[Literal["mlp", "moe", "core_attn"]], Field(min_length=1)] | None = None
    """Modules for `recompute: selective`; absent: mlp, with experts also moe. mlp: feed-forward part, most of a layer's activations.
    moe: router and experts; sends tokens once more. core_attn: attention, useful with context_parallel, as each rank holds all keys and
    values."""

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


class EngineStrategyConfig(Section):
    """Settings of all engines."""

    name: str
    tensor_parallel: PositiveInt = 1
    """Devices of an engine replica."""
    expert_parallel: PositiveInt = 1
    """1: every device of a replica holds a part of each expert; tensor_parallel: whole experts."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus response in tokens; absent: by the domains."""
    max_running_requests: PositiveInt = 256
    """Maximum number of requests that an engine decodes at a time."""
    max_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in a forward pass. vLLM on a CPU needs at least max_model_len, and raises it with a message."""
    kv_cache_mb: PositiveInt | None = None
    """KV cache in MB; absent: by gpu_memory_utilization on GPUs, 256 on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory: vLLM's limit; SGLang fills it with weights and KV cache, and needs more for activations and CUDA graphs."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: quantise weights on arrival, with a scale per output channel, and activations per token; GPUs only. Halves bfloat16's memory
    and speeds up matrix products, but samples from another policy than the trainer's: use algorithm.mismatch_correction (docs/gpu.md)."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine, unchanged."""

    @rule
    def _limits(self) -> Mistakes:
        if self.max_batched_tokens < self.max_running_requests:
            least = f"use at least max_running_requests ({self.max_running_requests})"
            yield "max_batched_tokens", f"every running request takes at least one token of a pass; {least}"


class VllmStrategyConfig(EngineStrategyConfig):
    name: Literal["vllm"] = "vllm"


class SglangStrategyConfig(EngineStrategyConfig):
    name: Literal["sglang"] = "sglang"


class HfStrategyConfig(Section):
    """Forward passes with Hugging Face transformers: any of its architectures, a whole model per device."""

    name: Literal["hf"] = "hf"


TrainStrategyConfig = MegatronStrategyConfig
InferStrategyConfig = Annotated[VllmStrategyConfig | SglangStrategyConfig, Field(discriminator="name")]
RewardModelStrategyConfig = Annotated[HfStrategyConfig | MegatronStrategyConfig, Field(discriminator="name")]

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
    """Number of devices, or a list: numbers over all nodes, or devices of nodes, as in [node0:0-3, node1:0-3] (needs placement.nodes).
    Without GPUs a device is a CPU slot."""
    strategy: TrainStrategyConfig = Field(default_factory=MegatronStrategyConfig)
    """Parallel layout."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum number of tokens in a rank's forward pass. Samples are packed, not padded; a longer one runs alone."""
    micro_batch_size: PositiveInt | None = None
    """Maximum number of samples in a rank's forward pass; absent: unlimited."""
    offload: bool = False
    """Free this role's memory while it is idle."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts of the role within an hour after one of its ranks died or hung. It goes back to the newest checkpoint, and repeats the
    updates since then on the same samples. Beyond that the run ends."""
    threads: PositiveInt = 1
    """CPU threads per process."""


class TrainRoleConfig(ForwardRoleConfig):
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer and learning rate."""
    balance_coef: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of models with experts: the Switch Transformer's, per sample and layer (1 if all experts are used
    equally), averaged over a mini-batch and added up over layers. The default 0 ignores config.json's router_aux_loss_coef, which would
    pull the policy away from the rewards."""
    compare_replicas_every: Annotated[int, Field(ge=0)] = 10
    """Steps between comparisons of data-parallel replicas' weights by checksum; they are also compared before every checkpoint. A
    difference ends the run. 0: never."""
    train_micro_batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in a rank's forward and backward pass; absent: micro_batch_tokens."""
    train_micro_batch_size: PositiveInt | None = None
    """Maximum number of samples in a rank's forward and backward pass; absent: micro_batch_size."""

    @property
    def in_training(self) -> tuple[int, int | None]:
        """Maximum number of tokens and samples of a forward and backward pass."""
        return self.train_micro_batch_tokens or self.micro_batch_tokens, self.train_micro_batch_size or self.micro_batch_size


class EmaConfig(Section):
    """Moving average of the actor's weights, in float32 on the host, updated after every optimizer step; saved in checkpoints, exported
    as `model_ema/`."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Share of the average kept at each step; 0.99 averages over about 100 steps."""


class ActorRoleConfig(TrainRoleConfig):
    lora: LoraConfig | None = None
    """Adapters to train with frozen weights; absent: all weights train."""
    ema: EmaConfig | None = None
    """Average of the weights; absent: none."""

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
    """Replaces the reference's weights by the actor's; needs a run folder that all nodes share."""

    every: PositiveInt
    """Steps between updates."""
    weights: Literal["actor", "ema"] = "actor"
    """The actor's weights, or their average (actor_train.ema)."""


class ReferenceRoleConfig(ForwardRoleConfig):
    refresh: RefreshConfig | None = None
    """Update from the actor; absent: it stays the initial model."""


class CriticRoleConfig(TrainRoleConfig):
    init: Literal["actor", "reward_model", "path"] = "actor"
    """Initial weights: the actor's model with a new value head, a reward model with its head, or a value model of roll_lite."""
    path: UserPath | None = None
    """Checkpoint folder, for `init: reward_model` and `init: path`."""


class InferRoleConfig(Section):
    devices: Devices = 1
    """Number of devices, or a list. Replicas: devices / strategy.tensor_parallel. A replica is on one node; one larger than
    placement.devices_per_node is on several, equally on each."""
    replicas_per_device: PositiveInt = 1
    """Replicas per device; on a GPU they share strategy.gpu_memory_utilization equally (needs tensor_parallel 1)."""
    strategy: InferStrategyConfig = Field(default_factory=VllmStrategyConfig)
    """The engine."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision; absent: model.dtype. float32 weights are cast to bfloat16 before the transfer."""
    offload: bool = False
    """Free the engines' memory while the actor trains."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts of each lost engine within an hour. Beyond them the run continues with the other engines; it ends if none is left."""
    threads: PositiveInt = 1
    """CPU threads per engine."""


class RewardModelConfig(Section):
    """Sequence-classification model with one output, for rewards of type `model`."""

    path: UserPath
    """Folder of a ForSequenceClassification model with one label, and its tokenizer, in Hugging Face format."""
    devices: Devices = 1
    """Number of devices, or a list; hf: a copy of the model on each."""
    strategy: RewardModelStrategyConfig = Field(default_factory=HfStrategyConfig)
    """Implementation and parallel layout."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision: float32 on CPUs, bfloat16 on GPUs."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum number of tokens in a rank's forward pass; hf pads to the longest, and padding counts. A longer sample runs alone."""
    micro_batch_size: PositiveInt = 8
    """Maximum number of samples in a rank's forward pass, and in a call to a replica (hf)."""
    max_length: PositiveInt | None = None
    """Longest text in tokens; absent: max_position_embeddings. A longer one fails, it is never cut."""
    offload: bool = False
    """Free this model's memory while nothing is generated."""
    threads: PositiveInt = 1
    """CPU threads per process."""


class JudgeServerConfig(Section):
    """Judge: vLLM's OpenAI-compatible server, started with the run, for rewards of type `judge` that name it."""

    path: UserPath
    """Folder in Hugging Face format."""
    devices: Devices = 1
    """Number of devices, or a list. Servers: devices / strategy.tensor_parallel."""
    strategy: VllmStrategyConfig = Field(default_factory=VllmStrategyConfig)
    """Engine; max_model_len defaults to the model's, engine_args may hold any argument of the server."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision; auto: the checkpoint's."""
    threads: PositiveInt = 1
    """CPU threads per server."""
    start_timeout_s: PositiveFloat = 900.0
    """Time limit for loading the model."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts of dead servers before the run fails; meanwhile verdicts wait, or fail and are retried."""
