"""What every way of moving weights has in common: a sending half in trainers, a receiving half in engine workers.

A transport's halves share nothing but the transfer group, over which they announce each bucket: what is in it, how large it is, where it
lies. Who waits for whom is theirs: both for each other before a collective (`TransferGroup.meet`); a receiver for the sender, and the
sender for `done` before it uses a buffer again, where receivers fetch.

A bucket travels as one flat byte buffer. Both halves compute its layout from the same list of tensors, so that nothing but bytes crosses
the wire and the receiver cuts views instead of copying.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from roll_lite.distributed.weight_sync.group import Announcement, TransferGroup
from roll_lite.distributed.weight_sync.plan import ExportedTensor, Route

ALIGNMENT = 64  # bytes: a view of any dtype may start there


class TransportSender(ABC):
    """A trainer's half. Only ranks that own tensors have one."""

    def __init__(self, group: TransferGroup) -> None:
        self.group = group

    @abstractmethod
    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the route's tensors to its receivers. Returns when the tensors may be changed again."""

    @abstractmethod
    def finish(self) -> None:
        """After the last bucket of an update: returns when every receiver has all of it."""

    def close(self) -> None:
        self.group.close()


class TransportReceiver(ABC):
    """An engine worker's half."""

    def __init__(self, group: TransferGroup) -> None:
        self.group = group

    @abstractmethod
    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        """Take the route's tensors. Nothing overwrites them for as long as somebody has them; nobody writes into them."""

    @abstractmethod
    def release(self) -> None:
        """What was received has been loaded: the sender may use its memory again, but for tensors that are still there."""

    def close(self) -> None:
        self.group.close()


@dataclass(frozen=True)
class Transport:
    sender: type[TransportSender]
    receiver: type[TransportReceiver]


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor of a bucket lies in the buffer."""

    offsets: tuple[int, ...]
    nbytes: int
    signature: str

    def announcement(self, handle: str = "") -> Announcement:
        return Announcement(self.signature, self.nbytes, handle)


def flat_layout(bucket: Sequence[ExportedTensor]) -> FlatLayout:
    offsets = []
    end = 0
    for tensor in bucket:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    description = ";".join(f"{tensor.name}{tensor.shape}{tensor.dtype}" for tensor in bucket)
    return FlatLayout(tuple(offsets), end, f"{len(bucket)} tensors, {end} bytes, {zlib.crc32(description.encode()):08x}")


def flatten(bucket: Sequence[ExportedTensor], tensors: Mapping[str, torch.Tensor], layout: FlatLayout, buffer: torch.Tensor) -> None:
    """Write the bucket into bytes on the CPU. Refuses tensors that are not what the plan says."""
    for spec, offset in zip(bucket, layout.offsets, strict=True):
        if spec.name not in tensors:
            raise ValueError(f"weight transfer: {spec.name} is in the plan but not in the bucket to send")
        tensor = tensors[spec.name]
        if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != spec.dtype:
            raise ValueError(
                f"weight transfer: {spec.name} is {tensor.dtype}{tuple(tensor.shape)}, planned as {spec.dtype}{tuple(spec.shape)}"
            )
        _view(buffer, spec, offset).copy_(tensor.detach())


def unflatten(buffer: torch.Tensor, bucket: Sequence[ExportedTensor], layout: FlatLayout) -> dict[str, torch.Tensor]:
    """Views into the buffer, by name."""
    return {spec.name: _view(buffer, spec, offset) for spec, offset in zip(bucket, layout.offsets, strict=True)}


def _view(buffer: torch.Tensor, spec: ExportedTensor, offset: int) -> torch.Tensor:
    return buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
