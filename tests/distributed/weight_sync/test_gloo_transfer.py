"""The transfer group itself, its members on threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from roll_lite.distributed.strategy.base import ExportedTensor, ExportPlan
from roll_lite.distributed.weight_sync.gloo import GlooReceiver, GlooSender, open_store
from roll_lite.distributed.weight_sync.plan import TransferPlan, plan_transfers
from roll_lite.distributed.weight_sync.transport import TransferError, TransferTimeout


def make_plan(owners: int, engines: list[int], buckets: int = 6) -> tuple[TransferPlan, dict[str, torch.Tensor]]:
    state = {f"w{n}": torch.randn(50 + n, 3) for n in range(2 * buckets)}
    tensors = [
        ExportedTensor(name, tuple(value.shape), value.dtype, owner=n // 2 % owners, bucket=n // 2)
        for n, (name, value) in enumerate(state.items())
    ]
    return plan_transfers(ExportPlan(tuple(tensors)), engines), state


class Group:
    """All ends of one transfer group."""

    def __init__(self, plan: TransferPlan, timeout_s: float = 10.0, absent: tuple[str, ...] = ()) -> None:
        self.store = open_store("127.0.0.1")
        self.pool = ThreadPoolExecutor(16)
        port, senders = self.store.port, len(plan.senders)
        makers: dict[str, Callable[[], Any]] = {
            f"sender {rank}": lambda rank=rank: GlooSender("127.0.0.1", port, rank, plan.world_size, senders, timeout_s, plan.members())
            for rank in range(senders)
        }
        for engine, workers in enumerate(plan.engine_workers):
            endpoint = plan.endpoint(engine, "gloo", "127.0.0.1", port, timeout_s)
            for worker in range(workers):
                makers[f"engine {engine} worker {worker}"] = lambda endpoint=endpoint, worker=worker: GlooReceiver(endpoint, worker)
        self.joining = {name: self.pool.submit(make) for name, make in makers.items() if name not in absent}

    def ends(self, kind: str) -> list[Any]:
        return [future.result(20) for name, future in self.joining.items() if name.startswith(kind)]


def test_every_engine_worker_gets_every_bucket() -> None:
    """Two trainers that each send half of the buckets, an engine of two workers and one of one; several rounds."""
    plan, state = make_plan(owners=2, engines=[2, 1])
    group = Group(plan)
    senders, receivers = group.ends("sender"), group.ends("engine")

    def receive_all(receiver: GlooReceiver) -> dict[str, torch.Tensor]:
        received = {}
        for transfer in plan.transfers:
            received.update(receiver.receive(transfer.tensors, transfer.sender))
        return received

    def send_own(rank: int) -> None:
        for transfer in plan.transfers:
            if transfer.sender == rank:
                senders[rank].send(transfer.tensors, state)

    rounds = []
    for _ in range(3):
        state = {name: torch.randn_like(value) for name, value in state.items()}
        receiving = [group.pool.submit(receive_all, receiver) for receiver in receivers]
        sending = [group.pool.submit(send_own, rank) for rank in range(2)]
        for future in sending:
            future.result(20)
        rounds.append((state, [future.result(20) for future in receiving]))
    for sent, received in rounds:  # looked at after the last round: nothing overwrote an earlier round's tensors
        for copy in received:
            assert copy.keys() == sent.keys() and all(torch.equal(copy[name], sent[name]) for name in sent)


def test_missing_member_is_named_while_joining() -> None:
    plan, _ = make_plan(owners=1, engines=[1, 2])
    started = time.monotonic()
    group = Group(plan, timeout_s=1.0, absent=("engine 1 worker 1",))
    with pytest.raises(TransferTimeout, match=r"engine 1 worker 1 did not join the transfer group within 1 s \(trainer rank 0 waited\)"):
        group.ends("sender")
    with pytest.raises(TransferTimeout, match=r"engine worker \(transfer rank 3\) did not join"):
        group.ends("engine 0")
    assert time.monotonic() - started < 5.0


def test_no_rendezvous() -> None:
    store = open_store("127.0.0.1")
    port = store.port
    del store
    with pytest.raises(TransferTimeout, match=f"trainer rank 0 found no rendezvous at 127.0.0.1:{port} within 1 s"):
        GlooSender("127.0.0.1", port, 0, 2, 1, 1.0, ["trainer rank 0", "engine 0 worker 0"])


def test_stuck_members_are_named_on_both_sides() -> None:
    plan, state = make_plan(owners=1, engines=[1, 1, 1])
    group = Group(plan, timeout_s=1.0)
    (sender,), receivers = group.ends("sender"), group.ends("engine")
    tensors = plan.transfers[0].tensors
    arrived = group.pool.submit(receivers[1].receive, tensors, 0)
    with pytest.raises(
        TransferTimeout, match=r"engine 0 worker 0, engine 2 worker 0 did not take part in bucket 0 from trainer rank 0 within 1 s"
    ):
        sender.send(tensors, state)
    with pytest.raises(TransferError):
        arrived.result(5)
    with pytest.raises(TransferError, match="connect again, the group failed earlier: .*engine 0 worker 0"):
        sender.send(tensors, state)


def test_ends_out_of_step_exchange_nothing() -> None:
    plan, state = make_plan(owners=1, engines=[1])
    group = Group(plan, timeout_s=5.0)
    (sender,), (receiver,) = group.ends("sender"), group.ends("engine")
    receiving = group.pool.submit(receiver.receive, plan.transfers[1].tensors, 0)
    with pytest.raises(TransferError, match="out of step, trainer rank 0 is at a bucket of 2 tensors, .*, engine 0 worker 0 at one of"):
        sender.send(plan.transfers[0].tensors, state)
    with pytest.raises(TransferError, match="out of step"):
        receiving.result(5)


def test_rendezvous_that_goes_away_is_noticed() -> None:
    plan, state = make_plan(owners=1, engines=[1])
    group = Group(plan, timeout_s=5.0)
    (sender,), (receiver,) = group.ends("sender"), group.ends("engine")
    del group.store
    started = time.monotonic()
    with pytest.raises(TransferError):
        receiver.receive(plan.transfers[0].tensors, 0)
    with pytest.raises(TransferError):
        sender.send(plan.transfers[0].tensors, state)
    assert time.monotonic() - started < 8.0


def test_ports_are_the_systems_choice() -> None:
    stores = [open_store("127.0.0.1") for _ in range(3)]
    assert len({store.port for store in stores}) == 3
