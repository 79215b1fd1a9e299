"""Base of the weight transports, and the transport through memory that both sides can read.

A bucket is one byte buffer, whose layout follows from the list of tensors. The sender reuses it once all receivers have loaded the bucket
(`done`) and hold none of its tensors.
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

from roll_lite.distributed.weight_sync.group import Announcement, TransferError, TransferGroup
from roll_lite.distributed.weight_sync.memory import BucketSegment, ExportedMemory, Open, Watched, name_of_export, wait_for_device
from roll_lite.distributed.weight_sync.plan import Channel, ExportedTensor, Route

BUCKETS_AHEAD = 2
Await = Callable[[], Mapping[int, set[str]]]
"""Waits until every receiver has loaded a bucket. Returns {receiver: handles of send buffers still in use}."""


class SendBuffers:
    def __init__(self, make: Callable[[int, int], BucketSegment], readers: int, usual_nbytes: int) -> None:
        self._make = make
        self._usual_nbytes = usual_nbytes
        self._readers = readers
        self.segments: list[BucketSegment] = []
        self.in_flight: deque[tuple[BucketSegment, Await]] = deque()
        self._kept: dict[int, set[str]] = {}

    def segment(self, nbytes: int) -> BucketSegment:
        """Return the smallest free segment that fits, or a new one. Waits while too many buckets are in flight."""
        while len(self.in_flight) >= BUCKETS_AHEAD:
            self.await_oldest()
        used = {id(segment) for segment, _ in self.in_flight}
        kept = set().union(*self._kept.values())
        free = [one for one in self.segments if not (id(one) in used or one.handle in kept or one.is_kept() or len(one.whole) < nbytes)]
        if not free:
            free.append(self._make(max(nbytes, self._usual_nbytes), self._readers))
            self.segments += free
        return min(free, key=lambda segment: len(segment.whole))

    def await_oldest(self) -> None:
        self._kept.update(self.in_flight[0][1]())
        self.in_flight.popleft()

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        self.segments.clear()
        self.in_flight.clear()


@contextmanager
def timed(seconds: defaultdict[str, float], what: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[what] += time.monotonic() - started


class TransportSender(ABC):
    def __init__(self, group: TransferGroup) -> None:
        self.group = group
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds so far: `copy`, filling buffers; `wait`, for a free buffer or for receivers."""
        self.by_transport: defaultdict[str, float] = defaultdict(float)

    @abstractmethod
    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send tensors to the route's receivers. The caller may change them afterwards."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every receiver has the whole update."""

    @abstractmethod
    def exported_memory(self) -> list[ExportedMemory]:
        """Return GPU memory exports that readers may still hold."""

    def close(self) -> None:
        self.group.close()


class BufferedSender(TransportSender):
    def __init__(self, group: TransferGroup, make: Callable[[int, int], BucketSegment]) -> None:
        super().__init__(group)
        self._make = make
        self._buffers: dict[Channel, SendBuffers] = {}

    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        self.publish(route, lambda layout, buffer: flatten(route.tensors, tensors, layout, buffer))

    def publish(self, route: Route, write: Callable[[FlatLayout, torch.Tensor], None]) -> BucketSegment:
        layout = flat_layout(route.tensors)
        buffers = self._buffers.setdefault(
            route.channel, SendBuffers(self._make, len(route.receivers), self.group.membership.bucket_nbytes)
        )
        with self.group.exchange():
            with timed(self.seconds, "wait"):
                segment = buffers.segment(layout.nbytes)
            with timed(self.seconds, "copy"):
                write(layout, segment.whole)
                wait_for_device(segment.whole)
            buffers.in_flight.append((segment, self._dispatch(route, layout, segment)))
        return segment

    def finish(self) -> None:
        with self.group.exchange(), timed(self.seconds, "wait"):
            for buffers in self._buffers.values():
                while buffers.in_flight:
                    buffers.await_oldest()

    def exported_memory(self) -> list[ExportedMemory]:
        homes = self.group.homes
        return [
            ExportedMemory(homes[readers[place]], export, name_of_export(segment.handle, place))
            for (_, readers), buffers in self._buffers.items()
            for segment in buffers.segments
            for place, export in enumerate(segment.exports)
        ]

    @abstractmethod
    def _dispatch(self, route: Route, layout: FlatLayout, segment: BucketSegment) -> Await:
        """Start sending; return a function that waits for the receivers."""

    def close(self) -> None:
        super().close()
        for buffers in self._buffers.values():
            buffers.close()
        self._buffers.clear()


class TransportReceiver(ABC):
    def __init__(self, group: TransferGroup) -> None:
        self.group = group

    def expect(self, route: Route) -> None:  # noqa: B027 (nothing to prepare if receivers read the sender's memory)
        """Prepare to receive the next bucket, without blocking."""

    @abstractmethod
    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        """Return a bucket's tensors (read-only views)."""

    @abstractmethod
    def release(self) -> None:
        """Report the received buckets as loaded: the sender may reuse their memory."""

    def close(self) -> None:
        self.group.close()


@dataclass(frozen=True)
class Transport:
    sender: Callable[[TransferGroup], TransportSender]
    receiver: Callable[[TransferGroup], TransportReceiver]


@dataclass(frozen=True)
class FlatLayout:
    offsets: tuple[int, ...]
    nbytes: int
    signature: str


def flat_layout(bucket: Sequence[ExportedTensor]) -> FlatLayout:
    offsets = []
    end = 0
    for tensor in bucket:
        offsets.append(end)
        end += tensor.aligned_nbytes
    description = ";".join(f"{tensor.name}{tensor.shape}{tensor.dtype}" for tensor in bucket)
    return FlatLayout(tuple(offsets), end, f"{len(bucket)} tensors, {end} bytes, {zlib.crc32(description.encode()):08x}")


def flatten(bucket: Sequence[ExportedTensor], tensors: Mapping[str, torch.Tensor], layout: FlatLayout, buffer: torch.Tensor) -> None:
    for spec, offset in zip(bucket, layout.offsets, strict=True):
        tensor = tensors[spec.name]
        found, planned = (tensor.dtype, *tensor.shape), (spec.cast_from or spec.dtype, *spec.shape)
        cast_already = (spec.dtype, *spec.shape)
        assert found in (planned, cast_already), f"weight transfer: {spec.name} is {found}, planned as {planned}"
        _view(buffer, spec, offset).copy_(tensor.detach())


def unflatten(buffer: torch.Tensor, bucket: Sequence[ExportedTensor], layout: FlatLayout) -> dict[str, torch.Tensor]:
    return {spec.name: _view(buffer, spec, offset) for spec, offset in zip(bucket, layout.offsets, strict=True)}


def _view(buffer: torch.Tensor, spec: ExportedTensor, offset: int) -> torch.Tensor:
    return buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)


class FetchSender(BufferedSender):
    def _dispatch(self, route: Route, layout: FlatLayout, segment: BucketSegment) -> Await:
        step = self.group.step(route)
        self.group.announce(route, step, "here", Announcement(layout.signature, segment.handle))

        def done() -> Mapping[int, set[str]]:
            return {receiver: set(said.handle.split()) for receiver, said in self.group.await_announcements(route, step, "done").items()}

        return done


class FetchReceiver(TransportReceiver):
    def __init__(
        self,
        group: TransferGroup,
        open_segment: Open,
        gives_back: bool = False,
        otherwise: str = "weight_sync.transport: gloo does without",
    ) -> None:
        """`gives_back`: record opened exports for `memory.free_abandoned_exports`. `otherwise`: advice in the error."""
        super().__init__(group)
        self._open = open_segment
        self._gives_back = gives_back
        self._otherwise = otherwise
        self._opened: dict[int, dict[str, Watched]] = {}
        self._received: list[tuple[Route, int]] = []

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        layout = flat_layout(route.tensors)
        with self.group.exchange():
            step = self.group.step(route)
            heard = self.group.await_announcements(route, step, "here")
            self.group.compare(Announcement(layout.signature), heard)
            segment = self._segment(route, heard[route.sender].handle)
            self._received.append((route, step))
            return unflatten(segment.whole, route.tensors, layout)

    def _segment(self, route: Route, handle: str) -> Watched:
        opened = self._opened.setdefault(route.sender, {})
        if handle not in opened:
            place = route.receivers.index(self.group.number)
            if self._gives_back:
                self.group.opens(name_of_export(handle, place))
            try:
                opened[handle] = Watched(self._open(handle, place))
            except (OSError, RuntimeError, ValueError) as error:  # from the system, from CUDA, or because the GPU is invisible
                them = self.group.membership.members[route.sender]
                cannot = f"{self.group.name} cannot open the memory of {them}: {error}"
                raise TransferError(f"weight transfer: {cannot}; {self._otherwise}") from error
        return opened[handle]

    def release(self) -> None:
        received, self._received = self._received, []
        with self.group.exchange():
            for segment in (one for opened in self._opened.values() for one in opened.values()):
                wait_for_device(segment.whole)
            for route, step in received:
                kept = [handle for handle, segment in self._opened[route.sender].items() if segment.is_kept()]
                self.group.announce(route, step, "done", Announcement(flat_layout(route.tensors).signature, " ".join(kept)))

    def close(self) -> None:
        super().close()
        self._opened.clear()
