"""Sections: models, how they are trained and served, and the roles that do it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.schema.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section, UserPath, below

# ---------------------------------------------------------------- model and optimisation


class ModelConfig(Section):
    path: UserPath
    """Folder with the model in Hugging Face format (config.json, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of training and inference. float32 on a CPU, bfloat16 on GPUs."""


class MuonConfig(Section):
    """Momentum whose singular values are made about 1 (Newton-Schulz, five steps), for the matrices of layers; AdamW for embeddings, output
    layer, value head, norms and biases. Megatron-Core's, with the package emerging-optimizers."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """What is left of the momentum at each step; the rest is the new gradient."""
    nesterov: bool = False
    """Look a step ahead: orthogonalise the gradient and the momentum mixed in these parts."""
    scale: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """What an orthogonal update of n rows and m columns is multiplied by. spectral: sqrt(max(n, m)); shape_scaling: sqrt(max(1, n / m));
    unit_rms_norm: sqrt(n / m)."""
    factor: PositiveFloat = 0.2
    """And by this. With spectral, 0.2 makes updates about as large as AdamW's, so that lr serves both."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    muon: MuonConfig | None = None
    """Muon in the place of AdamW for the matrices of layers; AdamW for all where absent."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises: step i of n runs at i/n of lr."""
    decay: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the learning rate after the warm-up. wsd (warm-up, stable, decay): lr until the last decay_steps of the run."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps at the end of the run over which wsd falls to min_lr."""
    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """How wsd falls. With x from 0 to 1 over decay_steps, what is left of lr - min_lr: 1 - x; (1 + cos(pi x)) / 2; 2 * 0.5^x - 1;
    1 - sqrt(x)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices, embeddings, output layer and value head; never of biases and norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's denominator offset."""
    moments: Literal["float32", "float16"] = "float32"
    """Precision that AdamW's moments are kept in; computed with is float32. float16, with a scale for each tensor, is Transformer Engine's
    Adam: four bytes less per trained weight on GPUs, with the distributed optimizer and weights in bfloat16."""
    on_host: bool = False
    """Keep AdamW's moments in host memory and compute the update there: eight bytes less per trained weight on the device, for a copy of
    gradients and weights to the host and of the weights back in every optimizer step."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 switches clipping off."""
    stop_after_skipped: Annotated[int, Field(ge=0)] = 5
    """An update whose loss or gradient is not finite is skipped. The run ends once so many of the role were skipped in a row, over steps
    and resumed runs; 0: never. The samples of the first one are in the run's folder, under skipped/."""


FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", *FEED_FORWARD)
"""Of attention and MLP, by Hugging Face's names."""


class LoraConfig(Section):
    """Low-rank adapters, in place of the model's own weights: y = W x + alpha / rank * B A x. A starts random, B at zero."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """What B A x is multiplied by, times rank."""
    targets: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: list(LINEAR_LAYERS))
    """The linear layers that get adapters: of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. The last three of a layer
    with experts are those of every expert."""
    path: UserPath | None = None
    """Folder with adapters in PEFT's format (adapter_config.json, adapter_model.safetensors) to begin with, of the same rank, alpha and
    targets."""
    export: Literal["merged", "adapter"] = "merged"
    """What `checkpoint.export_model` writes: the model with the adapters merged, or the adapters alone in PEFT's format."""
    engines: Literal["merged", "adapter"] = "merged"
    """What engines get in every update: all weights with the adapters merged, or the adapters alone, which they add to model.path's weights
    as they compute. Much less travels, and every token costs a little more. Not for adapters of experts."""


# ---------------------------------------------------------------- strategies (unions keyed on `name`)


class MegatronStrategyConfig(Section):
    """Training and forward passes on Megatron-Core."""

    name: Literal["megatron"] = "megatron"
    tensor_parallel: PositiveInt = 1
    """Ranks that share every layer's matrices."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that share the layers."""
    virtual_pipeline_parallel: PositiveInt = 1
    """Parts of the model that each of these ranks holds, interleaved with those of the others: they wait less for one another, and
    exchange more (needs pipeline_parallel > 1)."""
    pipeline_layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """How many layers each part of the pipeline has, pipeline_parallel x virtual_pipeline_parallel numbers in the order of the layers: the
    stages' first parts, then their second ones. Fewer in the first or the last part make up for embeddings and output layer, which are
    there; 0 leaves it these alone. Absent: equally many, one more in the first parts where they do not divide."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of every micro-batch, for samples that are too long for one."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts model: each has some of them whole, and tokens travel to theirs."""
    expert_tensor_parallel: PositiveInt = 1
    """Ranks that share the matrices of every expert, as tensor_parallel does for the rest of the model."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence (needs tensor_parallel > 1)."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks: AdamW's entry by entry; with optimizer.muon each rank updates some weights whole
    and sends them to the others."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """What layers are made of. transformer_engine: NVIDIA's kernels, norms inside matrix products, experts multiplied in one call. auto:
    those where the package is installed, beside a GPU and without lora, else torch's."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them. selective: those of recompute_modules; full: of whole layers."""
    recompute_modules: Annotated[list[Literal["mlp", "moe", "core_attn"]], Field(min_length=1)] | None = None
    """For `recompute: selective`; mlp, with experts mlp and moe where absent. mlp: the feed-forward part, most of what a layer keeps. moe:
    router and experts, for which tokens travel once more. core_attn: attention itself, worth it with context_parallel, where a rank has
    the keys and values of all."""


class EngineStrategyConfig(Section):
    """What all real engines have; switching from one to another changes the name only."""

    name: str
    tensor_parallel: PositiveInt = 1
    """Devices of one engine replica."""
    expert_parallel: PositiveInt = 1
    """Of a mixture-of-experts model: 1, every device of a replica has a part of each expert; tensor_parallel, each has some of them
    whole."""
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
    quantization: Literal["none", "fp8"] = "none"
    """fp8: weights are quantised when they arrive, with a scale for every output channel, activations token by token; GPUs only. Half the
    memory of bfloat16 and faster matrix products, and samples of another policy than the one that trains: algorithm.mismatch_correction
    goes with it (docs/gpu.md)."""
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
    """A role that runs forward passes only (the reference)."""

    devices: Devices = 1
    """Number of devices, or a list of them: numbers, counted over all nodes, or those of a node, as in [node0:0-3, node1:0-3] (needs
    placement.nodes). On a machine without GPUs a device is a CPU slot."""
    strategy: TrainStrategyConfig = Field(default_factory=MegatronStrategyConfig)
    """How the model is laid out."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens in one forward pass of a rank, at most. Samples are packed, not padded; one that is longer goes alone."""
    micro_batch_size: PositiveInt | None = None
    """Samples in one forward pass of a rank, at most; no limit where absent."""
    offload: bool = False
    """Free this role's memory while it is idle."""
    threads: PositiveInt = 1
    """CPU threads of each process."""


class TrainRoleConfig(ForwardRoleConfig):
    """A role that trains (the actor)."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer and learning rate."""
    balance_coef: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a model with experts: the Switch Transformer's, of every sample in every layer, 1 where all
    experts are chosen alike. Added to the loss is its mean over the samples of a mini-batch, for each layer. 0, whatever the model was
    trained with before (router_aux_loss_coef in its config.json): it would pull the policy away from what the rewards say."""
    train_micro_batch_tokens: PositiveInt | None = None
    """Tokens in one forward and backward pass of a rank, at most; micro_batch_tokens where absent."""
    train_micro_batch_size: PositiveInt | None = None
    """Samples in one forward and backward pass of a rank, at most; micro_batch_size where absent."""

    @property
    def in_training(self) -> tuple[int, int | None]:
        """Tokens and samples of one forward and backward pass, at most."""
        return self.train_micro_batch_tokens or self.micro_batch_tokens, self.train_micro_batch_size or self.micro_batch_size


class EmaConfig(Section):
    """An exponential moving average of the actor's weights, in float32 on the host, taken after every optimizer step. It is in checkpoints,
    and exported as `model_ema/` beside the final model."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """What is left of the average at each step; the rest is the new weights. 0.99 goes back about 100 steps."""


class ActorRoleConfig(TrainRoleConfig):
    """The policy in training."""

    lora: LoraConfig | None = None
    """Train adapters beside frozen weights; all weights train where absent."""
    ema: EmaConfig | None = None
    """Keep an average of the weights; none where absent."""


class RefreshConfig(Section):
    """New weights for the reference, through a folder of the run, which all nodes share."""

    every: PositiveInt
    """Steps of the run between two of them."""
    weights: Literal["actor", "ema"] = "actor"
    """Whose: the actor's, or their average (actor_train.ema)."""


class ReferenceRoleConfig(ForwardRoleConfig):
    """The policy that KL is measured against."""

    refresh: RefreshConfig | None = None
    """Follow the actor every so many steps; absent: stay the model that training began with."""


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
    """Number of devices, or the list of them. devices / strategy.tensor_parallel is the number of engine replicas. Those of a replica are
    on one node; where it has more than placement.devices_per_node, as many on each of several."""
    replicas_per_device: PositiveInt = 1
    """Engine replicas that share each device, on a GPU with equal parts of strategy.gpu_memory_utilization (needs tensor_parallel 1)."""
    strategy: InferStrategyConfig = Field(default_factory=VllmStrategyConfig)
    """The engine."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the engines, model.dtype where absent. Weights of a float32 model are cast to bfloat16 before they travel."""
    offload: bool = False
    """Free the engines' memory while the actor trains."""
    threads: PositiveInt = 1
    """CPU threads of each engine."""


class RewardModelConfig(Section):
    """A sequence-classification model with one output, which scores responses for the domains whose reward is of type `model`."""

    path: UserPath
    """Folder with the checkpoint in Hugging Face format: a ForSequenceClassification model with one label, and its tokenizer."""
    devices: Devices = 1
    """Number of devices, or the list of them. hf: one copy of the model on each."""
    strategy: RewardModelStrategyConfig = Field(default_factory=HfStrategyConfig)
    """How the model is run and laid out."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of its weights and forward passes. float32 on a CPU, bfloat16 on GPUs."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens in one forward pass of a rank, at most; with hf, which pads samples to the longest, padding counts. A sample that is longer
    goes alone."""
    micro_batch_size: PositiveInt = 8
    """Samples in one forward pass of a rank, at most, and those that a copy of the model takes at a time."""
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
    """Number of devices, or the list of them. devices / strategy.tensor_parallel is the number of servers."""
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
