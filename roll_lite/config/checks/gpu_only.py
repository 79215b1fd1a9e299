"""Checks of settings that need GPUs: engines in fp8, Transformer Engine's layers, weight transfer between GPUs.

`needs_gpus` asks about this machine, so it is only for runs: a configuration that is merely checked may be for another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec

from roll_lite.config.arithmetic import adapters_of_engines, device_numbers, generates, infer_dtype, replays_engines, roles, trains
from roll_lite.config.checks import layout
from roll_lite.config.problems import Problem
from roll_lite.config.schema.models import EngineStrategyConfig, SglangStrategyConfig, VllmStrategyConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.hf_config import read_model_shape

SGLANG_FP8 = ("qwen2", "qwen3")
"""Families whose weights SGLang can replace in fp8, by its QuantizedRLModelLoader."""


VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on CPUs."""


def no_gpus(config: RunConfig) -> bool:
    return not layout.is_elsewhere(config) and not layout.gpus_visible()


def _fp8_rollouts(config: RunConfig) -> Iterator[Problem]:
    strategy = config.actor_infer.strategy
    if not generates(config) or not isinstance(strategy, EngineStrategyConfig) or strategy.quantization != "fp8":
        return
    path = "actor_infer.strategy.quantization"
    if (dtype := infer_dtype(config)) != "bfloat16":
        message = f"weights are quantised from bfloat16, actor_infer.dtype (where absent, model.dtype) is {dtype}; use bfloat16, or none"
        yield Problem(path, message, "fp8")
    if config.weight_sync.verify != "none" and adapters_of_engines(config) is None:
        message = "an engine in fp8 does not hold the trainer's weights bit for bit; use none"
        yield Problem("weight_sync.verify", message, config.weight_sync.verify)
    if trains(config) and not config.algorithm.weighs_by_rollout:
        message = (
            "engines in fp8 sample from another policy than the one that trains; set algorithm.mismatch_correction "
            "(weight: {level: token, high: 2.0}), or old_log_probs: rollout"
        )
        yield Problem(path, message, "fp8")


def _fp8_of_sglang(config: RunConfig) -> Iterator[Problem]:
    strategy = config.actor_infer.strategy
    if config.mode != "full" or not isinstance(strategy, SglangStrategyConfig) or strategy.quantization != "fp8":
        return
    try:
        family = read_model_shape(config.model.path).model_type
    except ValueError:
        return  # the file checks report it
    if family not in SGLANG_FP8:
        message = f"SGLang takes new weights in fp8 for {' and '.join(SGLANG_FP8)} only, the model is a {family}; use vllm, or none"
        yield Problem("actor_infer.strategy.quantization", message, "fp8")


def _heads_of_vllm(config: RunConfig) -> Iterator[Problem]:
    roles_with_engines = ({"actor_infer": config.actor_infer} if generates(config) else {}) | {
        f"judges.{name}": judge for name, judge in config.judges.items()
    }
    for name, role in roles_with_engines.items():
        if not isinstance(role.strategy, VllmStrategyConfig) or not no_gpus(config):
            continue
        with suppress(ValueError):  # the file checks report it
            size = read_model_shape(layout.model_folder(config, role)).head_dim
            if size not in VLLM_CPU_HEADS:
                sizes = ", ".join(map(str, VLLM_CPU_HEADS))
                message = f"on a CPU vLLM has no attention for the model's heads of {size} numbers (it has for {sizes}); use sglang"
                yield Problem(f"{name}.strategy.name", message, "vllm")


def _adapters_alone(config: RunConfig) -> Iterator[Problem]:
    lora = adapters_of_engines(config)
    if lora is None or not isinstance(config.actor_infer.strategy, EngineStrategyConfig) or not layout.gpus_visible():
        return
    if (dtype := infer_dtype(config)) == "float32":
        message = f"on GPUs engines' kernels for adapters compute in 16 bits, and actor_infer.dtype (where absent, model.dtype) is {dtype}"
        yield Problem("actor_train.lora.engines", f"{message}; use bfloat16, or merged", lora.engines)


def _adapters_beside_transformer_engine(config: RunConfig) -> Iterator[Problem]:
    for name, role in roles(config).items():
        if getattr(role.strategy, "layers", None) == "transformer_engine" and getattr(role, "lora", None) is not None:
            message = "it has norms inside the matrix products that adapters (lora) are put beside; use torch, or auto"
            yield Problem(f"{name}.strategy.layers", message, "transformer_engine")


GPU_CHECKS = (_adapters_beside_transformer_engine, _fp8_rollouts, _fp8_of_sglang, _heads_of_vllm, _adapters_alone)


def needs_gpus(config: RunConfig) -> Iterator[Problem]:
    """Check settings that need GPUs on this machine. Ranks on other machines report at their start what they lack; whether the run's GPUs
    are shared is known when trainers and engines have met."""
    if layout.is_elsewhere(config):
        return
    there, none = layout.gpus_visible(), "none are visible here"
    for name, role in roles(config).items():
        strategy = role.strategy
        if not there and getattr(strategy, "quantization", "none") == "fp8":
            yield Problem(f"{name}.strategy.quantization", f"engines have fp8 kernels for GPUs only, and {none}; use none", "fp8")
        if getattr(strategy, "layers", None) == (package := "transformer_engine"):
            if not there:
                yield Problem(f"{name}.strategy.layers", f"its kernels are for GPUs only, and {none}; use auto", package)
            elif find_spec(package) is None:
                message = "the package transformer-engine is not installed; install it (docs/gpu.md), or use auto"
                yield Problem(f"{name}.strategy.layers", message, package)
    transport = config.weight_sync.transport
    if not there and config.mode == "full" and transport in ("cuda_ipc", "nccl"):
        yield Problem("weight_sync.transport", f"moves weights between GPUs, and {none}; use auto", transport)
    if not there and replays_engines(config) and isinstance(config.actor_infer.strategy, VllmStrategyConfig):
        message = "vLLM on a CPU does not say which experts it used; use actor_infer.strategy.name: sglang, or routing_replay: train"
        yield Problem("algorithm.routing_replay", message, "rollout")


def gpu_notes(config: RunConfig) -> list[str]:
    """Note if a model in bfloat16 would run on CPU slots, as no GPUs are visible."""
    if layout.gpus_visible() or layout.is_elsewhere(config) or config.model.dtype != "bfloat16":
        return []
    counts = {name: len(device_numbers(role.devices)) for name, role in roles(config).items()}
    processes = " + ".join(map(str, counts.values()))
    what = f"{', '.join(counts)} have {processes} devices and no GPUs are visible here: a run would start them on CPU slots"
    return [f"{what}; name the cluster (ray.address, or placement.nodes for one that is not there yet)"]
