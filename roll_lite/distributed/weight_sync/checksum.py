"""Checksums of weights, the same on both sides of a transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

_CHUNK = 1 << 24
SAMPLED = 16
"""Part of the tensors that an update compares: one in SAMPLED. After SAMPLED updates all have been compared."""


def sample(names: Iterable[str], version: int) -> list[str]:
    return sorted(names)[version % SAMPLED :: SAMPLED]


def checksum(tensor: torch.Tensor) -> str:
    """Digest of dtype, shape and values in row-major order, independent of strides and device.

    Negative zero counts as zero: an engine with a packed layout returns weights through a multiplication, which loses the sign.
    """
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if chunk.is_floating_point():
            chunk = chunk + 0.0
        digest.update(chunk.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_equal(sent: Mapping[str, str], held: Mapping[str, str], engine: int, version: int) -> None:
    """Raise RuntimeError if an engine's checksums differ from the trainer's."""
    wrong = sorted(name for name, digest in sent.items() if held.get(name) != digest)
    if wrong:
        raise RuntimeError(
            f"weight_sync: engine {engine} does not hold version {version} after its update: "
            f"{len(wrong)} of {len(sent)} tensors differ, among them {', '.join(wrong[:5])}"
        )
