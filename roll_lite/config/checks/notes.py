from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path

import psutil

from roll_lite.config.arithmetic import TRAINING_ROLES, device_numbers, engine_offload, infer_dtype, kl_terms, model_parallel_size, roles
from roll_lite.config.checks.gpu_only import gpu_notes
from roll_lite.config.checks.layout import model_folder, runs_on_cluster, sharing_notes, verify_notes
from roll_lite.config.checks.lora import reference_notes
from roll_lite.config.checks.rollout import staleness_notes
from roll_lite.config.problems import LEFT_OUT
from roll_lite.config.schema.base import Refused
from roll_lite.config.schema.models import (
    FEED_FORWARD,
    ActorRoleConfig,
    InferRoleConfig,
    JudgeServerConfig,
    MegatronStrategyConfig,
    RewardModelConfig,
    TrainRoleConfig,
    VllmStrategyConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.validation import texts_in
from roll_lite.files import free_bytes
from roll_lite.hub import config_notation, lacks_weights
from roll_lite.models.hf_config import read_hf_config, read_model_shape
from roll_lite.models.model_files import weight_shapes


def mode_notes(config: RunConfig) -> list[str]:
    if config.mode == "rollout_only":
        idle = [name for name in TRAINING_ROLES if getattr(config, name) is not None]
        return [f"mode: rollout_only: {', '.join(idle)} and validation are left out; batches are dumped, nothing trains"]
    if config.mode == "train_only":
        return [f"mode: train_only: training on the dumps of {config.replay.path}; engines, rewards and validation are left out"]
    return []


RECOMPUTED_LOSSES = ("ppo", "gspo", "cispo", "topr", "policy_gradient", "raft")


def without_formula(config: RunConfig) -> list[str]:
    lora, algorithm = config.actor_train.lora, config.algorithm
    feeds_forward = lora is not None and not set(FEED_FORWARD).isdisjoint(lora.targets)
    found = {
        f"model.dtype: {config.model.dtype}": config.model.dtype != "float32",
        f"algorithm.routing_replay: {algorithm.routing_replay}": algorithm.routing_replay != "none",
        f"algorithm.policy_loss.name: {algorithm.policy_loss.name}": algorithm.policy_loss.name not in RECOMPUTED_LOSSES,
        **{f"algorithm.{name}.estimator: full": term.estimator == "full" for name, term in kl_terms(config).items()},
        "actor_train.lora.targets: adapters of experts": feeds_forward and bool(read_model_shape(config.model.path).experts),
    }
    return [setting for setting, is_missing in found.items() if is_missing]


def batch_notes(config: RunConfig) -> list[str]:
    if config.batches.write != "always" or not (settings := without_formula(config)):
        return []
    return [f"batches.write: always: roll_lite.examples.recompute will refuse these batches, it has no formula for {'; '.join(settings)}"]


GIB = 1 << 30
MOMENTS = 8
HOST_STAGING_BYTES = 8
"""Bytes of host memory per weight for copies of weights and gradients, if the optimizer is on the host."""
PINNED_ROUNDING = 2
"""Most host bytes per byte of vLLM's weights: torch rounds pinned blocks up to powers of two."""


def host_bytes(config: RunConfig) -> dict[str, int]:
    """Return {role: bytes of host memory}, over all nodes, for tensors kept in host memory or offloaded to it."""
    found: dict[str, int] = {}
    for name, role in roles(config).items():
        if isinstance(role, JudgeServerConfig):
            continue
        ranks, per_shard, average = len(device_numbers(role.devices)), 0, 0
        if isinstance(role, InferRoleConfig):
            dtype, stays = infer_dtype(config), engine_offload(config) != "with_copy"
            ranks *= role.replicas_per_device
        else:
            dtype, stays = role.dtype if isinstance(role, RewardModelConfig) else config.model.dtype, not role.offload
        expert_ranks = other_ranks = model_parallel_size(role)
        if isinstance(strategy := role.strategy, MegatronStrategyConfig):
            expert_ranks = strategy.pipeline_parallel * strategy.expert_parallel * strategy.expert_tensor_parallel
            other_ranks = strategy.pipeline_parallel * strategy.tensor_parallel
        per_weight = 0 if stays else 2 if dtype == "bfloat16" else 4
        if isinstance(strategy, VllmStrategyConfig):
            per_weight *= PINNED_ROUNDING
        if isinstance(role, TrainRoleConfig) and getattr(role, "lora", None) is None:
            on_device = (4 if dtype == "bfloat16" else 0) + (0 if role.optimizer.on_host else MOMENTS)
            per_shard = (0 if stays else on_device) + (MOMENTS + HOST_STAGING_BYTES if role.optimizer.on_host else 0)
            average = 4 if isinstance(role, ActorRoleConfig) and role.ema is not None else 0
        try:
            counts = weight_counts(model_folder(config, role), has_head=not isinstance(role, RewardModelConfig))
        except ValueError:
            if isinstance(role, RewardModelConfig):
                continue  # it may be of a kind that only transformers knows
            raise
        for count, sharing in zip(counts, (expert_ranks, other_ranks), strict=True):
            copies = ranks // sharing
            shards = 1 if getattr(role.strategy, "distributed_optimizer", True) else copies
            found[name] = found.get(name, 0) + count * (copies * per_weight + shards * per_shard + average)
    return found


def weight_counts(folder: Path, has_head: bool = True) -> tuple[int, int]:
    """Return (weights in experts, weights elsewhere). `has_head`: the model has an output layer over the vocabulary."""
    hf = read_hf_config(folder)
    sizes = {name: prod(shape) for name, shape in weight_shapes(hf).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return experts, sum(sizes.values()) - experts + (hf.vocab_size * hf.hidden if has_head and not hf.tied_embeddings else 0)


def host_memory_notes(config: RunConfig) -> list[str]:
    nodes = config.placement
    found: dict[str, float] = {}
    try:
        for name, size in host_bytes(config).items():
            devices = device_numbers(roles(config)[name].devices)
            most = max(Counter(one // nodes.devices_per_node for one in devices).values()) if runs_on_cluster(config) else len(devices)
            found[name] = size * most / len(devices) / GIB
    except ValueError:  # unreadable model, reported elsewhere
        return []
    needed = sum(found.values())
    if needed < 1:
        return []
    told = ", ".join(f"{name} {size:.0f}" for name, size in found.items() if size)
    note = f"a node needs about {needed:.0f} GiB of host memory for what is offloaded or kept there ({told})"
    there = psutil.virtual_memory().total / GIB
    if runs_on_cluster(config) or needed < there:
        return [note]
    return [f"{note}, and this machine has {there:.0f} GiB; use offload: false or more devices, or fewer data-parallel copies"]


def disk_notes(config: RunConfig) -> list[str]:
    if not config.checkpoint.every or config.checkpoint.store is not None:
        return []
    per_weight = MOMENTS + (2 + 4 if config.model.dtype == "bfloat16" else 4)
    trained = [role for role in roles(config).values() if isinstance(role, TrainRoleConfig) and getattr(role, "lora", None) is None]
    try:
        size = sum(per_weight * sum(weight_counts(model_folder(config, role))) for role in trained)
    except ValueError:  # unreadable model, reported elsewhere
        return []
    if size < (free := free_bytes(config.run_dir)):
        return []
    return [f"checkpoint.every: a checkpoint takes about {size / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free in run_dir"]


def hub_notes(config: RunConfig) -> list[str]:
    missing = {folder: name for name, role in roles(config).items() if lacks_weights(folder := model_folder(config, role))}
    return [
        f"{name}: the weights of {config_notation(folder)} are downloaded, and checked, when a run starts"
        for folder, name in missing.items()
    ]


def plain_secrets(config: RunConfig) -> list[str]:
    return [
        f"{path} is left out ({LEFT_OUT}) of config.yaml and checkpoints; write ${{oc.env:NAME}} in its place, which they can hold"
        for path, text in texts_in(config.model_dump(mode="json"))
        if text == LEFT_OUT
    ]


def notes_on(config: RunConfig, *further: Callable[[RunConfig], list[str]]) -> list[str]:
    notes_of_parts = (
        mode_notes,
        gpu_notes,
        sharing_notes,
        verify_notes,
        host_memory_notes,
        disk_notes,
        staleness_notes,
        batch_notes,
        reference_notes,
        plain_secrets,
        hub_notes,
        *further,
    )
    found: list[str] = []
    for notes in notes_of_parts:
        with suppress(Refused):  # values are missing
            found += notes(config)
    return found
