"""Checks of devices and parallel sizes, also against the model's shape."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from roll_lite.config.arithmetic import (
    Role,
    device_numbers,
    generates,
    max_model_len,
    model_parallel_size,
    pipeline_problem,
    replays_engines,
    requests,
    roles,
    tensor_parallel_fits,
)
from roll_lite.config.placement import ranges
from roll_lite.config.problems import Problem
from roll_lite.config.schema.models import (
    CriticRoleConfig,
    EngineStrategyConfig,
    InferRoleConfig,
    JudgeServerConfig,
    MegatronStrategyConfig,
    RewardModelConfig,
    SglangStrategyConfig,
    VllmStrategyConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.hf_config import ModelShape, read_hf_config, read_model_shape


def _device_list(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    numbers = device_numbers(role.devices)
    if not numbers:
        yield Problem(f"{name}.devices", "needs at least one device", [])
    twice = sorted(number for number, count in Counter(numbers).items() if count > 1)
    if twice:
        yield Problem(
            f"{name}.devices", f"lists {', '.join(map(str, twice))} more than once; each device holds one rank of a role", list(numbers)
        )


def _parallel_sizes_divide_devices(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    count, size = len(device_numbers(role.devices)), model_parallel_size(role)
    if not count or count % size == 0:
        return
    strategy = role.strategy
    parts = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    given = [f"{part} {getattr(strategy, part)}" for part in parts if getattr(strategy, part, 1) > 1]
    factors = f"{' x '.join(given)} = {size}" if len(given) > 1 else given[0]
    what = "replicas of the engine" if isinstance(role, InferRoleConfig) else "data-parallel copies of the model"
    yield Problem(
        f"{name}.devices",
        f"{factors} does not divide {count} devices into whole {what}; use a multiple of {size}",
        role.devices,
    )


def _replicas_share_a_device(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    if isinstance(role, InferRoleConfig) and role.replicas_per_device > 1 and model_parallel_size(role) > 1:
        message = f"a replica has {model_parallel_size(role)} devices of its own (tensor_parallel); use 1"
        yield Problem(f"{name}.replicas_per_device", message, role.replicas_per_device)


def _sequence_parallel(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    strategy = role.strategy
    if isinstance(strategy, MegatronStrategyConfig) and strategy.sequence_parallel and strategy.tensor_parallel == 1:
        yield Problem(f"{name}.strategy.sequence_parallel", "needs tensor_parallel > 1; use false", True)


def _stages_have_layers(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    shape = _shape(model_folder(config, role))
    if shape is None or not isinstance(role.strategy, MegatronStrategyConfig):
        return
    if (problem := pipeline_problem(role.strategy, shape.layers)) is not None:
        setting, message = problem
        yield Problem(f"{name}.strategy.{setting}", message, getattr(role.strategy, setting))


def _tensor_parallel_divides_heads(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    shape, parts = _shape(model_folder(config, role)), getattr(role.strategy, "tensor_parallel", 1)
    if shape is None:
        return
    head_dim = shape.head_dim if isinstance(role.strategy, MegatronStrategyConfig) else None
    fits = [size for size in range(1, shape.heads + 1) if tensor_parallel_fits(size, shape.heads, shape.kv_heads, head_dim)]
    if parts not in fits:
        message = (
            f"does not divide the model's {shape.heads} attention heads and {shape.kv_heads} key/value heads; use one of {_listed(fits)}"
        )
        yield Problem(f"{name}.strategy.tensor_parallel", message, parts)
    elif shape.feed_forward is not None and shape.feed_forward % parts:
        message = f"does not divide the model's feed-forward size of {shape.feed_forward}"
        yield Problem(f"{name}.strategy.tensor_parallel", message, parts)


def _experts(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    shape, strategy = _shape(model_folder(config, role)), role.strategy
    if shape is None or not isinstance(strategy, MegatronStrategyConfig):
        return
    sizes = {"expert_parallel": strategy.expert_parallel, "expert_tensor_parallel": strategy.expert_tensor_parallel}
    if shape.experts is None:
        for part, size in sizes.items():
            if size > 1:
                yield Problem(f"{name}.strategy.{part}", "the model has no experts; use 1", size)
        if coef := getattr(role, "balance_coef", 0.0):
            yield Problem(f"{name}.balance_coef", "the model has no experts to balance; use 0", coef)
        return
    if shape.experts % strategy.expert_parallel:
        message = f"does not divide the model's {shape.experts} experts; use one of {_divisors(shape.experts)}"
        yield Problem(f"{name}.strategy.expert_parallel", message, strategy.expert_parallel)
    if (shape.expert_feed_forward or 0) % strategy.expert_tensor_parallel:
        message = f"does not divide the experts' feed-forward size of {shape.expert_feed_forward}"
        yield Problem(f"{name}.strategy.expert_tensor_parallel", message, strategy.expert_tensor_parallel)
    if strategy.tensor_parallel > 1 and not strategy.sequence_parallel:
        message = "tensor_parallel > 1 of a model with experts needs it; use true"
        yield Problem(f"{name}.strategy.sequence_parallel", message, False)
    yield from _expert_ranks(name, role, strategy)


def _expert_ranks(name: str, role: Role, strategy: MegatronStrategyConfig) -> Iterator[Problem]:
    """Check the ranks that share the experts: they lie in one pipeline stage, if necessary in several copies of the model."""
    count, sharing = len(device_numbers(role.devices)), strategy.expert_parallel * strategy.expert_tensor_parallel
    if count % (whole := sharing * strategy.pipeline_parallel):
        parts = f"expert_parallel {strategy.expert_parallel} x expert_tensor_parallel {strategy.expert_tensor_parallel}"
        pipeline = f" x pipeline_parallel {strategy.pipeline_parallel}" if strategy.pipeline_parallel > 1 else ""
        message = f"{parts}{pipeline} = {whole} does not divide {count} devices; use a multiple of {whole}"
        yield Problem(f"{name}.devices", message, role.devices)
    stage = strategy.tensor_parallel * strategy.context_parallel
    if isinstance(role, RewardModelConfig) and stage % sharing:
        message = (
            f"{sharing} ranks would share the experts; the copies of a reward model score on their own, with {stage} ranks of a stage each"
        )
        yield Problem(f"{name}.strategy.expert_parallel", message, strategy.expert_parallel)


def _experts_in_engines(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    shape, strategy = _shape(model_folder(config, role)), role.strategy
    if shape is None or not isinstance(strategy, EngineStrategyConfig):
        return
    tensor, expert, message = strategy.tensor_parallel, strategy.expert_parallel, None
    if expert > 1 and shape.experts is None:
        message = "the model has no experts; use 1"
    elif expert not in (1, tensor):
        message = f"all devices of a replica share the experts, or none; use 1 or tensor_parallel ({tensor})"
    elif expert > 1 and (shape.experts or 0) % expert:
        message = f"does not divide the model's {shape.experts} experts; use 1, or another tensor_parallel"
    if message is not None:
        yield Problem(f"{name}.strategy.expert_parallel", message, expert)
    elif expert == 1 and (shape.expert_feed_forward or 0) % tensor:
        message = f"does not divide the experts' feed-forward size of {shape.expert_feed_forward}; expert_parallel leaves experts whole"
        yield Problem(f"{name}.strategy.tensor_parallel", message, tensor)


def _recomputed_modules(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    strategy = role.strategy
    modules = None
    if isinstance(strategy, MegatronStrategyConfig) and strategy.recompute == "selective":
        modules = strategy.recompute_modules
    shape = _shape(model_folder(config, role)) if modules else None
    if shape is None or modules is None:
        return
    if "moe" in modules and shape.experts is None:
        yield Problem(f"{name}.strategy.recompute_modules", "moe: the model has no experts; use mlp", list(modules))
    if "mlp" in modules and shape.feed_forward is None:
        yield Problem(f"{name}.strategy.recompute_modules", "mlp: all layers of the model have experts; use moe", list(modules))


def _engine_limits(config: RunConfig, name: str, role: Role) -> Iterator[Problem]:
    strategy = role.strategy
    if not isinstance(strategy, EngineStrategyConfig):
        return
    if strategy.max_batched_tokens < strategy.max_running_requests:
        message = (
            f"every running request takes at least one token of a pass; use at least max_running_requests ({strategy.max_running_requests})"
        )
        yield Problem(f"{name}.strategy.max_batched_tokens", message, strategy.max_batched_tokens)


ROLE_CHECKS = (
    _device_list,
    _parallel_sizes_divide_devices,
    _replicas_share_a_device,
    _sequence_parallel,
    _stages_have_layers,
    _tensor_parallel_divides_heads,
    _recomputed_modules,
    _experts,
    _experts_in_engines,
    _engine_limits,
)


def _model_is_long_enough(config: RunConfig) -> Iterator[Problem]:
    shape = _shape(config.model.path)
    if shape is None or shape.max_positions is None:
        return
    if (ptx := config.algorithm.ptx) is not None and ptx.max_tokens > shape.max_positions:
        message = f"is more than the model's {shape.max_positions} positions (max_position_embeddings)"
        yield Problem("algorithm.ptx.max_tokens", message, ptx.max_tokens)
    given, needed = getattr(config.actor_infer.strategy, "max_model_len", None), max_model_len(config)
    if needed <= shape.max_positions:
        return
    if given is not None:
        message = f"is more than the model's {shape.max_positions} positions (max_position_embeddings)"
        yield Problem("actor_infer.strategy.max_model_len", message, given)
        return
    for one in requests(config):
        if one.tokens > shape.max_positions:
            message = (
                f"max_prompt_tokens {one.sampling.max_prompt_tokens} + max_tokens {one.sampling.max_tokens} = {one.tokens} "
                f"is more than the model's {shape.max_positions} positions (max_position_embeddings)"
            )
            yield Problem(one.path, message, one.sampling.max_tokens)


def _engine_knows_the_window(config: RunConfig) -> Iterator[Problem]:
    """Refuse windows shorter than the context: SGLang attends to the whole context in every model of Llama's kind."""
    if not generates(config):
        return
    shape = _shape(config.model.path)
    if not isinstance(config.actor_infer.strategy, SglangStrategyConfig) or shape is None or shape.window is None:
        return
    if (needed := max_model_len(config)) > shape.window:
        message = (
            f"knows no sliding window in this family, the trainer does: the model's is {shape.window} tokens and prompt and response "
            f"may take {needed}; use vllm"
        )
        yield Problem("actor_infer.strategy.name", message, "sglang")


def _deterministic_runs_on_cpu(config: RunConfig) -> Iterator[Problem]:
    if config.deterministic and gpus_visible():
        message = "GPU kernels do not repeat bit for bit; use false, or hide the GPUs with CUDA_VISIBLE_DEVICES=''"
        yield Problem("deterministic", message, True)


def _verified_experts(config: RunConfig) -> Iterator[Problem]:
    shape = _shape(config.model.path)
    if config.weight_sync.verify != "none" and shape is not None and shape.experts is not None and (gpus_visible() or is_elsewhere(config)):
        message = "what an engine's kernels make of experts on a GPU is not read back; use none for a model with experts"
        yield Problem("weight_sync.verify", message, config.weight_sync.verify)


def _engine_tells_of_experts(config: RunConfig) -> Iterator[Problem]:
    if not replays_engines(config) or isinstance(config.actor_infer.strategy, SglangStrategyConfig):
        return
    if isinstance(config.actor_infer.strategy, VllmStrategyConfig):  # on a CPU it does not report experts, see needs_gpus
        return
    message = "a scripted engine does not say which experts it used; use actor_infer.strategy.name: sglang, or routing_replay: train"
    yield Problem("algorithm.routing_replay", message, "rollout")


def _experts_over_an_update(config: RunConfig) -> Iterator[Problem]:
    """Refuse paused requests with routing replay: SGLang recomputes their tokens with new weights, and reports only those experts."""
    rollout, name = config.rollout, config.actor_infer.strategy.name
    if (
        replays_engines(config)
        and name == "sglang"
        and (rollout.on_sync == "pause" or (rollout.on_sync is None and rollout.supply == "async"))
    ):
        message = (
            "SGLang forgets which experts the old weights used where responses go on under new ones; use rollout.on_sync: abort or drain"
        )
        yield Problem("algorithm.routing_replay", message, "rollout")


def _engine_knows_dense_layers(config: RunConfig) -> Iterator[Problem]:
    if not generates(config) or not isinstance(config.actor_infer.strategy, SglangStrategyConfig):
        return
    with suppress(ValueError):  # the file checks report it
        experts = read_hf_config(config.model.path).experts
        if experts is not None and not all(experts.layers):
            message = "SGLang takes every layer of the model for one with experts, which some are not; use vllm"
            yield Problem("actor_infer.strategy.name", message, "sglang")


LAYOUT_CHECKS = (
    _verified_experts,
    _engine_tells_of_experts,
    _experts_over_an_update,
    _engine_knows_dense_layers,
    _model_is_long_enough,
    _engine_knows_the_window,
    _deterministic_runs_on_cpu,
)


def devices_are_there(config: RunConfig) -> Iterator[Problem]:
    """Check that this machine has the GPUs, unless the run is on a cluster. CPU slots are created as needed."""
    if not gpus_visible() or is_elsewhere(config):
        return
    there = gpu_count()
    for name, role in roles(config).items():
        if beyond := [number for number in device_numbers(role.devices) if number >= there]:
            are = "devices {} are" if len(beyond) > 1 else "device {} is"
            message = f"{are.format(ranges(beyond))} not there: this machine has {there} GPU{'s' if there != 1 else ''}"
            remedy = "use fewer, or name the cluster (ray.address, or placement.nodes for one that is not there yet)"
            yield Problem(f"{name}.devices", f"{message}; {remedy}", role.devices)


def sharing_notes(config: RunConfig) -> list[str]:
    """Notes on roles that stay on the same GPUs at the same time, and on engines that stay on GPUs where others take turns."""
    if not gpus_visible():
        return []
    by_role = roles(config)
    notes = []
    for (name, role), (other, its) in combinations(by_role.items(), 2):
        shared = sorted(set(device_numbers(role.devices)) & set(device_numbers(its.devices)))
        staying = [one for one, of in ((name, role), (other, its)) if not getattr(of, "offload", False)]
        listed = ", ".join(map(str, shared[:8])) + (", ..." if len(shared) > 8 else "")
        if shared and len(staying) == 2:
            notes.append(f"{name} and {other} share device {listed} and both stay in its memory; set offload: true for both, or move one")
        elif shared and staying and (left := _left_beside(by_role[staying[0]])) is not None:
            remedy = f"lower {staying[0]}.strategy.gpu_memory_utilization, or set {staying[0]}.offload: true"
            comes = other if staying == [name] else name
            notes.append(f"{staying[0]} stays on device {listed} and leaves {left:.0%} of its memory to {comes}, which comes in; {remedy}")
    return notes


def _left_beside(role: Role) -> float | None:
    """Share of a GPU's memory that engines or judges leave to others; None if they have a fixed cache size, or for other roles."""
    strategy = getattr(role, "strategy", None)
    if not isinstance(strategy, EngineStrategyConfig) or strategy.kv_cache_mb is not None:
        return None
    return 1 - strategy.gpu_memory_utilization


def model_folder(config: RunConfig, role: Role) -> Path:
    """Folder of the weights that a role starts from."""
    if isinstance(role, RewardModelConfig | JudgeServerConfig):
        return role.path
    own = role.path if isinstance(role, CriticRoleConfig) and role.init != "actor" else None
    return own or config.model.path


def is_elsewhere(config: RunConfig) -> bool:
    """True if the run is on a cluster, to which this machine's devices do not matter."""
    return bool(config.ray.address or os.environ.get("RAY_ADDRESS") or config.placement.nodes is not None)


def gpus_visible() -> bool:
    """True if GPUs are visible. Does not import torch, which takes seconds."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_count() -> int:
    """Number of visible GPUs of this machine."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len([one for one in shown.split(",") if one.strip()]) if shown is not None else len(list(Path("/dev").glob("nvidia[0-9]*")))


def _shape(folder: Path) -> ModelShape | None:
    """Shape of the model; None if unreadable, which the file checks report."""
    try:
        return read_model_shape(folder)
    except ValueError:
        return None


def _divisors(number: int) -> str:
    return _listed([one for one in range(1, number + 1) if number % one == 0])


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
