"""Start-up settings that engines share: supported versions, environment variables, arguments, cache size."""

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
"""Least GPU compute capability for fp8 (Ada). vLLM refuses older GPUs; on these SGLang packs weights in a way that updates cannot write
to."""

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Fused layers and the projections in them, for models that do not declare them."""

Range = tuple[str, str]
"""First supported version and first unsupported one."""


def check_version(distributions: Sequence[str], supported: Range, remedy: str) -> str:
    """Version of the first installed distribution. RuntimeError if none is installed (with the `remedy`) or its version is not
    supported."""
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
    preset: Mapping[str, str]
    """Defaults, unless the user sets them."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Values that override the user's: without them the engine or its results would be wrong."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values decided by YAML or the placement."""

    def variables(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        return {name: given.get(name, value) for name, value in self.preset.items()} | dict(self.required) | dict(self.settings)

    def notes(self, given: Mapping[str, str] = os.environ) -> list[str]:
        """Messages for values of the user that are overridden."""
        return [
            f"the environment's {name}={given[name]} is set to {value!r} for the engine, which needs that"
            for name, value in self.required.items()
            if given.get(name, value) != value
        ]


def kv_cache_mb(given: int | None, cuda: bool) -> int | None:
    """Size of the KV cache; None: the rest of the GPU."""
    return given if given is not None or cuda else CPU_KV_CACHE_MB


def is_fp8(strategy: EngineStrategyConfig, cuda: bool) -> bool:
    """True if the strategy asks for fp8. ValueError if no GPU supports it."""
    if strategy.quantization != "fp8":
        return False
    if not cuda:
        raise ValueError("strategy.quantization: fp8 needs a GPU, and there is none here; use none")
    import torch  # at the start of a run: configurations are checked without GPUs

    if (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        least, found = (".".join(map(str, numbers)) for numbers in (FP8_CAPABILITY, capability))
        raise ValueError(f"strategy.quantization: fp8 needs a GPU of compute capability {least}, and here is one of {found}; use none")
    return True


def with_fused(targets: Collection[str]) -> list[str]:
    """Names of the linear layers with adapters, and of those that engines fuse with them."""
    together = {part for parts in FUSED.values() if not set(parts).isdisjoint(targets) for part in parts}
    return sorted({*targets, *together})


def check_engine_args(make: str, given: Mapping[str, Any], own: Collection[str], known: Collection[str]) -> None:
    """ValueError for an argument that the engine lacks, or that is roll_lite's `own`."""
    for name in sorted(given):
        path = f"actor_infer.strategy.engine_args.{name}"
        if name in own:
            raise ValueError(f"{path}: {OWN_ARGUMENT}")
        if name not in known:
            raise ValueError(f"{path}: {make} has no such engine argument{or_nearest(name, known)}")


OWN_ARGUMENT = "roll_lite sets this one itself; remove it"
