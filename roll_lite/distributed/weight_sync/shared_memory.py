"""Weights through memory that both sides map: between processes of one machine.

A trainer writes a bucket into a segment, and every engine worker reads it there, without a copy of its own, while the trainer fills the
next segment. Segments have no name, only a number in the process that made them, through which others open them; the last process that
maps one takes it with it, however it ends. They are used again once every worker has said that it is done with the bucket and that nothing
of it is kept: an engine may hold on to tensors until the rest of a layer has come.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch

from roll_lite.distributed.weight_sync.group import TransferError, TransferGroup
from roll_lite.distributed.weight_sync.plan import Channel, Route
from roll_lite.distributed.weight_sync.transport import TransportReceiver, TransportSender, flat_layout, flatten, unflatten

BUCKETS_AHEAD = 2
"""One is written while the one before is read."""


class _Segment:
    """The sender's view."""

    def __init__(self, nbytes: int) -> None:
        descriptor = os.memfd_create("roll_lite_weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            self.bytes = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
        except OSError as error:
            os.close(descriptor)
            raise TransferError(f"weight transfer: no shared memory for a bucket of {nbytes >> 20} MB: {error}") from error
        self._descriptor = descriptor
        self.handle = f"/proc/{os.getpid()}/fd/{descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)


class SharedMemorySender(TransportSender):
    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group)
        self._segments: list[_Segment] = []
        self._sent: dict[Channel, deque[tuple[Route, int, _Segment]]] = {}
        """Buckets that not every receiver is done with."""
        self._kept: dict[int, set[str]] = {}
        """By receiver, the segments of which it still had something when it was last done with a bucket."""

    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        layout = flat_layout(route.tensors)
        with self.group.exchange():
            step = self.group.step(route)
            sent = self._sent.setdefault(route.channel, deque())
            while len(sent) >= BUCKETS_AHEAD:
                self._await_done(sent)
            segment = self._free_segment(layout.nbytes)
            flatten(route.tensors, tensors, layout, segment.bytes)
            self.group.tell(route, step, "here", layout.announcement(segment.handle))
            sent.append((route, step, segment))

    def finish(self) -> None:
        with self.group.exchange():
            for sent in self._sent.values():
                while sent:
                    self._await_done(sent)

    def _await_done(self, sent: deque[tuple[Route, int, _Segment]]) -> None:
        route, step, _ = sent[0]
        for receiver, said in self.group.hear(route, step, "done").items():
            self._kept[receiver] = set(said.handle.split())
        sent.popleft()

    def _free_segment(self, nbytes: int) -> _Segment:
        """The smallest that is large enough, or a new one."""
        used = {segment.handle for sent in self._sent.values() for _, _, segment in sent}.union(*self._kept.values())
        free = [segment for segment in self._segments if segment.handle not in used and len(segment.bytes) >= nbytes]
        if not free:
            # Buckets differ in size. What nobody writes to takes no memory.
            free.append(_Segment(1 << (nbytes - 1).bit_length()))
            self._segments += free
        return min(free, key=lambda segment: len(segment.bytes))

    def close(self) -> None:
        super().close()
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._sent.clear()


class _Mapped:
    """A receiver's view of a segment."""

    def __init__(self, handle: str) -> None:
        descriptor = os.open(handle, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            self._memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._given: list[weakref.ref[np.ndarray]] = []

    def tensor(self, nbytes: int) -> torch.Tensor:
        array = np.frombuffer(self._memory, np.uint8, nbytes)
        self._given.append(weakref.ref(array))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes into it
            return torch.from_numpy(array)

    def is_kept(self) -> bool:
        """Something of what was given out is still there."""
        self._given = [one for one in self._given if one() is not None]
        return bool(self._given)


class SharedMemoryReceiver(TransportReceiver):
    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group)
        self._mapped: dict[int, dict[str, _Mapped]] = {}
        """By sender and handle."""
        self._received: list[tuple[Route, int]] = []
        """Since the last release."""

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        layout = flat_layout(route.tensors)
        with self.group.exchange():
            step = self.group.step(route)
            heard = self.group.hear(route, step, "here")
            self.group.compare(layout.announcement(), heard)
            segment = self._map(route.sender, heard[route.sender].handle)
            self._received.append((route, step))
            return unflatten(segment.tensor(layout.nbytes), route.tensors, layout)

    def _map(self, sender: int, handle: str) -> _Mapped:
        mapped = self._mapped.setdefault(sender, {})
        if handle not in mapped:
            try:
                mapped[handle] = _Mapped(handle)
            except OSError as error:
                them = self.group.membership.members[sender]
                cannot = f"{self.group.name} cannot open the memory of {them}: {error}"
                raise TransferError(f"weight transfer: {cannot}; weight_sync.transport: gloo does without") from error
        return mapped[handle]

    def release(self) -> None:
        received, self._received = self._received, []
        with self.group.exchange():
            for route, step in received:
                kept = [handle for handle, segment in self._mapped[route.sender].items() if segment.is_kept()]
                self.group.tell(route, step, "done", flat_layout(route.tensors).announcement(" ".join(kept)))

    def close(self) -> None:
        super().close()
        self._mapped.clear()
