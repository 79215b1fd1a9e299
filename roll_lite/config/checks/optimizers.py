"""Checks of Muon and of moments in float16: Megatron-Core's limits, and the packages they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec

from roll_lite.config.arithmetic import roles
from roll_lite.config.checks import layout
from roll_lite.config.hf_config import read_model_shape
from roll_lite.config.problems import Problem
from roll_lite.config.schema.models import TrainRoleConfig
from roll_lite.config.schema.run import RunConfig


def _trained(config: RunConfig) -> dict[str, TrainRoleConfig]:
    return {name: role for name, role in roles(config).items() if isinstance(role, TrainRoleConfig)}


def _trained_by_muon(config: RunConfig) -> dict[str, TrainRoleConfig]:
    return {name: role for name, role in _trained(config).items() if role.optimizer.muon is not None}


def _what_goes_with_muon(config: RunConfig) -> Iterator[Problem]:
    for name, role in _trained_by_muon(config).items():
        if role.optimizer.on_host:
            yield Problem(f"{name}.optimizer.on_host", "the step on the host is AdamW's; use false, or no optimizer.muon", True)
        if getattr(role, "lora", None) is not None:
            yield Problem(f"{name}.optimizer.muon", "is for whole matrices, of which adapters are factors; remove it, or lora")


def _whole_heads(config: RunConfig) -> Iterator[Problem]:
    """Refuse more tensor-parallel ranks than key/value heads: Muon splits query, key and value by these heads."""
    for name, role in _trained_by_muon(config).items():
        tensor_parallel = role.strategy.tensor_parallel
        with suppress(ValueError):  # reported as a problem of the model
            if tensor_parallel > (heads := read_model_shape(layout.model_folder(config, role)).kv_heads):
                message = f"is more than the model's {heads} key/value heads, which Muon's updates are cut by; use at most {heads}"
                yield Problem(f"{name}.strategy.tensor_parallel", f"{message}, or no optimizer.muon", tensor_parallel)


def _package_of_muon(config: RunConfig) -> Iterator[Problem]:
    """Check that Muon's package is installed here. Ranks on other machines report at their start what they lack."""
    for name in _trained_by_muon(config):
        if not layout.is_elsewhere(config) and find_spec("emerging_optimizers") is None:
            message = "the package emerging-optimizers is not installed; install it (docs/parallelism.md), or remove the section"
            yield Problem(f"{name}.optimizer.muon", message)


def _half_moments(config: RunConfig) -> dict[str, TrainRoleConfig]:
    return {name: role for name, role in _trained(config).items() if role.optimizer.moments != "float32"}


def _what_goes_with_half_moments(config: RunConfig) -> Iterator[Problem]:
    for name, role in _half_moments(config).items():
        path, value = f"{name}.optimizer.moments", role.optimizer.moments
        if not role.strategy.distributed_optimizer:
            message = f"Megatron-Core has them in {value} in its distributed optimizer only; use true, or {path}: float32"
            yield Problem(f"{name}.strategy.distributed_optimizer", message, False)
        if config.model.dtype != "bfloat16":
            yield Problem(path, f"is for weights in bfloat16, model.dtype is {config.model.dtype}; use float32", value)
        if role.optimizer.on_host:
            yield Problem(path, "the step on the host (on_host) has float32; use float32, or on_host: false", value)
        if role.optimizer.muon is not None:
            yield Problem(path, "Megatron-Core has none beside Muon; use float32, or no optimizer.muon", value)


OPTIMIZER_CHECKS = (_what_goes_with_muon, _whole_heads, _what_goes_with_half_moments)
OPTIMIZER_FILE_CHECKS = (_package_of_muon,)
