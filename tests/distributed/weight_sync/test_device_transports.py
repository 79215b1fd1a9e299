"""The transports of GPUs, on a CPU: all of them but CUDA's own calls. Exports are a table, and NCCL's place is taken by gloo."""

from __future__ import annotations

from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_members import Members, assert_equal, fresh, make_plan, send_all

from roll_lite.distributed.weight_sync import memory
from roll_lite.distributed.weight_sync.broadcast import BroadcastReceiver, BroadcastSender, Wire, connect_gloo
from roll_lite.distributed.weight_sync.devices import Home
from roll_lite.distributed.weight_sync.fetch import FetchSender
from roll_lite.distributed.weight_sync.group import StaleEpoch, TransferError, interrupt
from roll_lite.distributed.weight_sync.memory import Segment
from roll_lite.distributed.weight_sync.transport import BUCKETS_AHEAD, Transport, flat_layout
from roll_lite.distributed.weight_sync.transports import NEAR_AND_FAR, TRANSPORTS, transport_of

SENDERS_NUMBER, READERS_NUMBER = 0, 3
"""Of one and the same GPU, in lists of devices that differ."""
EXPORTED: dict[int, torch.Tensor] = {}
OPENED: list[int] = []


def rebuild(key: int, *rest: Any) -> torch.Tensor:
    """In place of torch's: the device's number is the seventh argument."""
    assert rest[5] == READERS_NUMBER and len(rest) == 14
    OPENED.append(key)
    return EXPORTED[key][:]


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = count()

    def export(tensor: torch.Tensor) -> Any:
        key = next(keys)
        EXPORTED[key] = tensor.view(tensor.shape)
        return rebuild, (key, *[None] * 5, SENDERS_NUMBER, *[None] * 8)

    EXPORTED.clear()
    OPENED.clear()
    monkeypatch.setattr(memory, "GPU", "cpu")
    monkeypatch.setattr(memory, "export", export)
    monkeypatch.setattr(memory, "uuid_of", lambda number: "GPU-a")
    monkeypatch.setattr(memory, "local_number", {"GPU-a": READERS_NUMBER}.__getitem__)


def on_gpus(*devices: str, visible: str = "abcdef") -> list[Home]:
    return [Home("one machine", f"GPU-{device}", tuple(f"GPU-{one}" for one in visible)) for device in devices]


def test_torchs_exports_have_the_devices_number_where_it_is_replaced() -> None:
    """vLLM's transport replaces the same one."""
    from inspect import signature

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(signature(rebuild_cuda_tensor).parameters)[memory._DEVICE] == "storage_device"


@pytest.mark.usefixtures("exports")
def test_weights_through_exported_memory() -> None:
    plan, state = make_plan(owners=2, engines={0: 2, 1: 1})
    members = Members(plan, transport="cuda_ipc", homes=on_gpus("a", "b", "a", "b", "a"))
    for _ in range(3):
        state = fresh(state)
        for copy in members.update(state).values():
            assert_equal(copy, state)
    assert sorted(OPENED) == sorted(set(OPENED)) == sorted(EXPORTED), "an export has one reader, who opens it once"
    members.close()


@pytest.mark.usefixtures("exports")
def test_exported_memory_is_used_again_when_every_reader_is_done_and_keeps_nothing_of_it() -> None:
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1}, buckets=BUCKETS_AHEAD + 1)
    members = Members(plan, transport="cuda_ipc", homes=on_gpus("a", "a", "a"))
    (sender,), receivers = members.halves("trainer"), members.halves("engine")
    sending = members.pool.submit(send_all, sender, plan, state)
    first = [receiver.receive(plan.routes[0]) for receiver in receivers]
    receivers[0].release()
    with pytest.raises(TimeoutError):
        sending.result(0.3)
    first[0].clear()
    kept = first[1]["w1"]
    first[1].clear()
    receivers[1].release()
    for route in plan.routes[1:]:
        for receiver in receivers:
            receiver.receive(route)
            receiver.release()
    sending.result(10)
    assert len(sender._lanes[plan.routes[0].channel]._segments) == BUCKETS_AHEAD + 1, "one more than without what is kept"
    assert torch.equal(kept, state["w1"])
    members.close()


@pytest.mark.usefixtures("exports")
def test_a_gpu_that_the_reader_does_not_see_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_seen(uuid: str) -> int:
        raise ValueError(f"{uuid} is not in list")

    monkeypatch.setattr(memory, "local_number", not_seen)
    plan, state = make_plan(owners=1, engines={0: 1})
    members = Members(plan, transport="cuda_ipc", homes=on_gpus("a", "a"))
    (sender,), (receiver,) = members.halves("trainer"), members.halves("engine")
    sender.send(plan.routes[0], state)
    with pytest.raises(TransferError, match=r"engine 0 worker 0 cannot open the memory of trainer rank 0: GPU-a is not in list"):
        receiver.receive(plan.routes[0])


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(connect_gloo, Segment, "cpu", polled=True)
    monkeypatch.setitem(TRANSPORTS, "nccl", Transport(partial(BroadcastSender, wire=wire), partial(BroadcastReceiver, wire=wire)))


@pytest.mark.usefixtures("nccl")
def test_engines_leave_and_join_the_broadcasts() -> None:
    plan, state = make_plan(owners=2, engines={0: 1, 1: 1})
    members = Members(plan, transport="nccl", homes=on_gpus(*"abcd"))
    for copy in members.update(state).values():
        assert_equal(copy, state)
    stale = members.halves("engine 1")[0]
    plan, _ = make_plan(owners=2, engines={0: 1, 2: 2})
    again = Members(plan, transport="nccl", homes=on_gpus(*"abcef"), epoch=2, store=members.store)
    state = fresh(state)
    received = again.update(state)
    assert list(received) == ["engine 0 worker 0", "engine 2 worker 0", "engine 2 worker 1"]
    for copy in received.values():
        assert_equal(copy, state)
    with pytest.raises(StaleEpoch):
        stale.receive(plan.routes[0])


@pytest.mark.usefixtures("nccl")
def test_an_owner_sends_while_another_one_has_not_begun() -> None:
    """No lock holds it up, and its next bucket is written while the first travels."""
    plan, state = make_plan(owners=2, engines={0: 1})
    members = Members(plan, transport="nccl", homes=on_gpus(*"abc"))
    (_, second), (receiver,) = members.halves("trainer"), members.halves("engine")
    mine = [route for route in plan.routes if route.sender == 1]
    for route in mine[:BUCKETS_AHEAD]:
        second.send(route, state)  # waits for nobody
    third = members.pool.submit(second.send, mine[BUCKETS_AHEAD], state)
    with pytest.raises(TimeoutError):
        third.result(0.3)
    assert_equal(receiver.receive(mine[0]), {tensor.name: state[tensor.name] for tensor in mine[0].tensors})
    third.result(10)
    for route in mine[1:]:
        receiver.receive(route)
    second.finish()
    members.close()


class Lonely:
    """A process group whose broadcasts are queued and never end: the others are lost."""

    def __init__(self) -> None:
        self.aborted = False

    def broadcast(self, *_: Any) -> Any:
        return SimpleNamespace(is_completed=lambda: False)

    def abort(self) -> None:
        self.aborted = True


def test_a_broadcast_that_somebody_is_lost_in_ends_with_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL says nothing of it: whoever is left would wait until the time is up."""
    left = Lonely()
    wire = Wire(lambda *_: left, Segment, "cpu", polled=True)
    monkeypatch.setitem(TRANSPORTS, "nccl", Transport(partial(BroadcastSender, wire=wire), partial(BroadcastReceiver, wire=wire)))
    plan, state = make_plan(owners=1, engines={0: 1})
    members = Members(plan, transport="nccl", homes=on_gpus("a", "b"), timeout_s=30)
    (sender,), (receiver,) = members.halves("trainer"), members.halves("engine")
    route = plan.routes[0]
    sender.send(route, state)
    receiver.group.meet(route, flat_layout(route.tensors).announcement())  # it comes, and is lost before it takes its part
    finishing = members.pool.submit(sender.finish)
    with pytest.raises(TimeoutError):
        finishing.result(0.3)
    interrupt("127.0.0.1", members.store.port, 2)
    with pytest.raises(StaleEpoch):
        finishing.result(10)
    assert left.aborted
    members.close()


ONE, OTHER = Home("one"), Home("other")


@pytest.mark.parametrize(
    ("homes", "chosen"),
    [
        (on_gpus("a", "b", "a", "b"), "cuda_ipc"),
        (on_gpus("a", "b", "c", "d", visible="abcd"), "cuda_ipc"),
        ([*on_gpus("a", visible="a"), *on_gpus("b", visible="b"), *on_gpus("c", "d", visible="cd")], "nccl"),
        ([*on_gpus("a", visible="a"), *on_gpus("b", visible="b"), *on_gpus("a", "b", visible="ab")], "cuda_ipc"),
        ([*on_gpus("a", visible="a"), *on_gpus("b", visible="b"), *on_gpus("a", visible="a"), *on_gpus("b", visible="b")], "shared_memory"),
        ([*on_gpus("a", "b"), ONE, ONE], None),
        ([ONE, ONE, ONE, ONE], "shared_memory"),
        ([ONE, ONE, ONE, OTHER], None),
        ([*on_gpus("a", "b", visible="ab"), *(Home("other", f"GPU-{one}", ("GPU-c", "GPU-d")) for one in "cd")], "nccl"),
    ],
)  # fmt: skip
def test_auto_takes_what_connects_all(homes: list[Home], chosen: str | None) -> None:
    plan, _ = make_plan(owners=2, engines={0: 2})
    halves = Joined(plan.membership(1, "auto", "", 0, 1.0), homes)
    assert transport_of(halves) is (NEAR_AND_FAR if chosen is None else TRANSPORTS[chosen])  # type: ignore[arg-type]


class Joined:
    """A group, once all have come."""

    def __init__(self, membership: Any, homes: list[Home]) -> None:
        self.membership, self.homes = membership, homes


@pytest.mark.parametrize(
    ("name", "homes", "message"),
    [
        ("cuda_ipc", [ONE, ONE], "trainer rank 0, engine 0 worker 0 computes on the CPU; auto finds a way"),
        ("cuda_ipc", on_gpus("a", "b")[:1] + on_gpus("b", visible="b"), "engine 0 worker 0 does not see the GPU of trainer rank 0"),
        ("nccl", on_gpus("a", "a"), "trainer rank 0 and engine 0 worker 0 share a GPU, which NCCL refuses"),
        ("shared_memory", [ONE, OTHER], "engine 0 worker 0 cannot map the memory of trainer rank 0"),
    ],
)
def test_what_cannot_work_says_why(name: str, homes: list[Home], message: str) -> None:
    plan, _ = make_plan(owners=1, engines={0: 1})
    with pytest.raises(TransferError, match=f"weight_sync.transport: {name}, but {message}"):
        transport_of(Joined(plan.membership(1, name, "", 0, 1.0), homes))  # type: ignore[arg-type]


def test_one_half_serves_both_kinds_of_memory() -> None:
    assert {TRANSPORTS[name].sender.func for name in ("shared_memory", "cuda_ipc")} == {FetchSender}  # type: ignore[attr-defined]
