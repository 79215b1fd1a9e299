from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from packaging.version import Version

from roll_lite.config.schema.models import EngineStrategyConfig

CPU_KV_CACHE_MB = 256
FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for fp8 (Ada). On older GPUs vLLM refuses it, and SGLang's packed weights cannot be updated."""

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""{fused layer: its projections}, for model classes without `packed_modules_mapping`."""

Range = tuple[str, str]
"""(first supported version, first unsupported one)."""


class NotInstalled(RuntimeError):
    pass


def check_version(distributions: Sequence[str], supported: Range, remedy: str) -> str:
    """Return the version of the first installed one of `distributions`. RuntimeError outside `supported`, NotInstalled without any.
    `remedy`: what to install."""
    low, high = supported
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not Version(low).release <= Version(version).release < Version(high).release:
            raise RuntimeError(f"{name} {version} is installed, roll_lite supports {distributions[0]} >={low},<{high}")
        return version
    raise NotInstalled(f"strategy `{distributions[0]}` needs {remedy}")


@dataclass(frozen=True)
class Environment:
    preset: Mapping[str, str]
    """Variables that the user may override."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Variables that override the user's: the engine needs them."""
    settings: Mapping[str, str] = field(default_factory=dict)

    def variables(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        return {name: given.get(name, value) for name, value in self.preset.items()} | dict(self.required) | dict(self.settings)

    def notes(self, given: Mapping[str, str] = os.environ) -> list[str]:
        return [
            f"the environment's {name}={given[name]} is set to {value!r} for the engine, which needs that"
            for name, value in self.required.items()
            if given.get(name, value) != value
        ]


def kv_cache_mb(given: int | None, cuda: bool) -> int | None:
    """Return the KV cache size from the configured one; None: the rest of GPU memory."""
    return given if given is not None or cuda else CPU_KV_CACHE_MB


def is_fp8(strategy: EngineStrategyConfig, cuda: bool) -> bool:
    """True if fp8 is configured; ValueError if no GPU here can do it."""
    if strategy.quantization != "fp8":
        return False
    if not cuda:
        raise ValueError("strategy.quantization: fp8 needs a GPU, and there is none here; use none")
    import torch  # only at the start of a run, since configurations may be checked without GPUs

    if (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        least, found = (".".join(map(str, numbers)) for numbers in (FP8_CAPABILITY, capability))
        raise ValueError(f"strategy.quantization: fp8 needs a GPU of compute capability {least}, and here is one of {found}; use none")
    return True


def with_fused(targets: Collection[str]) -> list[str]:
    together = {part for parts in FUSED.values() if not set(parts).isdisjoint(targets) for part in parts}
    return sorted({*targets, *together})
