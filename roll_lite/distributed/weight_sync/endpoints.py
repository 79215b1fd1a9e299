from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from roll_lite.distributed.strategy.base import TrainStrategy
from roll_lite.distributed.weight_sync.broadcast import NCCL, BroadcastReceiver, BroadcastSender, GlooReceiver, GlooSender
from roll_lite.distributed.weight_sync.group import Home, StaleEpoch, TransferError, TransferGroup, rendezvous_store
from roll_lite.distributed.weight_sync.memory import (
    ExportedMemory,
    ExportedSegment,
    GpuSegment,
    SharedSegment,
    free_abandoned_exports,
    open_exported,
    open_shared,
)
from roll_lite.distributed.weight_sync.plan import ExportPlan, Membership, Route, TransferPlan, by_bucket, tensors_of
from roll_lite.distributed.weight_sync.transport import (
    FetchReceiver,
    FetchSender,
    Transport,
    TransportReceiver,
    TransportSender,
    flat_layout,
    flatten,
    timed,
    unflatten,
)
from roll_lite.distributed.weight_sync.update import checksum

TRANSPORTS: dict[str, Transport] = {
    "shared_memory": Transport(partial(FetchSender, make=SharedSegment), partial(FetchReceiver, open_segment=open_shared)),
    "gloo": Transport(GlooSender, GlooReceiver),
    "cuda_ipc": Transport(partial(FetchSender, make=ExportedSegment), partial(FetchReceiver, open_segment=open_exported, gives_back=True)),
    "nccl": Transport(partial(BroadcastSender, wire=NCCL), partial(BroadcastReceiver, wire=NCCL)),
}
AUTO = "auto"
"""Chooses the transport for each pair of trainer rank and engine worker."""


def transport_of(group: TransferGroup) -> Transport:
    wanted = group.membership.transport
    if wanted == AUTO:
        return SIDE_BY_SIDE
    if reason := why_unusable(wanted, group):
        raise TransferError(f"weight_sync.transport: {wanted}, but {reason}; auto finds a way")
    return TRANSPORTS[wanted]


def split_by_transport(group: TransferGroup, route: Route) -> list[tuple[str, Route]]:
    if group.membership.transport != AUTO:
        return [(group.membership.transport, route)]
    parts: dict[tuple[str, int, int], list[int]] = {}
    neighbours: Counter[str] = Counter()
    for receiver in route.receivers:
        home, sender = group.homes[receiver], sender_to(group, receiver, route.sender)
        name, twin = link(group.homes[sender], home), 0
        if name == "nccl":  # NCCL refuses two members on one GPU
            twin, neighbours[home.device] = neighbours[home.device], neighbours[home.device] + 1
        parts.setdefault((name, sender, twin), []).append(receiver)
    return [(name, replace(route, sender=sender, receivers=tuple(receivers))) for (name, sender, _), receivers in parts.items()]


def sender_to(group: TransferGroup, receiver: int, owner: int) -> int:
    """Return the training rank that sends to a receiver: the one on its GPU, else one whose GPU memory it can read, else `owner`, which
    gathers the tensors.

    Each receiver always reads from one GPU: a CUDA context on another costs memory.
    """
    home = group.homes[receiver]
    on_own, *readable = [group.trainer_on.get((home.machine, device)) for device in (home.device, *home.visible)]
    near = [rank for rank in readable if rank is not None]
    return on_own if on_own is not None else near[receiver % len(near)] if near else owner


def link(sender: Home, receiver: Home) -> str:
    together = sender.machine == receiver.machine
    if sender.device and receiver.device:
        if together and sender.device in receiver.visible:
            return "cuda_ipc"
        if sender.device != receiver.device:
            return "nccl"
    return "shared_memory" if together else "gloo"


def why_unusable(name: str, group: TransferGroup) -> str | None:
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
            first = dict[str, str]()
            for member in (sender, *receivers):
                if (other := first.setdefault(homes[member].device, names[member])) != names[member]:
                    return f"{other} and {names[member]} share a GPU, which NCCL refuses"
    return None


# ------------------------------------------------------------ several at once


class SideBySideSender(TransportSender):
    """Sender with several transports, each for some of this rank's receivers."""

    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group)
        self._transports: dict[str, TransportSender] = {}

    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, part in split_by_transport(self.group, route):
            if part.sender != self.group.number:
                continue
            if name not in self._transports:
                self._transports[name] = TRANSPORTS[name].sender(self.group)
            transport = self._transports[name]
            transport.seconds = self.seconds
            with timed(self.by_transport, name):
                transport.send(part, tensors)

    def finish(self) -> None:
        for name in self._transports:
            self.finish_one(name)

    def finish_one(self, name: str) -> None:
        if name in self._transports:
            with timed(self.by_transport, name):
                self._transports[name].finish()

    def exported_memory(self) -> list[ExportedMemory]:
        return [one for transport in self._transports.values() for one in transport.exported_memory()]

    def close(self) -> None:
        super().close()
        for transport in self._transports.values():
            transport.close()


class SideBySideReceiver(TransportReceiver):
    def __init__(self, group: TransferGroup) -> None:
        super().__init__(group)
        self._transports: dict[str, TransportReceiver] = {}

    def expect(self, route: Route) -> None:
        transport, part = self._way(route)
        transport.expect(part)

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        transport, part = self._way(route)
        return transport.receive(part)

    def _way(self, route: Route) -> tuple[TransportReceiver, Route]:
        name, part = next(way for way in split_by_transport(self.group, route) if self.group.number in way[1].receivers)
        if name not in self._transports:
            self._transports[name] = TRANSPORTS[name].receiver(self.group)
        return self._transports[name], part

    def release(self) -> None:
        for transport in self._transports.values():
            transport.release()

    def close(self) -> None:
        super().close()
        for transport in self._transports.values():
            transport.close()


SIDE_BY_SIDE = Transport(SideBySideSender, SideBySideReceiver)


class WeightSender:
    """Weight sender of a training rank. Gathering is collective: ranks that send nothing make the same calls.

    An engine worker on a training rank's GPU gets all tensors from that rank. Trainers and engines then need no common NCCL group, whose
    kernels would wait for each other on a shared GPU.
    """

    def __init__(self, strategy: TrainStrategy, rank: int) -> None:
        self._strategy = strategy
        self._rank = rank
        self._store: Any = None
        self._transport: TransportSender | None = None
        self._exported_memory: list[ExportedMemory] = []
        """GPU memory exported in earlier transfer groups; `memory.free_abandoned_exports` frees what has no readers."""
        self._export: ExportPlan | None = None
        self._routes: dict[int, list[Route]] = {}
        self._own_routes: dict[int, list[Route]] = {}
        self._for_all_ranks: set[int] = set()
        """Buckets that owners broadcast to all training ranks, because other ranks send them to engines."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.by_transport: defaultdict[str, float] = defaultdict(float)
        self.nbytes: dict[str, int] = {}
        """{transport: bytes sent per update}."""

    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        self._export = self._strategy.export_plan(bucket_bytes)
        if torch.cuda.is_available() and dist.is_initialized():
            self._export = replace(self._export, handing_on=tuple(range(dist.get_world_size())))
        return self._export

    def host(self, address: str, timeout_s: float) -> int:
        self._store = rendezvous_store(address, timeout_s)
        return self._store.port

    def connect(self, plan: TransferPlan, membership: Membership) -> None:
        """Leave the old transfer group; join the new one if this rank can send."""
        self.leave()
        self._routes = {routes[0].bucket: routes for routes in by_bucket(plan.routes)}
        self._own_routes, self._for_all_ranks = {}, set()
        if self._rank in plan.trainers:
            number = plan.trainers.index(self._rank)
            group = TransferGroup(membership, number)
            # Every living reader has joined, so it has left earlier groups.
            free_abandoned_exports(self._exported_memory, group.homes, group.forget_opened)
            self._exported_memory.clear()
            self._transport = transport_of(group).sender(group)
            sent: Counter[str] = Counter()
            for route in plan.routes:
                ways = split_by_transport(group, route)
                if any(part.sender != route.sender for _, part in ways):
                    self._for_all_ranks.add(route.bucket)
                if own := [(name, part) for name, part in ways if part.sender == number]:
                    self._own_routes.setdefault(route.bucket, []).append(route)
                for name, part in own:
                    sent[name] += part.nbytes
            self.nbytes = dict(sent)

    def send(self) -> None:
        """Gather and send all buckets. After a TransferError, gather the rest (collective), then raise."""
        failure: TransferError | None = None
        self.seconds, self.by_transport = defaultdict(float), defaultdict(float)
        if self._transport is not None:
            self._transport.seconds, self._transport.by_transport = self.seconds, self.by_transport
        gathered = self._gathered()
        while True:
            tensors: Mapping[str, torch.Tensor] = {}  # frees the previous bucket before the next is gathered
            with timed(self.seconds, "gather"):
                bucket, tensors = next(gathered, (None, {}))
            if bucket is None:
                break
            if bucket in self._for_all_ranks:
                try:
                    self._finish_broadcasts()
                except TransferError as error:
                    failure = failure or error
                with timed(self.seconds, "gather"):
                    tensors = self._at_all_ranks(bucket, tensors)
            try:
                for route in self._own_routes.get(bucket, ()) if failure is None else ():
                    assert self._transport is not None
                    with self._transport.group.report_failures():
                        self._transport.send(route, tensors)
            except TransferError as error:
                failure = error
        if failure is not None:
            raise failure
        if self._transport is not None:
            with self._transport.group.report_failures():
                self._transport.finish()
            if not self.by_transport:
                self.by_transport.update(dict.fromkeys(self.nbytes, self.seconds["copy"] + self.seconds["wait"]))

    def _finish_broadcasts(self) -> None:
        """Wait for this rank's NCCL broadcasts to engines. Otherwise one could queue on the GPU behind a broadcast from a trainer that
        itself waits for the engine (deadlock)."""
        if isinstance(self._transport, SideBySideSender) and self._transport.group.failure is None:
            with self._transport.group.report_failures():
                self._transport.finish_one("nccl")

    def _at_all_ranks(self, bucket: int, gathered: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Broadcast a bucket from its owner to all training ranks (collective), in the dtypes that engines get."""
        tensors = tensors_of(self._routes[bucket])
        layout, owner = flat_layout(tensors), tensors[0].owner
        buffer = GpuSegment(layout.nbytes, readers=0).whole
        if owner == self._rank:
            flatten(tensors, gathered, layout, buffer)
        dist.broadcast(buffer, owner)
        return unflatten(buffer, tensors, layout)

    def checksums(self, names: Collection[str]) -> dict[str, str]:
        """Return {tensor: checksum of the weight in the dtype that is sent}. Collective over training ranks."""
        dtypes = {tensor.name: tensor.dtype for routes in self._routes.values() for tensor in tensors_of(routes)}
        return {
            name: checksum(tensor.to(dtypes[name]))
            for _, tensors in self._gathered(names)
            for name, tensor in tensors.items()
            if name in names
        }

    def _gathered(self, names: Collection[str] | None = None) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        assert self._export is not None, "export_plan() comes first"
        for bucket in self._export.buckets():
            number = bucket[0].bucket
            if names is None or any(tensor.name in names for tensor in bucket):
                yield number, self._strategy.export_bucket(bucket) or {}

    def leave(self) -> None:
        if self._transport is not None:
            self._exported_memory += self._transport.exported_memory()
            self._transport.close()
            self._transport = None


class WeightReceiver:
    """Weight receiver of an engine worker. Arguments are plain types for the engine's RPC."""

    def __init__(self, staged: bool = False) -> None:
        """`staged`: `load` stores tensors; `finish` changes the model."""
        self._staged = staged
        self._transport: TransportReceiver | None = None
        self._begun = False
        self.touched = False
        """True while an unfinished update mixes old and new weights."""
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def connect(self, membership: Mapping[str, Any], number: int) -> None:
        self.leave()
        self._begun = False
        group = TransferGroup(Membership.of(membership), number)
        self._transport = transport_of(group).receiver(group)

    def load(
        self,
        routes: Iterable[Mapping[str, Any]],
        begin: Callable[[bool], None],
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
        following: Iterable[Mapping[str, Any]] = (),
        all_workers_ok: Callable[[bool], bool] = bool,
    ) -> None:
        """Receive one bucket, start to receive the `following` one, and load the first meanwhile.

        `begin(again)` is called before an update's first bucket is loaded; `again`: the previous update stopped partway.
        `all_workers_ok(ok)` is True if every worker passed True; else the bucket is not loaded.
        """
        if self._transport is None:
            raise RuntimeError("the engine has not joined a transfer group: connect_weights comes first")
        started = time.monotonic()
        arrived: dict[str, torch.Tensor] = {}
        try:
            with self._transport.group.report_failures():
                for route in self._own(routes):
                    arrived |= self._transport.receive(route)
                for route in self._own(following):
                    self._transport.expect(route)
        except Exception:
            with suppress(RuntimeError):  # in case another worker has died
                all_workers_ok(False)
            raise
        if not all_workers_ok(True):
            raise StaleEpoch(f"weight transfer: another worker of {self._transport.group.name}'s engine has not got its part of a bucket")
        with self._transport.group.report_failures():
            here = time.monotonic()
            if not self._begun:
                again, self._begun, self.touched = self.touched, True, not self._staged
                self._seconds.clear()
                begin(again)
            load(arrived.items())
            arrived.clear()
            self._transport.release()
        self._seconds["receive"] += here - started
        self._seconds["load"] += time.monotonic() - here

    def _own(self, routes: Iterable[Mapping[str, Any]]) -> list[Route]:
        assert self._transport is not None
        return [route for route in map(Route.of, routes) if self._transport.group.number in route.receivers]

    def finish(self, put_in_place: Callable[[], object]) -> dict[str, float]:
        """Complete the update: `put_in_place()` changes the model. Return the update's seconds by phase."""
        started = time.monotonic()
        put_in_place()
        self._begun = self.touched = False
        return {**self._seconds, "load": self._seconds["load"] + time.monotonic() - started}

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
