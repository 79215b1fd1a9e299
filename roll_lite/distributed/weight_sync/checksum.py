"""Checksums of weights, the same on both sides of a transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

_CHUNK = 1 << 24
SAMPLED = 16
"""One tensor of so many is compared after each update: after so many updates, all have been."""


def sample(names: Iterable[str], version: int) -> list[str]:
    return sorted(names)[version % SAMPLED :: SAMPLED]


def checksum(tensor: torch.Tensor) -> str:
    """Digest of dtype, shape and values in row-major order, whatever the strides or the device.

    Negative zero counts as zero: an engine that keeps its weights in a packed layout gives them back through a
    multiplication, which cannot tell the two apart.
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
    """RuntimeError where an engine's checksums are not the trainer's."""
    wrong = sorted(name for name, digest in sent.items() if held.get(name) != digest)
    if wrong:
        raise RuntimeError(
            f"weight_sync: engine {engine} does not hold version {version} after its update: "
            f"{len(wrong)} of {len(sent)} tensors differ, among them {', '.join(wrong[:5])}"
        )
