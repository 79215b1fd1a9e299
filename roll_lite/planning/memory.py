"""Device memory of each role in every phase: trainers by tracing the model's code, engines by formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, prod

import torch

from roll_lite.config.arithmetic import (
    PassArithmetic,
    adapters_of_engines,
    derive,
    device_numbers,
    generates,
    infer_dtype,
    layers_per_chunk,
    roles,
    trains,
)
from roll_lite.config.device_phases import PHASES, WHOLE, Phase, kind
from roll_lite.config.placement_picture import phases_of_step, works
from roll_lite.config.schema.models import (
    EngineStrategyConfig,
    ForwardRoleConfig,
    InferRoleConfig,
    JudgeServerConfig,
    RewardModelConfig,
    TrainRoleConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.megatron.traced import RankMemory, trace
from roll_lite.distributed.weight_sync.plan import bucket_limit
from roll_lite.distributed.weight_sync.transport import BUCKETS_AHEAD
from roll_lite.models.model_files import weight_shapes
from roll_lite.planning.architecture import Architecture, of_scorer
from roll_lite.workers.actor import actor_loss
from roll_lite.workers.model import ModelRole
from roll_lite.workers.objectives import CriticLoss

GIB = 2**30
PROCESS_BYTES = int(1.5 * GIB)
"""Device memory that a process uses beside its tensors: CUDA context, NCCL buffers, allocator waste."""
GRAPHS_BYTES = GIB


@dataclass(frozen=True)
class PhaseMemory:
    phase: Phase
    devices: tuple[int, ...]
    roles: Mapping[str, int]
    """Bytes that each role needs on a device. Offloaded roles take turns: `total` counts only the largest."""
    total: int


def memory_of_roles(config: RunConfig, model: Architecture, device_bytes: float, on_gpu: bool = True) -> dict[str, RankMemory]:
    """Estimate the memory of all roles, except reward models and judges of an unknown model."""
    found = {}
    for name, role in roles(config).items():
        if isinstance(role, InferRoleConfig):
            found[name] = engine_memory(config, model, device_bytes)
        elif isinstance(role, ForwardRoleConfig):
            stages = {0, role.strategy.pipeline_parallel - 1}
            traced = [_stage_memory(config, model, name, role, stage, on_gpu) for stage in sorted(stages)]
            found[name] = max(traced, key=lambda one: one.weights + one.gradients + one.optimizer + max(one.training, one.forward))
            if name == "actor_train" and on_gpu:
                found[name] = replace(found[name], send_buffers=send_buffer_bytes(config, model))
        elif (own := of_scorer(role.path)) is not None:
            found[name] = scorer_memory(role, own, device_bytes)
    return found


def scorer_memory(role: RewardModelConfig | JudgeServerConfig, model: Architecture, device_bytes: float) -> RankMemory:
    hf, strategy = model.hf, role.strategy
    dtype = model.raw.get("dtype", model.raw.get("torch_dtype", "bfloat16")) if role.dtype == "auto" else role.dtype
    size = 4 if dtype == "float32" else 2
    if isinstance(role, JudgeServerConfig):
        return _serving_memory(role.strategy, model, size, device_bytes)
    parallel = getattr(strategy, "tensor_parallel", 1)
    weights = model.parameters(parallel) - (0 if hf.tied_embeddings else hf.vocab_size * hf.hidden // parallel)  # a score, no logits
    forward = role.micro_batch_tokens * (4 * hf.hidden + 3 * hf.feed_forward // parallel) * size
    return RankMemory(weights * size // getattr(strategy, "pipeline_parallel", 1), forward=forward)


def _stage_memory(config: RunConfig, model: Architecture, name: str, role: ForwardRoleConfig, stage: int, on_gpu: bool) -> RankMemory:
    """Trace a pipeline stage's memory. More than three equal layers are extrapolated from two and three: memory is linear in layers."""
    strategy, passes = role.strategy, [one for one in derive(config).passes if one.role == name]
    counts = layers_per_chunk(strategy, model.hf.layers)[stage :: strategy.pipeline_parallel]
    alike = model.hf.experts is None or all(model.hf.experts.layers)
    if len(set(counts)) > 1 or counts[0] <= 3 or not alike:
        found = _traced(config, model, name, role, stage, passes[-1], model.hf.layers, on_gpu)
    else:
        short = role.model_copy(update={"strategy": strategy.model_copy(update={"pipeline_layers": None})})
        parts = strategy.pipeline_parallel * strategy.virtual_pipeline_parallel
        two, three = (asdict(_traced(config, model, name, short, stage, passes[-1], count * parts, on_gpu)) for count in (2, 3))
        found = RankMemory(**{key: low + (counts[0] - 2) * (three[key] - low) for key, low in two.items()})
    # 1F1B: a stage starts this many micro-batches (if interleaved, parts of them) before its first backward pass.
    after, virtual = strategy.pipeline_parallel - stage - 1, strategy.virtual_pipeline_parallel
    begun = after + 1 if virtual == 1 else (2 * after + (virtual - 1) * strategy.pipeline_parallel + 1) / virtual
    inputs, waiting = found.inputs * passes[-1].micro_batches, ceil((min(begun, passes[-1].micro_batches) - 1) * found.kept)
    training = inputs + max(found.training + waiting, found.update)
    return replace(found, training=training, forward=found.forward * passes[0].tokens // passes[-1].tokens)


def _traced(
    config: RunConfig, model: Architecture, name: str, role: ForwardRoleConfig, stage: int, each: PassArithmetic, layers: int, on_gpu: bool
) -> RankMemory:
    spec = ModelRole(config.model, role, 10**6, config.seed, False).model_spec
    spec = replace(spec, value_init=spec.value_init and "actor", path_key="model.path", ema_decay=None)
    loss = CriticLoss(domains=len(config.domains)) if name == "critic" else actor_loss(config.algorithm, len(config.domains))
    sampling = max((one.sampling for one in config.domains.values()), key=lambda one: one.max_prompt_tokens + one.max_tokens)
    count = max(1, min(each.tokens // each.longest, each.row_limit or each.tokens))
    batch = rows(count, sampling.max_prompt_tokens, each.longest, loss.columns)
    raw = {**model.raw, "num_hidden_layers": layers}
    return trace(spec, raw, len(device_numbers(role.devices)), stage, batch, loss, loss.outputs, on_gpu)


def rows(count: int, prompt: int, longest: int, columns: tuple[str, ...]) -> DataProto:
    def ragged(values: torch.Tensor) -> Ragged:
        return Ragged.from_rows([values] * count)

    numbers = {name: ragged(torch.zeros(longest - 1)) for name in columns if KEYS[name].kind is Kind.TRANSITIONS}
    tokens = {"input_ids": ragged(torch.zeros(longest, dtype=torch.int64)), "response_mask": ragged(torch.arange(longest) >= prompt)}
    row = {"domain_number": torch.zeros(count, dtype=torch.int64), "loss_weight": torch.ones(count), "temperature": torch.ones(count)}
    return DataProto({**tokens, **row, **numbers})


def engine_memory(config: RunConfig, model: Architecture, device_bytes: float) -> RankMemory:
    """Estimate an engine's memory. The KV cache gets the engine's GPU memory minus weights and activations."""
    role = config.actor_infer
    return _serving_memory(role.strategy, model, number_bytes(config), device_bytes / role.replicas_per_device)


def _serving_memory(strategy: EngineStrategyConfig, model: Architecture, size: int, device_bytes: float) -> RankMemory:
    hf, parallel = model.hf, strategy.tensor_parallel
    weights = model.engine_weight_bytes(strategy, size)
    forward = strategy.max_batched_tokens * (4 * hf.hidden + 3 * hf.feed_forward // parallel) * size
    forward += strategy.max_running_requests * hf.vocab_size * 4 + GRAPHS_BYTES
    share = strategy.gpu_memory_utilization * device_bytes
    given = strategy.kv_cache_mb
    return RankMemory(weights, forward=forward, kv_cache=given * 10**6 if given else max(0, int(share - weights - forward)))


def send_buffer_bytes(config: RunConfig, model: Architecture) -> int:
    """Estimate the maximum bytes of a trainer rank's send buffers: buckets in flight, buckets not yet released by engines (one, or one
    per expert-parallel rank), and a tensor larger than a bucket."""
    if not (generates(config) and trains(config)) or adapters_of_engines(config) is not None:
        return 0
    sizes = {name: prod(shape) * number_bytes(config) for name, shape in weight_shapes(model.hf).items()}
    owners, bucket, held = config.actor_train.strategy.expert_parallel, config.weight_sync.bucket_mb << 20, 1
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        prefix, of_experts, _ = name.partition(".experts.")
        if of_experts:
            layers[prefix] = layers.get(prefix, 0) + size // owners
    if layers and owners > 1:
        bucket, held = bucket_limit(bucket, owners, max(layers.values())), owners
    largest = max(sizes.values())
    return min(sum(sizes.values()), (BUCKETS_AHEAD + held) * bucket + (largest if largest > bucket else 0))


def optimizer_bytes(role: TrainRoleConfig, size: int) -> int:
    """Device memory per trained parameter of `size` bytes."""
    return 8 * (not role.optimizer.on_host) + 4 * (size == 2)  # moments, and float32 weights


def number_bytes(config: RunConfig) -> int:
    return 4 if infer_dtype(config) == "float32" else 2


def cached_tokens(config: RunConfig, model: Architecture, device_bytes: float) -> int:
    ranks = min(config.actor_infer.strategy.tensor_parallel, model.hf.key_value_heads)
    return engine_memory(config, model, device_bytes).kv_cache * ranks // model.cache_bytes(number_bytes(config))


def by_phase(config: RunConfig, memory: Mapping[str, RankMemory]) -> list[PhaseMemory]:
    """Device memory needed in each phase of a step. Devices with the same roles share an entry."""
    numbers = {name: device_numbers(role.devices) for name, role in roles(config).items() if name in memory}
    blocks: dict[tuple[str, ...], list[int]] = {}
    for device in sorted({one for own in numbers.values() for one in own}):
        blocks.setdefault(tuple(name for name, own in numbers.items() if device in own), []).append(device)
    found = []
    for phase in phases_of_step(config):
        for names, devices in blocks.items():
            needs = {name: _need(config, phase, name, memory[name]) for name in names}
            moving = [needs[name] for name in names if getattr(roles(config)[name], "offload", False)]
            staying = sum(needs.values()) - sum(moving) + sum(PROCESS_BYTES + memory[name].send_buffers for name in names)
            found.append(
                PhaseMemory(phase, tuple(devices), needs, staying + (max(moving, default=0) if PHASES[phase].in_turns else sum(moving)))
            )
    return found


def _need(config: RunConfig, phase: Phase, name: str, memory: RankMemory) -> int:
    working, role = works(config, phase, name), roles(config)[name]
    parts = PHASES[phase].parts.get(kind(name), ()) if getattr(role, "offload", False) else WHOLE[kind(name)]
    activations = (memory.training or memory.forward) if phase is Phase.TRAIN else memory.forward
    if not working and getattr(role, "offload", False):
        return 0
    own = sum(getattr(memory, part) for part in parts) + (activations if working and phase is not Phase.SYNC_WEIGHTS else 0)
    return own * getattr(role, "replicas_per_device", 1)
