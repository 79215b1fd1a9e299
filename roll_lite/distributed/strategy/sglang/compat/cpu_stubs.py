"""Dummies of packages that SGLang imports but never calls on a CPU (Triton, CUDA kernels, torchvision, IPython), except for the hash of
sampling seeds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from transformers.utils import is_torchvision_available

STAND_INS = ("triton", "sgl_kernel", "torchvision", "IPython")
ABSENT = ("vllm",)
"""Modules shown as not installed: SGLang would import all of vLLM."""
_LOW = 0xFFFFFFFF


class _Anything:
    def __init__(self, *_: Any, **__: Any) -> None: ...


class _StandIn(ModuleType):
    """Dummy module with every name: classes if capitalized, else modules usable as decorators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "active":  # Triton then finds no active driver
            raise AttributeError(name)
        value = type(name, (_Anything,), {}) if name[0].isupper() else _StandIn(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in ABSENT:
            raise ModuleNotFoundError(f"{fullname} stays out of SGLang's processes on a CPU", name=fullname)
        return ModuleSpec(fullname, self, is_package=True) if top in STAND_INS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]
        if module.__name__ == "triton.backends":
            module.backends = {}  # type: ignore[attr-defined]  # torch looks for a device here


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of seed (64 bits), position and column: [rows, columns] uint32, equal to SGLang's Triton kernel."""
    seed, positions, columns = seed.to(torch.int64)[:, None], positions.to(torch.int64)[:, None], columns.to(torch.int64)[None, :]
    hashed = torch.zeros_like(seed)
    for block in (seed & _LOW, (seed >> 32) & _LOW, positions & _LOW, columns & _LOW):
        mixed = (_rotated((block * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW
        hashed = (_rotated(hashed ^ mixed, 13) * 5 + 0xE6546B64) & _LOW
    hashed = hashed ^ 16
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _LOW
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _LOW
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _rotated(number: torch.Tensor, bits: int) -> torch.Tensor:
    return ((number << bits) | (number >> (32 - bits))) & _LOW


_library: torch.library.Library | None = None


def install() -> None:
    global _library
    if torch.cuda.is_available():
        raise RuntimeError("SGLang's CPU stand-ins must not be installed where CUDA is")
    if _library is not None:
        return
    is_torchvision_available()  # caches the result before the dummy exists, which transformers would take for torchvision
    sys.meta_path.insert(0, _Finder())
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    _library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    _library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
