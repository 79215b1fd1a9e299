from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from roll_lite.distributed.weight_sync.plan import ExportedTensor
from roll_lite.files import listed
from roll_lite.models.model_files import HARMLESS, HEAD, stored_tensors

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class WeightUpdate:
    tensors: Sequence[ExportedTensor]
    arrived: set[str] = field(default_factory=set)

    def check(self, tensors: Sequence[ExportedTensor]) -> None:
        """Raise ValueError for a tensor not announced or already arrived."""
        announced = {tensor.name for tensor in self.tensors}
        for tensor in tensors:
            if tensor.name not in announced or tensor.name in self.arrived:
                raise ValueError(f"weight update: {tensor.name} was {'sent before' if tensor.name in announced else 'not announced'}")

    def require_complete(self) -> None:
        missing = [tensor.name for tensor in self.tensors if tensor.name not in self.arrived]
        if missing:
            raise RuntimeError(f"weight update: {len(missing)} tensors have not arrived, among them {', '.join(missing[:5])}")


def checkpoint_shapes(folder: Path, tied: bool) -> dict[str, tuple[int, ...]]:
    """Read tensor shapes. `tied`: omit the LM head, which shares the embedding."""
    try:
        stored = stored_tensors(folder)
    except ValueError as error:
        raise ValueError(f"model.path: {folder}: {error}") from error
    omitted = (*HARMLESS, HEAD) if tied else HARMLESS
    return {name: tensor.shape for name, tensor in stored.items() if not name.endswith(omitted)}


def check_tensors(tensors: Sequence[ExportedTensor], shapes: Shapes) -> None:
    names = [tensor.name for tensor in tensors]
    wrong = {
        "unknown to the model": sorted(set(names) - shapes.keys()),
        "missing": sorted(shapes.keys() - set(names)),
        "announced twice": sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()),
        "of the wrong shape": [
            f"{tensor.name} {tuple(tensor.shape)} instead of {shapes[tensor.name]}"
            for tensor in tensors
            if tensor.name in shapes and tuple(tensor.shape) != shapes[tensor.name]
        ],
    }
    if problems := [f"{what}: {listed(those)}" for what, those in wrong.items() if those]:
        raise ValueError("weight update refused, the engine keeps its weights: " + "; ".join(problems))


_CHUNK = 1 << 22
_ODD = 0x2545F4914F6CDD1D
SAMPLED = 16
"""Step of `verify: sampled`: an update compares every 16th tensor (at least one), the next update others."""


def sample(names: Collection[str], version: int) -> list[str]:
    step = min(SAMPLED, len(names))
    return sorted(names)[version % step :: step]


def checksum(tensor: torch.Tensor) -> str:
    """Return a digest of dtype, shape and values. Negative zero counts as zero: its sign is lost when packed weights are read back."""
    flat = tensor.detach().reshape(-1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    weights = _weights(flat.device)
    sums = []
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if chunk.is_floating_point() and chunk.element_size() > 1:
            chunk = chunk + 0.0
        values, factors = chunk.view(bits).to(torch.int64), weights[: len(chunk)]
        sums.append((values * factors).sum() if values.is_cuda else torch.dot(values, factors))  # GPUs have no integer dot
    of_chunks = torch.stack(sums).tolist() if sums else []
    return hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}{of_chunks}".encode(), digest_size=16).hexdigest()


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Pseudo-random odd factors, [_CHUNK] int64: order changes the checksum."""
    factors = torch.arange(1, _CHUNK + 1, device=device) * _ODD
    for _ in range(2):
        factors = (factors ^ (factors >> 29)) * _ODD
    return factors | 1


def require_equal(sent: Mapping[str, str], held: Mapping[str, str], engine: str, version: int) -> None:
    wrong = sorted(name for name, digest in sent.items() if held.get(name) != digest)
    if wrong:
        raise RuntimeError(
            f"weight_sync: {engine} does not hold version {version} after its update: "
            f"{len(wrong)} of {len(sent)} compared tensors differ, among them {', '.join(wrong[:5])}"
        )
