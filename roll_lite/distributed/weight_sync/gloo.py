"""Weights over gloo: host memory and TCP. The transport of machines without GPUs.

Each channel has a process group of its own, so that trainers which send different buckets need not wait for each other. Before each
bucket its members meet at the rendezvous: gloo itself only says that somebody did not come.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from roll_lite.distributed.weight_sync.group import TransferError, TransferGroup
from roll_lite.distributed.weight_sync.plan import Channel, Route
from roll_lite.distributed.weight_sync.transport import FlatLayout, TransportReceiver, TransportSender, flat_layout, flatten, unflatten


class _Broadcasts:
    """A member's process groups, one for each channel that it belongs to."""

    def __init__(self, group: TransferGroup) -> None:
        self._group = group
        self._address = _own_address(group.membership.host, group.membership.port)
        self._groups = {
            channel: self._make(number, channel)
            for number, channel in enumerate(group.membership.channels)
            if group.number == channel[0] or group.number in channel[1]
        }

    def _make(self, number: int, channel: Channel) -> ProcessGroupGloo:
        members = [channel[0], *channel[1]]
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=self._group.membership.timeout_s)
        store = PrefixStore(f"gloo/{self._group.membership.epoch}/{number}", self._group.store)
        try:
            return ProcessGroupGloo(store, members.index(self._group.number), len(members), options)
        except RuntimeError as error:
            raise TransferError(f"weight transfer: {self._group.name} could not connect to the others: {error}") from error

    def broadcast(self, route: Route, buffer: torch.Tensor, layout: FlatLayout) -> None:
        group = self._group
        try:
            with group.exchange():
                group.meet(route, layout.announcement())
                self._broadcast(route, buffer)
        except TransferError:
            self.close()
            raise

    def _broadcast(self, route: Route, buffer: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._groups[route.channel].broadcast([buffer], options).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            them, us = self._group.membership.members[route.sender], self._group.name
            broke = f"weight transfer: the connection broke in the middle of a bucket from {them} (seen by {us}): {error}"
            raise TransferError(broke) from error

    def close(self) -> None:
        """Also after a failure: members that were to get the bucket from here would wait for it until their time is up."""
        self._groups.clear()


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to the rendezvous. Left alone, gloo asks for the address of the machine's name, which
    often cannot be resolved, or is one that others cannot reach."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


class GlooSender(TransportSender):
    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group)
        self._broadcasts = _Broadcasts(group)

    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        layout = flat_layout(route.tensors)
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        flatten(route.tensors, tensors, layout, buffer)
        self._broadcasts.broadcast(route, buffer, layout)

    def finish(self) -> None:
        """A broadcast that has ended here has been received."""

    def close(self) -> None:
        super().close()
        self._broadcasts.close()


class GlooReceiver(TransportReceiver):
    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group)
        self._broadcasts = _Broadcasts(group)

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        layout = flat_layout(route.tensors)
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        self._broadcasts.broadcast(route, buffer, layout)
        return unflatten(buffer, route.tensors, layout)

    def release(self) -> None:
        """The memory is the receiver's own."""

    def close(self) -> None:
        super().close()
        self._broadcasts.close()
