"""Checks of settings that need GPUs."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec

from roll_lite.config.arithmetic import adapters_of_engines, device_numbers, generates, infer_dtype, replays_engines, roles, trains
from roll_lite.config.checks import layout
from roll_lite.config.schema.base import Mistakes, Refused
from roll_lite.config.schema.models import SglangStrategyConfig, VllmStrategyConfig
from roll_lite.config.schema.run import RunConfig

SGLANG_FP8 = ("qwen2", "qwen3")
"""Model families whose fp8 weights SGLang (QuantizedRLModelLoader) can update."""


VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def _fp8_rollouts(config: RunConfig) -> Mistakes:
    strategy = config.actor_infer.strategy
    if not generates(config) or strategy.quantization != "fp8":
        return
    path = "actor_infer.strategy.quantization"
    if (dtype := infer_dtype(config)) != "bfloat16":
        yield path, f"weights are quantised from bfloat16, actor_infer.dtype (where absent, model.dtype) is {dtype}; use bfloat16, or none"
    if trains(config) and not config.algorithm.weighs_by_rollout:
        remedy = "set algorithm.mismatch_correction (weight: {level: token, high: 2.0}), or old_log_probs: rollout"
        yield path, f"engines in fp8 sample from another policy than the one that trains; {remedy}"
    family = layout.known_shape(config.model.path).model_type
    if config.mode == "full" and isinstance(strategy, SglangStrategyConfig) and family not in SGLANG_FP8:
        yield path, f"SGLang takes new weights in fp8 for {' and '.join(SGLANG_FP8)} only, the model is a {family}; use vllm, or none"


def _heads_of_vllm(config: RunConfig) -> Mistakes:
    if layout.runs_on_cluster(config) or layout.gpus_visible():
        return
    on_vllm = {name: role for name, role in roles(config).items() if isinstance(role.strategy, VllmStrategyConfig)}
    for name, role in on_vllm.items():
        with suppress(Refused):  # unreadable; other roles' models may be readable
            if (size := layout.known_shape(layout.model_folder(config, role)).head_dim) not in VLLM_CPU_HEADS:
                sizes = ", ".join(map(str, VLLM_CPU_HEADS))
                message = f"on a CPU vLLM has no attention for the model's heads of {size} numbers (it has for {sizes}); use sglang"
                yield f"{name}.strategy.name", message


def _adapters_alone(config: RunConfig) -> Mistakes:
    if adapters_of_engines(config) is not None and layout.gpus_visible() and infer_dtype(config) == "float32":
        message = "on GPUs engines' kernels for adapters compute in 16 bits, and actor_infer.dtype (where absent, model.dtype) is float32"
        yield "actor_train.lora.engines", f"{message}; use bfloat16, or merged"


GPU_CHECKS = (_fp8_rollouts, _heads_of_vllm, _adapters_alone)


def needs_gpus(config: RunConfig) -> Mistakes:
    """Refuse settings that need GPUs or packages missing here. A cluster's machines are checked when they start."""
    if layout.runs_on_cluster(config):
        return
    there, none, transport = layout.gpus_visible(), "none are visible here", config.weight_sync.transport
    for name, role in roles(config).items():
        if not there and getattr(role.strategy, "quantization", "none") == "fp8":
            yield f"{name}.strategy.quantization", f"engines have fp8 kernels for GPUs only, and {none}; use none"
        if getattr(role.strategy, "layers", None) == "transformer_engine":
            if not there:
                yield f"{name}.strategy.layers", f"its kernels are for GPUs only, and {none}; use auto"
            elif find_spec("transformer_engine") is None:
                message = "the package transformer-engine is not installed; install it (roll-lite docs gpu), or use auto"
                yield f"{name}.strategy.layers", message
    if not there and config.mode == "full" and transport in ("cuda_ipc", "nccl"):
        yield "weight_sync.transport", f"moves weights between GPUs, and {none}; use auto"
    if not there and replays_engines(config) and isinstance(config.actor_infer.strategy, VllmStrategyConfig):
        message = "vLLM on a CPU does not say which experts it used; use actor_infer.strategy.name: sglang, or routing_replay: train"
        yield "algorithm.routing_replay", message


SMALL_RUN = 8
"""Float32 runs without GPUs get a size warning only if they have more processes than this and than CPU cores."""


def gpu_notes(config: RunConfig) -> list[str]:
    """Return a note if the run seems too large for CPUs."""
    if layout.gpus_visible() or layout.runs_on_cluster(config):
        return []
    counts = {name: len(device_numbers(role.devices)) for name, role in roles(config).items()}
    if config.model.dtype != "bfloat16" and sum(counts.values()) <= max(SMALL_RUN, os.cpu_count() or 1):
        return []
    processes = " + ".join(map(str, counts.values()))
    what = f"{', '.join(counts)} have {processes} devices and no GPUs are visible here: a run would start them on CPU slots"
    return [f"{what}; name the cluster (ray.address, or placement.nodes for one that is not there yet)"]
