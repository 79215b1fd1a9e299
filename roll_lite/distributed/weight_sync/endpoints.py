"""The two ends of a weight update: the sender in a training rank, the receiver in an engine worker."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from roll_lite.distributed.strategy.base import TrainStrategy
from roll_lite.distributed.weight_sync.checksum import checksum
from roll_lite.distributed.weight_sync.group import StaleEpoch, TransferError, TransferGroup, rendezvous_store
from roll_lite.distributed.weight_sync.memory import Lent, take_back
from roll_lite.distributed.weight_sync.plan import ExportPlan, Membership, Route, TransferPlan, by_bucket, tensors_of
from roll_lite.distributed.weight_sync.transport import TransportReceiver, TransportSender
from roll_lite.distributed.weight_sync.transports import transport_of, ways_of

T = TypeVar("T")


class WeightSender:
    """The sender in a training rank. Gathering a bucket is collective: every rank makes the same calls, owner of tensors or not."""

    def __init__(self, strategy: TrainStrategy, rank: int) -> None:
        self._strategy = strategy
        self._rank = rank
        self._store: Any = None
        self._half: TransportSender | None = None
        self._lent: list[Lent] = []
        """Memory lent in earlier epochs."""
        self._export: ExportPlan | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of the last update by phase: `gather`, and the transport's own phases."""
        self.by_transport: defaultdict[str, float] = defaultdict(float)
        """Seconds of the last update by transport."""
        self.nbytes: dict[str, int] = {}
        """Bytes that this rank sends per update, by transport; a broadcast counts once."""

    def plan(self, bucket_bytes: int) -> ExportPlan:
        self._export = self._strategy.export_plan(bucket_bytes)
        return self._export

    def host(self, address: str, timeout_s: float) -> int:
        """Host the transfer group's rendezvous on this rank; returns its port."""
        self._store = rendezvous_store(address, timeout_s)
        return self._store.port

    def join(self, plan: TransferPlan, membership: Membership) -> None:
        """Join an epoch of the transfer group and leave the last one. Ranks without tensors do not send."""
        self.leave()
        self._routes = {routes[0].bucket: routes for routes in by_bucket(plan.routes)}
        if self._rank in plan.trainers:
            number = plan.trainers.index(self._rank)
            group = TransferGroup(membership, number)
            take_back(self._lent, group.homes, group.forget_opened)  # all living readers have joined, and so left earlier epochs
            self._lent.clear()
            self._half = transport_of(group).sender(group)
            ways = [way for route in plan.routes if route.sender == number for way in ways_of(group, route)]
            self.nbytes = {name: sum(part.nbytes for other, part in ways if other == name) for name in dict(ways)}

    def send(self) -> None:
        """Gather and send bucket by bucket. If sending fails, the remaining buckets are still gathered, since other ranks need this one."""
        failure: TransferError | None = None
        self.seconds, self.by_transport = defaultdict(float), defaultdict(float)
        if self._half is not None:
            self._half.seconds, self._half.by_transport = self.seconds, self.by_transport
        for bucket, tensors in self._timed(self._gathered()):
            try:
                for route in self._routes[bucket] if failure is None else ():
                    if self._half is not None and route.sender == self._half.group.number:
                        with self._half.group.breaking_off():
                            self._half.send(route, tensors)
            except TransferError as error:
                failure = error
        if failure is not None:
            raise failure
        if self._half is not None:
            with self._half.group.breaking_off():
                self._half.finish()
            if len(self.nbytes) == 1:
                self.by_transport.update(dict.fromkeys(self.nbytes, self.seconds["copy"] + self.seconds["wait"]))

    def checksums(self, names: Collection[str]) -> dict[str, str]:
        """Checksums of the named tensors that this rank owns, in the dtype in which they are sent."""
        dtypes = {tensor.name: tensor.dtype for routes in self._routes.values() for tensor in tensors_of(routes)}
        return {
            name: checksum(tensor.to(dtypes[name]))
            for _, tensors in self._gathered(names)
            for name, tensor in tensors.items()
            if name in names
        }

    def _gathered(self, names: Collection[str] | None = None) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Gather the buckets that hold one of these tensors; None: all buckets."""
        assert self._export is not None, "plan() comes first"
        for bucket in self._export.buckets():
            number = bucket[0].bucket
            if names is None or any(tensor.name in names for tensor in bucket):
                yield number, self._strategy.export_bucket(self._export, number) or {}

    def _timed(self, gathered: Iterator[T]) -> Iterator[T]:
        while True:
            started = time.monotonic()
            one = next(gathered, None)
            self.seconds["gather"] += time.monotonic() - started
            if one is None:
                return
            yield one

    def leave(self) -> None:
        if self._half is not None:
            self._lent += self._half.lent()
            self._half.close()
            self._half = None


class WeightReceiver:
    """The receiver in an engine worker. Its arguments are plain types, since the engine's own remote calls carry them."""

    def __init__(self, set_aside: bool = False) -> None:
        """`set_aside`: loading leaves the model unchanged until the update is finished."""
        self._set_aside = set_aside
        self._half: TransportReceiver | None = None
        self._begun = False
        """True if loading has begun in this epoch."""
        self.touched = False
        """True if the model holds part of an update: neither the old nor the new weights."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of the update: waiting for buckets (`receive`) and loading them (`load`)."""

    def join(self, membership: Mapping[str, Any], number: int) -> None:
        """Join an epoch of the transfer group as this member and leave the last one. An unfinished update is dropped."""
        self.leave()
        self._begun = False
        group = TransferGroup(Membership.of(membership), number)
        self._half = transport_of(group).receiver(group)

    def load(
        self,
        routes: Iterable[Mapping[str, Any]],
        begin: Callable[[bool], None],
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
        following: Iterable[Mapping[str, Any]] = (),
        all_say: Callable[[bool], bool] = bool,
    ) -> None:
        """Receive a bucket over all routes that lead here and load it, while the following one arrives.

        The old weights stay until the first bucket has arrived. Then `begin(again)` is called, once per update; `again`: an earlier update
        broke off half-way. `all_say(ok)`: whether all workers of the engine are ok. They load together or not at all, since some layers
        compute with other workers' parts.
        """
        if self._half is None:
            raise RuntimeError("the engine has not joined a transfer group: connect_weights comes first")
        started = time.monotonic()
        arrived: dict[str, torch.Tensor] = {}
        try:
            with self._half.group.breaking_off():
                for route in self._own(routes):
                    arrived |= self._half.receive(route)
                for route in self._own(following):
                    self._half.expect(route)
        except Exception:
            with suppress(RuntimeError):  # another worker died
                all_say(False)
            raise
        if not all_say(True):
            raise StaleEpoch(f"weight transfer: another worker of {self._half.group.name}'s engine has not got its part of a bucket")
        with self._half.group.breaking_off():
            here = time.monotonic()
            if not self._begun:
                again, self._begun, self.touched = self.touched, True, not self._set_aside
                self._seconds.clear()
                begin(again)
            load(arrived.items())
            arrived.clear()
            self._half.release()
        self._seconds["receive"] += here - started
        self._seconds["load"] += time.monotonic() - here

    def _own(self, routes: Iterable[Mapping[str, Any]]) -> list[Route]:
        assert self._half is not None
        return [route for route in map(Route.of, routes) if self._half.group.number in route.receivers]

    def finish(self, put_in_place: Callable[[], object]) -> dict[str, float]:
        """Put the new weights in place after the last bucket; returns the update's seconds by phase."""
        started = time.monotonic()
        put_in_place()
        self._begun = self.touched = False
        return {**self._seconds, "load": self._seconds["load"] + time.monotonic() - started}

    def leave(self) -> None:
        if self._half is not None:
            self._half.close()
            self._half = None
