"""What every way of moving weights has in common: a sending half in trainers, a receiving half in engine workers.

A transport's halves share nothing but the transfer group, over which they announce each bucket: what is in it, how large it is, where it
lies. Who waits for whom is theirs: both for each other before a collective (`TransferGroup.meet`); a receiver for the sender, and the
sender for `done` before it uses a buffer again, where receivers fetch.

A bucket travels as one flat byte buffer. Both halves compute its layout from the same list of tensors, so that nothing but bytes crosses
the wire and the receiver cuts views instead of copying. Every sender has two buffers for each channel: it gathers and writes a bucket while
the one before travels and is loaded. A receiver of copies has two as well: it loads a bucket while the next one comes.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from roll_lite.distributed.weight_sync.devices import Home, settle
from roll_lite.distributed.weight_sync.group import Announcement, TransferGroup
from roll_lite.distributed.weight_sync.memory import Lent, Segment, name_of_export
from roll_lite.distributed.weight_sync.plan import ALIGNMENT, Channel, ExportedTensor, Route

BUCKETS_AHEAD = 2
"""One is written while the one before is sent and read."""

Await = Callable[[], Mapping[int, set[str]]]
"""Returns when every receiver is done with a bucket: the handles of segments of which each of them keeps something."""


class Lane:
    """A sender's buffers for one channel."""

    def __init__(self, make: Callable[[int, int], Segment], readers: int, usual_nbytes: int) -> None:
        self._make = make
        self._usual_nbytes = usual_nbytes
        self._readers = readers
        self._segments: list[Segment] = []
        self.under_way: deque[tuple[Segment, Await]] = deque()
        """Buckets that not every receiver is done with."""
        self._kept: dict[int, set[str]] = {}
        """By receiver, the segments of which it still had something when it was last done with a bucket."""

    def segment(self, nbytes: int) -> Segment:
        """The smallest free one that is large enough, or a new one. Waits while too many buckets are under way."""
        while len(self.under_way) >= BUCKETS_AHEAD:
            self.await_oldest()
        used = {id(segment) for segment, _ in self.under_way}
        kept = set().union(*self._kept.values())
        free = [one for one in self._segments if not (id(one) in used or one.handle in kept or one.is_kept() or len(one.whole) < nbytes)]
        if not free:
            free.append(self._make(max(nbytes, self._usual_nbytes), self._readers))
            self._segments += free
        return min(free, key=lambda segment: len(segment.whole))

    def await_oldest(self) -> None:
        self._kept.update(self.under_way[0][1]())
        self.under_way.popleft()

    def lent(self, readers: Sequence[Home]) -> Iterator[Lent]:
        """Of each segment that was exported, one for each reader."""
        for segment in self._segments:
            for place, export in enumerate(segment.exports):
                yield Lent(readers[place], export, name_of_export(segment.handle, place))

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self.under_way.clear()


@contextmanager
def timed(seconds: defaultdict[str, float], what: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[what] += time.monotonic() - started


class TransportSender(ABC):
    """A trainer's half. Only ranks that own tensors have one."""

    def __init__(self, group: TransferGroup) -> None:
        self.group = group
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Writing buckets (`copy`), and waiting until a buffer was free or all had been received (`wait`)."""
        self.by_transport: defaultdict[str, float] = defaultdict(float)
        """The same by transport, where there are several."""

    @abstractmethod
    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the route's tensors on the way to its receivers. Returns when the tensors may be changed again."""

    @abstractmethod
    def finish(self) -> None:
        """After the last bucket of an update: returns when every receiver has all of it."""

    @abstractmethod
    def lent(self) -> list[Lent]:
        """What readers have to give back, each its own, before memory is free; see `memory.take_back`."""

    def close(self) -> None:
        self.group.close()


class BufferedSender(TransportSender):
    """Sends from buffers that it writes."""

    def __init__(self, group: TransferGroup, make: Callable[[int, int], Segment]) -> None:
        """`make`: a buffer of so many bytes for so many readers."""
        super().__init__(group)
        self._make = make
        self._lanes: dict[Channel, Lane] = {}

    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        self.publish(route, lambda layout, buffer: flatten(route.tensors, tensors, layout, buffer))

    def publish(self, route: Route, write: Callable[[FlatLayout, torch.Tensor], None]) -> Segment:
        """Of a bucket that `write` writes."""
        layout = flat_layout(route.tensors)
        lane = self._lanes.setdefault(route.channel, Lane(self._make, len(route.receivers), self.group.membership.bucket_nbytes))
        with self.group.exchange():
            with timed(self.seconds, "wait"):
                segment = lane.segment(layout.nbytes)
            with timed(self.seconds, "copy"):
                write(layout, segment.whole)
                settle(segment.whole)
            lane.under_way.append((segment, self._dispatch(route, layout, segment)))
        return segment

    def finish(self) -> None:
        with self.group.exchange(), timed(self.seconds, "wait"):
            for lane in self._lanes.values():
                while lane.under_way:
                    lane.await_oldest()

    def lent(self) -> list[Lent]:
        homes = self.group.homes
        return [one for (_, readers), lane in self._lanes.items() for one in lane.lent([homes[reader] for reader in readers])]

    @abstractmethod
    def _dispatch(self, route: Route, layout: FlatLayout, segment: Segment) -> Await:
        """The bucket lies in the segment: send it, without waiting for anybody."""

    def close(self) -> None:
        super().close()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()


class TransportReceiver(ABC):
    """An engine worker's half."""

    def __init__(self, group: TransferGroup) -> None:
        self.group = group

    def expect(self, route: Route) -> None:  # noqa: B027 (where receivers read in the sender's memory, that has the next bucket already)
        """This route comes next: what is copied may come while the bucket before is loaded. Returns at once."""

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
    """Makes both halves."""

    sender: Callable[[TransferGroup], TransportSender]
    receiver: Callable[[TransferGroup], TransportReceiver]


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor of a bucket lies in the buffer."""

    offsets: tuple[int, ...]
    nbytes: int
    signature: str

    def announcement(self, handle: str = "") -> Announcement:
        return Announcement(self.signature, handle)


def flat_layout(bucket: Sequence[ExportedTensor]) -> FlatLayout:
    offsets = []
    end = 0
    for tensor in bucket:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    description = ";".join(f"{tensor.name}{tensor.shape}{tensor.dtype}" for tensor in bucket)
    return FlatLayout(tuple(offsets), end, f"{len(bucket)} tensors, {end} bytes, {zlib.crc32(description.encode()):08x}")


def flatten(bucket: Sequence[ExportedTensor], tensors: Mapping[str, torch.Tensor], layout: FlatLayout, buffer: torch.Tensor) -> None:
    """Write the bucket into bytes, cast where the plan says so. Refuses tensors that are not what it says."""
    for spec, offset in zip(bucket, layout.offsets, strict=True):
        if spec.name not in tensors:
            raise ValueError(f"weight transfer: {spec.name} is in the plan but not in the bucket to send")
        tensor = tensors[spec.name]
        planned = spec.cast_from or spec.dtype
        if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != planned:
            raise ValueError(
                f"weight transfer: {spec.name} is {tensor.dtype}{tuple(tensor.shape)}, planned as {planned}{tuple(spec.shape)}"
            )
        _view(buffer, spec, offset).copy_(tensor.detach())


def unflatten(buffer: torch.Tensor, bucket: Sequence[ExportedTensor], layout: FlatLayout) -> dict[str, torch.Tensor]:
    """Views into the buffer, by name."""
    return {spec.name: _view(buffer, spec, offset) for spec, offset in zip(bucket, layout.offsets, strict=True)}


def _view(buffer: torch.Tensor, spec: ExportedTensor, offset: int) -> torch.Tensor:
    return buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
