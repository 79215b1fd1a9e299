"""Every member of a transfer group on a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import torch

from roll_lite.distributed.weight_sync.endpoints import split_by_transport, transport_of
from roll_lite.distributed.weight_sync.group import Home, TransferGroup, rendezvous_store
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, Membership, Route, TransferPlan, plan_transfers


def make_plan(owners: int, engines: Mapping[int, int], buckets: int = 6) -> tuple[TransferPlan, dict[str, torch.Tensor]]:
    """Two tensors in a bucket, buckets in turn by owner."""
    state = {f"w{n}": torch.randn(50 + n, 3) for n in range(2 * buckets)}
    tensors = [
        ExportedTensor(name, tuple(value.shape), value.dtype, owner=n // 2 % owners, bucket=n // 2)
        for n, (name, value) in enumerate(state.items())
    ]
    return plan_transfers(ExportPlan(tuple(tensors)), engines), state


def fresh(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(value) for name, value in state.items()}


class Members:
    """All halves of one epoch, by the members' names."""

    def __init__(
        self,
        plan: TransferPlan,
        timeout_s: float = 10.0,
        absent: tuple[str, ...] = (),
        transport: str = "gloo",
        epoch: int = 1,
        store: Any = None,
        homes: Sequence[Home] | None = None,
    ) -> None:
        self.plan = plan
        self.homes = homes or [None] * len(plan.members)
        self.store = store or rendezvous_store("127.0.0.1")
        self.pool = ThreadPoolExecutor(16)
        self.membership = plan.membership(epoch, transport, "127.0.0.1", self.store.port, timeout_s)
        self.joining: dict[str, Future[Any]] = {
            name: self.pool.submit(self._join, number) for number, name in enumerate(self.membership.members) if name not in absent
        }

    def _join(self, number: int) -> Any:
        return half(self.membership, number, sends=number < len(self.plan.trainers), home=self.homes[number])

    def halves(self, kind: str = "") -> list[Any]:
        return [future.result(20) for name, future in self.joining.items() if name.startswith(kind)]

    def update(self, state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """What each engine worker has after a whole update."""
        sending = [self.pool.submit(send_all, sender, self.plan, state) for sender in self.halves("trainer")]
        names = [name for name in self.joining if name.startswith("engine")]
        receiving = [self.pool.submit(receive_all, receiver, self.plan) for receiver in self.halves("engine")]
        for future in sending:
            future.result(20)
        return {name: future.result(20) for name, future in zip(names, receiving, strict=True)}

    def close(self) -> None:
        for one in self.halves():
            one.close()
        self.pool.shutdown()


def half(membership: Membership, number: int, sends: bool, home: Home | None = None) -> Any:
    group = TransferGroup(membership, number, home)
    transport = transport_of(group)
    return (transport.sender if sends else transport.receiver)(group)


def send_all(sender: Any, plan: TransferPlan, state: Mapping[str, torch.Tensor]) -> None:
    for route in plan.routes:
        if sender.group.number in {part.sender for _, part in split_by_transport(sender.group, route)}:
            sender.send(route, {tensor.name: state[tensor.name] for tensor in route.tensors})
    sender.finish()


def deliver(sender: Any, route: Route, state: Mapping[str, torch.Tensor]) -> None:
    """Broadcasts go on when `send` has returned."""
    sender.send(route, state)
    sender.finish()


def receive_all(receiver: Any, plan: TransferPlan) -> dict[str, torch.Tensor]:
    received: dict[str, torch.Tensor] = {}
    own = [route for route in plan.routes if receiver.group.number in route.receivers]
    for route, following in zip_longest(own, own[1:]):
        received |= receiver.receive(route)
        if following is not None:
            receiver.expect(following)
        receiver.release()
    return received


def assert_equal(received: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> None:
    assert received.keys() == sent.keys() and all(torch.equal(received[name], sent[name]) for name in sent)
