"""Weight transport by broadcast: gloo between hosts, NCCL between GPUs.

Each channel (a sender and its receivers) has a process group. Members meet at the rendezvous store before each bucket: a collective cannot
tell which member is missing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from roll_lite.distributed.weight_sync.group import Announcement, TransferError, TransferGroup
from roll_lite.distributed.weight_sync.memory import BucketSegment, GpuSegment, SharedSegment, open_shared, use_device_of, wait_for_device
from roll_lite.distributed.weight_sync.plan import Channel, Route
from roll_lite.distributed.weight_sync.transport import (
    Await,
    BufferedSender,
    FetchReceiver,
    FetchSender,
    FlatLayout,
    TransportReceiver,
    flat_layout,
    unflatten,
)
from roll_lite.files import changed_environment


@dataclass(frozen=True)
class Wire:
    connect: Callable[[TransferGroup, str, int, int], Any]
    """Creates a process group from (transfer group, key prefix in the store, rank, number of ranks)."""
    make: Callable[[int, int], BucketSegment]
    """Creates a buffer from (size in bytes, number of readers)."""
    device: str
    polled: bool = False
    """True if completion must be polled: NCCL returns before the broadcast is done."""


def _poll_of(is_done: Callable[[], bool]) -> Callable[[float], bool]:
    def poll(pause: float) -> bool:
        if not is_done():
            time.sleep(pause)
        return is_done()

    return poll


class _Addresses(Store):
    """Store through which gloo exchanges addresses. Waits end also when another member fails."""

    def __init__(self, group: TransferGroup, prefix: str) -> None:
        super().__init__()
        self._group = group
        self._store = PrefixStore(prefix, group.store)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._group.poll(_poll_of(lambda: self._store.check(keys)), "connect")


def connect_gloo(group: TransferGroup, prefix: str, rank: int, size: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Use this machine's IP address on its route to the rendezvous. gloo's default, the host name, is often unreachable.
    host, port = group.membership.host, group.membership.port
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        own = str(probe.getsockname()[0])
    options._devices = [ProcessGroupGloo.create_device(hostname=own, lazy_init=False)]
    options._timeout = timedelta(seconds=group.membership.timeout_s)
    return ProcessGroupGloo(_Addresses(group, prefix), rank, size, options)


def connect_nccl(group: TransferGroup, prefix: str, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only where torch is built with CUDA

    own = group.store.clone()  # type: ignore[attr-defined]
    store = PrefixStore(prefix, own)  # a separate connection for NCCL, whose waits block other users of the store
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * group.membership.timeout_s)  # the transfer group's time-out comes first
    # Without blocking waits, torch's NCCL watchdog would kill this process when a peer dies.
    with _ENVIRONMENT, changed_environment({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
        return ProcessGroupNCCL(store, rank, size, options)


_ENVIRONMENT = threading.Lock()


GLOO = Wire(connect_gloo, BucketSegment, "cpu")
NCCL = Wire(connect_nccl, GpuSegment, "cuda", polled=True)


class _Broadcasts:
    def __init__(self, group: TransferGroup, wire: Wire) -> None:
        self._group = group
        self._wire = wire
        self._groups: dict[Channel, Any] = {}
        self._closed = False

    def broadcast(self, route: Route, layout: FlatLayout, buffer: torch.Tensor) -> None:
        use_device_of(buffer)
        try:
            with self._group.exchange():
                self._group.meet(route, Announcement(layout.signature))
                self._broadcast(route, buffer[: layout.nbytes])
        except TransferError:
            self.close()
            raise

    def _broadcast(self, route: Route, buffer: torch.Tensor) -> None:
        them, us = self._group.membership.members[route.sender], self._group.name
        what = f"take its part of a bucket from {them}"
        begun: Future[Any] = Future()
        threading.Thread(target=self._begin, args=(route, buffer, begun), daemon=True, name="broadcast").start()
        self._group.poll(lambda pause: bool(wait((begun,), pause).done), what)
        try:
            self._group.poll(_poll_of(begun.result().is_completed), what)
            begun.result().wait()
        except TransferError:
            raise
        except RuntimeError as error:
            broke = f"weight transfer: the connection broke in the middle of a bucket from {them} (seen by {us}): {error}"
            raise TransferError(broke) from error

    def _begin(self, route: Route, buffer: torch.Tensor, begun: Future[Any]) -> None:
        use_device_of(buffer)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            if route.channel not in self._groups:
                self._connect(route)
            group = self._groups[route.channel]
            try:
                work = group.broadcast([buffer], options)
                if not self._wire.polled:
                    work.wait()
                begun.set_result(work)
            finally:
                # gloo's group waits for its broadcasts when it is freed, so it must live until here. If an exception's traceback kept it
                # alive, its connections would stay open.
                group = work = None
        except Exception as error:  # raised where the future is awaited
            begun.set_exception(error)

    def _connect(self, route: Route) -> None:
        members = [route.sender, *route.receivers]
        prefix = f"{self._group.membership.epoch}/broadcast/{'.'.join(map(str, members))}"
        try:
            self._groups[route.channel] = self._wire.connect(self._group, prefix, members.index(self._group.number), len(members))
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(f"weight transfer: {self._group.name} could not connect to the others: {error}") from error
        if self._closed:  # closed while this thread was connecting
            self.close()
            raise TransferError(f"weight transfer: {self._group.name} has left the transfer group")

    def close(self) -> None:
        """Close the process groups: peers need not wait for their timeout."""
        self._closed = True
        groups, self._groups = self._groups, {}
        for group in groups.values():
            if self._wire.polled:
                group.abort()  # gloo's groups close when the last reference is dropped


class BroadcastSender(BufferedSender):
    def __init__(self, group: TransferGroup, wire: Wire) -> None:
        super().__init__(group, wire.make)
        self.broadcasts = _Broadcasts(group, wire)
        self._thread = ThreadPoolExecutor(1, "weights")

    def _dispatch(self, route: Route, layout: FlatLayout, segment: BucketSegment) -> Await:
        sent = self._thread.submit(self.broadcasts.broadcast, route, layout, segment.whole)
        return lambda: sent.result() or {}

    def close(self) -> None:
        super().close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.broadcasts.close()


class BroadcastReceiver(TransportReceiver):
    def __init__(self, group: TransferGroup, wire: Wire) -> None:
        super().__init__(group)
        self._device = wire.device
        self.broadcasts = _Broadcasts(group, wire)
        self._thread = ThreadPoolExecutor(1, "weights")
        self._coming: deque[tuple[Route, Future[dict[str, torch.Tensor]]]] = deque()

    def expect(self, route: Route) -> None:
        self._coming.append((route, self._begin(route)))

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        if not self._coming:
            self.expect(route)
        expected, coming = self._coming.popleft()
        assert expected == route, f"bucket {expected.bucket} comes next, not bucket {route.bucket}"
        return coming.result()

    def _begin(self, route: Route) -> Future[dict[str, torch.Tensor]]:
        layout = flat_layout(route.tensors)
        # Allocate here: the worker thread has another current GPU and stream.
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        wait_for_device(buffer)
        return self._thread.submit(self._take, route, layout, buffer)

    def _take(self, route: Route, layout: FlatLayout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        self.broadcasts.broadcast(route, layout, buffer)
        return unflatten(buffer, route.tensors, layout)

    def release(self) -> None:
        """Do nothing: the receiver owns its buffers."""

    def close(self) -> None:
        super().close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.broadcasts.close()


# ------------------------------------------------------------ once for each machine


def neighbours(group: TransferGroup, route: Route, of: int) -> tuple[int, ...]:
    """Return the receivers on the same machine as member `of`."""
    return tuple(receiver for receiver in route.receivers if group.homes[receiver].machine == group.homes[of].machine)


def to_machines(group: TransferGroup, route: Route) -> Route:
    """Return the route with only the first receiver on each machine."""
    return replace(route, receivers=tuple(dict.fromkeys(neighbours(group, route, one)[0] for one in route.receivers)))


ALONE = "by gloo the engine workers of a machine read what the first of them has received: a machine with one does without"


class GlooSender(BroadcastSender):
    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group, GLOO)

    def _dispatch(self, route: Route, layout: FlatLayout, segment: BucketSegment) -> Await:
        return super()._dispatch(to_machines(self.group, route), layout, segment)


class GlooReceiver(BroadcastReceiver):
    """Gloo receiver: one copy per machine. The first worker receives into shared memory; the others read it."""

    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group, GLOO)
        self._spread = FetchSender(group, SharedSegment)
        self._fetch = FetchReceiver(group, open_shared, otherwise=ALONE)

    def expect(self, route: Route) -> None:
        if self._here(route).sender == self.group.number:
            super().expect(route)

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        here = self._here(route)
        return super().receive(route) if here.sender == self.group.number else self._fetch.receive(here)

    def _begin(self, route: Route) -> Future[dict[str, torch.Tensor]]:
        here, sent = self._here(route), to_machines(self.group, route)
        return self._thread.submit(self._hand_on, here, sent) if here.receivers else super()._begin(sent)

    def _hand_on(self, here: Route, sent: Route) -> dict[str, torch.Tensor]:
        segment = self._spread.publish(here, partial(self.broadcasts.broadcast, sent))
        return unflatten(segment.whole, sent.tensors, flat_layout(sent.tensors))

    def _here(self, route: Route) -> Route:
        first, *others = neighbours(self.group, route, self.group.number)
        return replace(route, sender=first, receivers=tuple(others))

    def release(self) -> None:
        self._fetch.release()

    def close(self) -> None:
        super().close()
        self._spread.close()
        self._fetch.close()
