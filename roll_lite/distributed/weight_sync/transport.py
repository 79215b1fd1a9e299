"""What every way of moving weights has in common: a sending end at a trainer, a receiving end in each engine worker.

A bucket travels as one flat byte buffer. Both ends compute its layout from the same list of tensors, so that nothing
but bytes crosses the wire and the receiver cuts views instead of copying.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from roll_lite.distributed.strategy.base import ExportedTensor

ALIGNMENT = 64  # bytes: a view of any dtype may start there


class TransferError(RuntimeError):
    """The transfer group is no longer usable; both sides have to connect again."""


class TransferTimeout(TransferError):
    """A peer did not come. The message names it."""


class WeightSender(ABC):
    """A trainer's end. Only ranks that own buckets have one."""

    @abstractmethod
    def send(self, bucket: Sequence[ExportedTensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Send one bucket to all engines. Returns when the tensors may be changed again."""

    @abstractmethod
    def close(self) -> None: ...


class WeightReceiver(ABC):
    """An engine worker's end."""

    @abstractmethod
    def receive(self, bucket: Sequence[ExportedTensor], sender: int) -> dict[str, torch.Tensor]:
        """Take one bucket from the transfer rank `sender`. The tensors are the receiver's own; nothing overwrites them later."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor of a bucket lies in the buffer."""

    offsets: tuple[int, ...]
    nbytes: int
    signature: str
    """Tells two buckets apart, to notice ends that are out of step before they exchange bytes."""


def tensor_bytes(tensor: ExportedTensor) -> int:
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= length
    return size


def flat_layout(bucket: Sequence[ExportedTensor]) -> FlatLayout:
    offsets = []
    end = 0
    for tensor in bucket:
        offsets.append(end)
        end += -(-tensor_bytes(tensor) // ALIGNMENT) * ALIGNMENT
    description = ";".join(f"{tensor.name}{tensor.shape}{tensor.dtype}" for tensor in bucket)
    return FlatLayout(tuple(offsets), end, f"{len(bucket)} tensors, {end} bytes, {zlib.crc32(description.encode()):08x}")


def flatten(bucket: Sequence[ExportedTensor], tensors: Mapping[str, torch.Tensor], layout: FlatLayout) -> torch.Tensor:
    """The bucket as bytes on the CPU. Refuses tensors that are not what the plan says."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for spec, offset in zip(bucket, layout.offsets, strict=True):
        if spec.name not in tensors:
            raise ValueError(f"weight transfer: {spec.name} is in the plan but not in the bucket to send")
        tensor = tensors[spec.name]
        if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != spec.dtype:
            raise ValueError(
                f"weight transfer: {spec.name} is {tensor.dtype}{tuple(tensor.shape)}, planned as {spec.dtype}{tuple(spec.shape)}"
            )
        _view(buffer, spec, offset).copy_(tensor.detach())
    return buffer


def unflatten(buffer: torch.Tensor, bucket: Sequence[ExportedTensor], layout: FlatLayout) -> dict[str, torch.Tensor]:
    """Views into the buffer, by name."""
    return {spec.name: _view(buffer, spec, offset) for spec, offset in zip(bucket, layout.offsets, strict=True)}


def _view(buffer: torch.Tensor, spec: ExportedTensor, offset: int) -> torch.Tensor:
    return buffer[offset : offset + tensor_bytes(spec)].view(spec.dtype).view(spec.shape)
