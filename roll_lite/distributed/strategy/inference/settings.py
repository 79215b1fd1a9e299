"""What an engine is started with, as far as all makes agree: the supported range, environment variables, arguments, the cache's size."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from packaging.version import Version

from roll_lite.config.problems import or_nearest
from roll_lite.config.schema.models import EngineStrategyConfig

CPU_KV_CACHE_MB = 256
FP8_CAPABILITY = (8, 9)
"""Ada. vLLM refuses older GPUs at its start; SGLang packs weights for them in a way that no update can come to."""

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Layers that engines make of several, where a model does not say itself what it fuses."""

Range = tuple[str, str]
"""From, up to but not including."""


def check_version(distributions: Sequence[str], supported: Range, remedy: str) -> str:
    """Version of the first distribution that is installed. RuntimeError with the `remedy` where none is, or with the range."""
    low, high = supported
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not Version(low).release <= Version(version).release < Version(high).release:
            raise RuntimeError(f"{name} {version} is installed, roll_lite supports {distributions[0]} >={low},<{high}")
        return version
    raise RuntimeError(f"strategy `{distributions[0]}` needs {remedy}")


@dataclass(frozen=True)
class Environment:
    """Environment variables of an engine's processes."""

    preset: Mapping[str, str]
    """Where the user has not set them."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Whatever the user has set: the engine, or what it returns, would be wrong without."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Those that a setting in YAML or the placement decides."""

    def variables(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """All of them, with what the user has set in its place."""
        return {name: given.get(name, value) for name, value in self.preset.items()} | dict(self.required) | dict(self.settings)

    def notes(self, given: Mapping[str, str] = os.environ) -> list[str]:
        """What of the user's does not stay."""
        return [
            f"the environment's {name}={given[name]} is set to {value!r} for the engine, which needs that"
            for name, value in self.required.items()
            if given.get(name, value) != value
        ]


def kv_cache_mb(given: int | None, cuda: bool) -> int | None:
    """Size of the KV cache; None where it takes what is left of the GPU."""
    return given if given is not None or cuda else CPU_KV_CACHE_MB


def is_fp8(strategy: EngineStrategyConfig, cuda: bool) -> bool:
    """ValueError where that is asked for and there is no GPU that computes in it."""
    if strategy.quantization != "fp8":
        return False
    if not cuda:
        raise ValueError("strategy.quantization: fp8 needs a GPU, and there is none here; use none")
    import torch  # where a run starts: configurations are checked without

    if (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        least, found = (".".join(map(str, numbers)) for numbers in (FP8_CAPABILITY, capability))
        raise ValueError(f"strategy.quantization: fp8 needs a GPU of compute capability {least}, and here is one of {found}; use none")
    return True


def with_fused(targets: Collection[str]) -> list[str]:
    """Linear layers that get adapters, and those that engines have in one layer with one of them."""
    together = {part for parts in FUSED.values() if not set(parts).isdisjoint(targets) for part in parts}
    return sorted({*targets, *together})


def check_engine_args(make: str, given: Mapping[str, Any], own: Collection[str], known: Collection[str]) -> None:
    """ValueError for one that the engine does not have, or that is roll_lite's `own`."""
    for name in sorted(given):
        path = f"actor_infer.strategy.engine_args.{name}"
        if name in own:
            raise ValueError(f"{path}: {OWN_ARGUMENT}")
        if name not in known:
            raise ValueError(f"{path}: {make} has no such engine argument{or_nearest(name, known)}")


OWN_ARGUMENT = "roll_lite sets this one itself; remove it"
