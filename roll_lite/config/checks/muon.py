"""Muon: what Megatron-Core has it for, and the package that it is in."""

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


def _trained_by_muon(config: RunConfig) -> dict[str, TrainRoleConfig]:
    found = {name: role for name, role in roles(config).items() if isinstance(role, TrainRoleConfig)}
    return {name: role for name, role in found.items() if role.optimizer.muon is not None}


def _what_goes_with_it(config: RunConfig) -> Iterator[Problem]:
    for name, role in _trained_by_muon(config).items():
        if role.strategy.distributed_optimizer:
            message = f"Megatron-Core has no distributed optimizer for Muon; use false, or no {name}.optimizer.muon"
            yield Problem(f"{name}.strategy.distributed_optimizer", message, True)
        if role.optimizer.on_host:
            yield Problem(f"{name}.optimizer.on_host", "the step on the host is AdamW's; use false, or no optimizer.muon", True)
        if getattr(role, "lora", None) is not None:
            yield Problem(f"{name}.optimizer.muon", "is for whole matrices, of which adapters are factors; remove it, or lora")


def _whole_heads(config: RunConfig) -> Iterator[Problem]:
    """Query, key and value are taken apart by key/value heads."""
    for name, role in _trained_by_muon(config).items():
        tensor_parallel = role.strategy.tensor_parallel
        with suppress(ValueError):  # told as the model's mistake
            if tensor_parallel > (heads := read_model_shape(config.model.path).kv_heads):
                message = f"is more than the model's {heads} key/value heads, which Muon's updates are cut by; use at most {heads}"
                yield Problem(f"{name}.strategy.tensor_parallel", f"{message}, or no optimizer.muon", tensor_parallel)


def _package(config: RunConfig) -> Iterator[Problem]:
    """Ranks elsewhere tell at their start what they lack."""
    for name in _trained_by_muon(config):
        if not layout.is_elsewhere(config) and find_spec("emerging_optimizers") is None:
            message = "the package emerging-optimizers is not installed; install it (docs/parallelism.md), or remove the section"
            yield Problem(f"{name}.optimizer.muon", message)


MUON_CHECKS = (_what_goes_with_it, _whole_heads)
MUON_FILE_CHECKS = (_package,)
