"""What a transport may be: buckets of several owners and for some of the engines only, and halves that do not meet.

The second transport here, over shared memory, is double-buffered: its sender fills one buffer while receivers still read the other, and
uses a buffer again only when every one of them has said that it is done. CUDA IPC has the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from transfer_members import Members, assert_equal, fresh, make_plan

from roll_lite.distributed.weight_sync.endpoints import TRANSPORTS
from roll_lite.distributed.weight_sync.group import Announcement
from roll_lite.distributed.weight_sync.plan import ExportedTensor, Route, TransferPlan
from roll_lite.distributed.weight_sync.transport import Transport, TransportReceiver, TransportSender, flat_layout, flatten, unflatten

BUFFERS = 2


class SharedSender(TransportSender):
    def __init__(self, group: object) -> None:
        super().__init__(group)  # type: ignore[arg-type]
        self.buffers: dict[int, SharedMemory] = {}
        self.sent: dict[Route, int] = {}

    def send(self, route: Route, tensors: Mapping[str, torch.Tensor]) -> None:
        layout = flat_layout(route.tensors)
        step = self.group.step(route)
        if step >= BUFFERS:
            self.group.hear(route, step - BUFFERS, "done")
        slot = step % BUFFERS
        if slot in self.buffers:
            self._free(slot)
        memory = self.buffers[slot] = SharedMemory(create=True, size=layout.nbytes)
        memory.buf[: layout.nbytes] = bytes(flatten(route.tensors, tensors, layout).numpy())
        self.group.tell(route, step, "here", layout.announcement(memory.name))
        self.last = route, step

    def finish(self) -> None:
        route, step = self.last
        for one in range(max(0, step - BUFFERS + 1), step + 1):
            self.group.hear(route, one, "done")

    def _free(self, slot: int) -> None:
        memory = self.buffers.pop(slot)
        memory.close()
        memory.unlink()

    def close(self) -> None:
        super().close()
        for slot in list(self.buffers):
            self._free(slot)


class SharedReceiver(TransportReceiver):
    gate: threading.Event
    """While it is not set, buckets are being read."""

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        layout = flat_layout(route.tensors)
        step = self.group.step(route)
        heard = self.group.hear(route, step, "here")
        self.group.compare(layout.announcement(), heard)
        memory = SharedMemory(heard[route.sender].handle)
        buffer = torch.frombuffer(bytearray(memory.buf[: layout.nbytes]), dtype=torch.uint8)
        memory.close()
        self.gate.wait(10)
        self.group.tell(route, step, "done", layout.announcement())
        return unflatten(buffer, route.tensors, layout)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setitem(TRANSPORTS, "shared", Transport(SharedSender, SharedReceiver))
    SharedReceiver.gate = threading.Event()
    SharedReceiver.gate.set()
    yield SharedReceiver.gate
    SharedReceiver.gate.set()


def test_a_transport_whose_receivers_fetch(shared: threading.Event) -> None:
    plan, state = make_plan(owners=1, engines={0: 2, 1: 1}, buckets=5)
    members = Members(plan, transport="shared")
    try:
        for _ in range(3):
            state = fresh(state)
            for copy in members.update(state).values():
                assert_equal(copy, state)
    finally:
        members.close()


def test_a_buffer_is_used_again_only_when_every_receiver_is_done(shared: threading.Event) -> None:
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1}, buckets=4)
    members = Members(plan, transport="shared")
    (sender,), receivers = members.halves("trainer"), members.halves("engine")
    shared.clear()
    reading = [members.pool.submit(receiver.receive, plan.routes[0]) for receiver in receivers]
    for route in plan.routes[:BUFFERS]:
        sender.send(route, state)  # waits for nobody
    third = members.pool.submit(sender.send, plan.routes[2], state)
    with pytest.raises(TimeoutError):
        third.result(0.3)
    shared.set()
    third.result(10)
    for future in reading:
        assert torch.equal(future.result(10)["w0"], state["w0"])
    members.close()


def test_a_bucket_of_two_owners_arrives_from_both() -> None:
    state = {"a": torch.randn(3), "b": torch.randn(4)}
    tensors = tuple(ExportedTensor(name, tuple(value.shape), value.dtype, owner, 0) for owner, (name, value) in enumerate(state.items()))
    routes = tuple(Route(0, number, (2, 3), (tensor,)) for number, tensor in enumerate(tensors))
    received = Members(TransferPlan(routes, (0, 1), {0: 1, 1: 1})).update(state)
    for copy in received.values():
        assert_equal(copy, state)


def test_each_of_two_copies_of_a_bucket_serves_an_engine_of_its_own() -> None:
    """As where every trainer sends to the engine that shares its devices."""
    state = {"a": torch.randn(3)}
    tensor = ExportedTensor("a", (3,), torch.float32, 0, 0)
    routes = (Route(0, 0, (2,), (tensor,)), Route(0, 1, (3,), (tensor,)))
    members = Members(TransferPlan(routes, (0, 4), {0: 1, 1: 1}))
    received = members.update(state)
    assert members.membership.channels == ((0, (2,)), (1, (3,)))
    assert_equal(received["engine 0 worker 0"], state)
    assert_equal(received["engine 1 worker 0"], state)


def test_what_is_announced_names_size_and_place() -> None:
    layout = flat_layout((ExportedTensor("a", (3,), torch.float32, 0, 0),))
    assert layout.announcement("here") == Announcement(layout.signature, 64, "here")
