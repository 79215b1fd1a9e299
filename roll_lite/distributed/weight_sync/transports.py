"""Table of the transports, and the choice between them for each trainer and engine worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from roll_lite.distributed.weight_sync.broadcast import NCCL, BroadcastReceiver, BroadcastSender, GlooReceiver, GlooSender
from roll_lite.distributed.weight_sync.devices import Home
from roll_lite.distributed.weight_sync.fetch import FetchReceiver, FetchSender
from roll_lite.distributed.weight_sync.group import TransferError, TransferGroup
from roll_lite.distributed.weight_sync.memory import ExportedSegment, Lent, SharedSegment, open_exported, open_shared
from roll_lite.distributed.weight_sync.plan import Route
from roll_lite.distributed.weight_sync.transport import Transport, TransportReceiver, TransportSender, timed

TRANSPORTS: dict[str, Transport] = {
    "shared_memory": Transport(partial(FetchSender, make=SharedSegment), partial(FetchReceiver, open_segment=open_shared)),
    "gloo": Transport(GlooSender, GlooReceiver),
    "cuda_ipc": Transport(partial(FetchSender, make=ExportedSegment), partial(FetchReceiver, open_segment=open_exported, gives_back=True)),
    "nccl": Transport(partial(BroadcastSender, wire=NCCL), partial(BroadcastReceiver, wire=NCCL)),
}
AUTO = "auto"
"""Choose the transport for each pair of trainer and engine worker."""


def transport_of(group: TransferGroup) -> Transport:
    """Transport of a whole group."""
    wanted = group.membership.transport
    if wanted != AUTO:
        if reason := obstacle(wanted, group):
            raise TransferError(f"weight_sync.transport: {wanted}, but {reason}; auto finds a way")
        return TRANSPORTS[wanted]
    ways = [ways_of(group, Route(0, *channel, ())) for channel in group.membership.channels]
    names = {name for parts in ways for name, _ in parts}
    return TRANSPORTS[names.pop()] if len(names) == 1 and all(len(parts) == 1 for parts in ways) else SIDE_BY_SIDE


def ways_of(group: TransferGroup, route: Route) -> list[tuple[str, Route]]:
    """Split a route by transport; each part has its own receivers. All members compute the same result."""
    if group.membership.transport != AUTO:
        return [(group.membership.transport, route)]
    parts: dict[tuple[str, int], list[int]] = {}
    neighbours: Counter[str] = Counter()
    for receiver in route.receivers:
        home = group.homes[receiver]
        name, twin = link(group.homes[route.sender], home), 0
        if name == "nccl":  # refuses two members on one GPU
            twin, neighbours[home.device] = neighbours[home.device], neighbours[home.device] + 1
        parts.setdefault((name, twin), []).append(receiver)
    return [(name, replace(route, receivers=tuple(receivers))) for (name, _), receivers in parts.items()]


def link(sender: Home, receiver: Home) -> str:
    """Transport between two members."""
    together = sender.machine == receiver.machine
    if sender.device and receiver.device:
        if together and sender.device in receiver.visible:
            return "cuda_ipc"
        if sender.device != receiver.device:
            return "nccl"
    return "shared_memory" if together else "gloo"


def obstacle(name: str, group: TransferGroup) -> str | None:
    """Reason for which a transport cannot connect all members, or None."""
    names, homes = group.membership.members, group.homes
    if name in ("cuda_ipc", "nccl"):
        on_cpu = [who for who, home in zip(names, homes, strict=True) if not home.device]
        if on_cpu:
            return f"{', '.join(on_cpu)} computes on the CPU"
    if name in ("cuda_ipc", "shared_memory"):
        elsewhere = [who for who, home in zip(names, homes, strict=True) if home.machine != homes[0].machine]
        if elsewhere:
            them = "on another machine, in another container, or another user's"
            return f"{', '.join(elsewhere)} cannot map the memory of {names[0]}: {them}"
    for sender, receivers in group.membership.channels:
        if name == "cuda_ipc":
            blind = [names[receiver] for receiver in receivers if homes[sender].device not in homes[receiver].visible]
            if blind:
                return f"{', '.join(blind)} does not see the GPU of {names[sender]}"
        if name == "nccl":
            first: dict[str, str] = {}
            for member in (sender, *receivers):
                if (other := first.setdefault(homes[member].device, names[member])) != names[member]:
                    return f"{other} and {names[member]} share a GPU, which NCCL refuses"
    return None


# ------------------------------------------------------------ several at once


class SideBySideSender(TransportSender):
    """Sends each bucket by several transports, each to its own receivers; the bucket is gathered once."""

    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group)
        self._halves: dict[str, TransportSender] = {}

    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, part in ways_of(self.group, route):
            if name not in self._halves:
                self._halves[name] = TRANSPORTS[name].sender(self.group)
            self._halves[name].seconds = self.seconds
            with timed(self.by_transport, name):
                self._halves[name].send(part, tensors)

    def finish(self) -> None:
        for name, half in self._halves.items():
            with timed(self.by_transport, name):
                half.finish()

    def lent(self) -> list[Lent]:
        return [one for half in self._halves.values() for one in half.lent()]

    def close(self) -> None:
        super().close()
        for half in self._halves.values():
            half.close()


class SideBySideReceiver(TransportReceiver):
    """Receives each bucket by the transport that connects this worker with its sender."""

    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group)
        self._halves: dict[str, TransportReceiver] = {}

    def expect(self, route: Route) -> None:
        half, part = self._way(route)
        half.expect(part)

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        half, part = self._way(route)
        return half.receive(part)

    def _way(self, route: Route) -> tuple[TransportReceiver, Route]:
        name, part = next(way for way in ways_of(self.group, route) if self.group.number in way[1].receivers)
        if name not in self._halves:
            self._halves[name] = TRANSPORTS[name].receiver(self.group)
        return self._halves[name], part

    def release(self) -> None:
        for half in self._halves.values():
            half.release()

    def close(self) -> None:
        super().close()
        for half in self._halves.values():
            half.close()


SIDE_BY_SIDE = Transport(SideBySideSender, SideBySideReceiver)
