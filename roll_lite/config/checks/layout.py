from __future__ import annotations

import os
from collections import Counter
from itertools import combinations
from pathlib import Path

from roll_lite.config.arithmetic import (
    Role,
    adapters_of_engines,
    device_numbers,
    generates,
    max_model_len,
    model_parallel_size,
    on_sync_of,
    pipeline_problem,
    replays_engines,
    requests,
    roles,
    tensor_parallel_fits,
)
from roll_lite.config.placement import ranges
from roll_lite.config.schema.base import Mistakes, Refused
from roll_lite.config.schema.models import (
    CriticRoleConfig,
    EngineStrategyConfig,
    InferRoleConfig,
    JudgeServerConfig,
    MegatronStrategyConfig,
    RewardModelConfig,
    SglangStrategyConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.hf_config import ModelShape, read_model_shape


def _device_list(config: RunConfig, name: str, role: Role) -> Mistakes:
    numbers, size = device_numbers(role.devices), model_parallel_size(role)
    if not numbers:
        yield f"{name}.devices", "needs at least one device"
    if twice := sorted(number for number, count in Counter(numbers).items() if count > 1):
        yield f"{name}.devices", f"lists {', '.join(map(str, twice))} more than once; each device holds one rank of a role"
    if len(numbers) % size:
        sizes = {part: getattr(role.strategy, part, 1) for part in ("tensor_parallel", "pipeline_parallel", "context_parallel")}
        given = " x ".join(f"{part} {number}" for part, number in sizes.items() if number > 1)
        factors = f"{given} = {size}" if " x " in given else given
        what = "replicas of the engine" if isinstance(role, InferRoleConfig) else "data-parallel copies of the model"
        yield f"{name}.devices", f"{factors} does not divide {len(numbers)} devices into whole {what}; use a multiple of {size}"


def _sizes_fit_the_model(config: RunConfig, name: str, role: Role) -> Mistakes:
    shape, strategy = known_shape(model_folder(config, role)), role.strategy
    is_trainer, parts = isinstance(strategy, MegatronStrategyConfig), getattr(strategy, "tensor_parallel", 1)
    head_dim = shape.head_dim if is_trainer else None
    fits = [size for size in range(1, shape.heads + 1) if tensor_parallel_fits(size, shape.heads, shape.kv_heads, head_dim)]
    if parts not in fits:
        heads = f"{shape.heads} attention heads and {shape.kv_heads} key/value heads"
        yield f"{name}.strategy.tensor_parallel", f"does not divide the model's {heads}; use one of {_listed(fits)}"
    elif shape.feed_forward is not None and shape.feed_forward % parts:
        yield f"{name}.strategy.tensor_parallel", f"does not divide the model's feed-forward size of {shape.feed_forward}"
    if isinstance(strategy, MegatronStrategyConfig) and (problem := pipeline_problem(strategy, shape.layers)) is not None:
        yield f"{name}.strategy.{problem[0]}", problem[1]


def _experts(config: RunConfig, name: str, role: Role) -> Mistakes:
    shape, strategy = known_shape(model_folder(config, role)), role.strategy
    if not isinstance(strategy, MegatronStrategyConfig):
        return
    parallel, tensor = strategy.expert_parallel, strategy.expert_tensor_parallel
    if shape.experts is None:
        for part in ("expert_parallel", "expert_tensor_parallel"):
            if getattr(strategy, part) > 1:
                yield f"{name}.strategy.{part}", "the model has no experts; use 1"
        if getattr(role, "balance_coef", 0.0):
            yield f"{name}.balance_coef", "the model has no experts to balance; use 0"
        return
    if shape.experts % parallel:
        fits = _listed([size for size in range(1, shape.experts + 1) if shape.experts % size == 0])
        yield f"{name}.strategy.expert_parallel", f"does not divide the model's {shape.experts} experts; use one of {fits}"
    if (shape.expert_feed_forward or 0) % tensor:
        yield f"{name}.strategy.expert_tensor_parallel", f"does not divide the experts' feed-forward size of {shape.expert_feed_forward}"
    if strategy.tensor_parallel > 1 and not strategy.sequence_parallel:
        yield f"{name}.strategy.sequence_parallel", "tensor_parallel > 1 of a model with experts needs it; use true"
    # The ranks that share experts are in one pipeline stage; they may belong to several data-parallel copies of the model.
    count, sharing = len(device_numbers(role.devices)), parallel * tensor
    if count % (whole := sharing * strategy.pipeline_parallel):
        parts = f"expert_parallel {parallel} x expert_tensor_parallel {tensor}"
        pipeline = f" x pipeline_parallel {strategy.pipeline_parallel}" if strategy.pipeline_parallel > 1 else ""
        yield f"{name}.devices", f"{parts}{pipeline} = {whole} does not divide {count} devices; use a multiple of {whole}"
    stage = strategy.tensor_parallel * strategy.context_parallel
    if isinstance(role, RewardModelConfig) and stage % sharing:
        alone = f"the copies of a reward model score on their own, with {stage} ranks of a stage each"
        yield f"{name}.strategy.expert_parallel", f"{sharing} ranks would share the experts; {alone}"


def _experts_in_engines(config: RunConfig, name: str, role: Role) -> Mistakes:
    shape, strategy = known_shape(model_folder(config, role)), role.strategy
    if not isinstance(strategy, EngineStrategyConfig):
        return
    tensor, expert, path = strategy.tensor_parallel, strategy.expert_parallel, f"{name}.strategy.expert_parallel"
    if expert > 1 and shape.experts is None:
        yield path, "the model has no experts; use 1"
    elif expert not in (1, tensor):
        yield path, f"all devices of a replica share the experts, or none; use 1 or tensor_parallel ({tensor})"
    elif expert > 1 and (shape.experts or 0) % expert:
        yield path, f"does not divide the model's {shape.experts} experts; use 1, or another tensor_parallel"
    elif expert == 1 and (size := shape.expert_feed_forward or 0) % tensor:
        message = f"does not divide the experts' feed-forward size of {size}; expert_parallel leaves experts whole"
        yield f"{name}.strategy.tensor_parallel", message


def _recomputed_modules(config: RunConfig, name: str, role: Role) -> Mistakes:
    shape, strategy = known_shape(model_folder(config, role)), role.strategy
    if not isinstance(strategy, MegatronStrategyConfig) or strategy.recompute != "selective":
        return
    modules = strategy.recompute_modules or ()
    if "moe" in modules and shape.experts is None:
        yield f"{name}.strategy.recompute_modules", "moe: the model has no experts; use mlp"
    if "mlp" in modules and shape.feed_forward is None:
        yield f"{name}.strategy.recompute_modules", "mlp: all layers of the model have experts; use moe"


ROLE_CHECKS = (_device_list, _sizes_fit_the_model, _recomputed_modules, _experts, _experts_in_engines)


def _joining_engines(config: RunConfig) -> Mistakes:
    role, place = config.actor_infer, "actor_infer.most_replicas"
    if role.most_replicas is None:
        return
    if role.offload:
        yield place, "engines that join have devices of their own, and actor_infer.offload shares them; use offload: false"
    if config.deterministic:
        yield place, "a sample would depend on how many engines there are; use deterministic: false"
    size = model_parallel_size(role)
    first = len(device_numbers(role.devices)) // size
    if role.most_replicas < first:
        message = f"{role.most_replicas} is less than the {first} replicas that actor_infer.devices makes"
        yield place, f"{message}; raise it, or lower the devices"
    if config.placement.nodes is not None and size > config.placement.devices_per_node:
        yield place, f"a replica of {size} devices spans nodes, and only replicas on one node can join a run; remove it"


def _model_is_long_enough(config: RunConfig) -> Mistakes:
    shape, ptx = known_shape(config.model.path), config.algorithm.ptx
    if shape.max_positions is None:
        return
    more = f"is more than the model's {shape.max_positions} positions (max_position_embeddings)"
    if ptx is not None and ptx.max_tokens > shape.max_positions:
        yield "algorithm.ptx.max_tokens", more
    if (given := config.actor_infer.strategy.max_model_len) is not None:
        if given > shape.max_positions:
            yield "actor_infer.strategy.max_model_len", more
        return
    for one in requests(config):
        if one.tokens > shape.max_positions:
            sizes = f"max_prompt_tokens {one.sampling.max_prompt_tokens} + max_tokens {one.sampling.max_tokens}"
            yield one.path, f"{sizes} = {one.tokens} {more}"


def _engine_knows_the_model(config: RunConfig) -> Mistakes:
    """Refuse models that SGLang computes differently: it ignores Mistral's sliding window, and gives all layers experts if any has them."""
    shape = known_shape(config.model.path)
    if not generates(config) or not isinstance(config.actor_infer.strategy, SglangStrategyConfig):
        return
    if shape.experts is not None and shape.feed_forward is not None:
        message = "SGLang takes every layer of the model for one with experts, which some are not; use vllm"
        yield "actor_infer.strategy.name", message
    if shape.window is not None and (needed := max_model_len(config)) > shape.window:
        message = (
            f"knows no sliding window in this family, the trainer does: the model's is {shape.window} tokens and prompt and response "
            f"may take {needed}; use vllm"
        )
        yield "actor_infer.strategy.name", message


def _deterministic_runs_on_cpu(config: RunConfig) -> Mistakes:
    if config.deterministic and gpus_visible():
        yield "deterministic", "GPU kernels do not repeat bit for bit; use false, or hide the GPUs with CUDA_VISIBLE_DEVICES=''"


def _verified_weights(config: RunConfig) -> Mistakes:
    verify = config.weight_sync.verify
    if config.mode == "rollout_only" and verify in ("sampled", "full"):
        yield "weight_sync.verify", "in mode: rollout_only nothing trains, and no weights are sent that could be compared; use none"
    elif verify == "full" and (unreadable := unreadable_weights(config)) is not None:
        yield "weight_sync.verify", f"cannot compare {unreadable[1]}; use sampled, which leaves them out"


def unreadable_weights(config: RunConfig) -> tuple[str, str] | None:
    """Return (pattern of the names of tensors whose copies in engines cannot be compared, reason); None if all can."""
    if config.actor_infer.strategy.quantization == "fp8" and adapters_of_engines(config) is None:
        return r"_proj\.|\.gate\.", "matrices of layers: an engine in fp8 does not hold them bit for bit"
    if known_shape(config.model.path).experts is not None and (gpus_visible() or runs_on_cluster(config)):
        return r"\.experts\.", "experts: what an engine's kernels make of experts on a GPU is not read back"
    return None


def verify_notes(config: RunConfig) -> list[str]:
    if config.mode != "full" or config.weight_sync.verify == "none" or (unreadable := unreadable_weights(config)) is None:
        return []
    return [f"weight_sync.verify leaves out {unreadable[1]}; rollout.max_mismatch alone watches them"]


def _experts_over_an_update(config: RunConfig) -> Mistakes:
    """Refuse routing replay if requests continue after a weight update: SGLang then recomputes earlier tokens with the new weights'
    experts."""
    rollout = config.rollout
    running = rollout.supply != "sync" or (rollout.oversample > 1 and rollout.max_staleness)
    pauses = on_sync_of(rollout, config.actor_infer.offload) == "pause"
    if replays_engines(config) and running and pauses and isinstance(config.actor_infer.strategy, SglangStrategyConfig):
        message = "SGLang forgets which experts the old weights used where responses go on under new ones"
        yield "algorithm.routing_replay", f"{message}; use rollout.on_sync: abort or drain"


LAYOUT_CHECKS = (
    _joining_engines,
    _verified_weights,
    _experts_over_an_update,
    _model_is_long_enough,
    _engine_knows_the_model,
    _deterministic_runs_on_cpu,
)


def devices_are_there(config: RunConfig) -> Mistakes:
    if not gpus_visible() or runs_on_cluster(config):
        return
    shown, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), list(Path("/dev").glob("nvidia[0-9]*"))
    there = len(gpus if shown is None else [one for one in shown.split(",") if one.strip()])
    for name, role in roles(config).items():
        if beyond := [number for number in device_numbers(role.devices) if number >= there]:
            are = "devices {} are" if len(beyond) > 1 else "device {} is"
            message = f"{are.format(ranges(beyond))} not there: this machine has {there} GPU{'s' if there != 1 else ''}"
            remedy = "use fewer, or name the cluster (ray.address, or placement.nodes for one that is not there yet)"
            yield f"{name}.devices", f"{message}; {remedy}"


def sharing_notes(config: RunConfig) -> list[str]:
    notes = []
    staying = {name: role for name, role in roles(config).items() if not getattr(role, "offload", False)} if gpus_visible() else {}
    for (name, role), (other, its) in combinations(staying.items(), 2):
        if shared := sorted(set(device_numbers(role.devices)) & set(device_numbers(its.devices))):
            listed = ", ".join(map(str, shared[:8])) + (", ..." if len(shared) > 8 else "")
            notes.append(f"{name} and {other} share device {listed} and both stay in its memory; set offload: true for both, or move one")
    return notes


def model_folder(config: RunConfig, role: Role) -> Path:
    if isinstance(role, RewardModelConfig | JudgeServerConfig):
        return role.path
    own = role.path if isinstance(role, CriticRoleConfig) and role.init != "actor" else None
    return own or config.model.path


def runs_on_cluster(config: RunConfig) -> bool:
    return bool(config.ray.address or os.environ.get("RAY_ADDRESS") or config.placement.nodes is not None)


def gpus_visible() -> bool:
    """Look for GPUs without importing torch, which takes seconds."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def known_shape(folder: Path) -> ModelShape:
    """Sizes of a model; Refused if unreadable, which checks/files.py reports."""
    try:
        return read_model_shape(folder)
    except ValueError as error:
        raise Refused(str(folder)) from error


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
