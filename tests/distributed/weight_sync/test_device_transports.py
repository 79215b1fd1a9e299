"""The transports of GPUs, on a CPU: all of them but CUDA's own calls. Exports are a table, and NCCL's place is taken by gloo."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from transfer_members import Members, assert_equal, fresh, half, make_plan, receive_all, send_all

from roll_lite.distributed.strategy.base import TrainStrategy
from roll_lite.distributed.weight_sync import memory, transport
from roll_lite.distributed.weight_sync.broadcast import BroadcastReceiver, BroadcastSender, Wire, connect_gloo, connect_nccl
from roll_lite.distributed.weight_sync.endpoints import SIDE_BY_SIDE, TRANSPORTS, WeightSender, link, split_by_transport, transport_of
from roll_lite.distributed.weight_sync.group import (
    Announcement,
    Home,
    StaleEpoch,
    TransferError,
    TransferGroup,
    TransferTimeout,
    interrupt,
    rendezvous_client,
)
from roll_lite.distributed.weight_sync.memory import BucketSegment
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, plan_transfers
from roll_lite.distributed.weight_sync.transport import BUCKETS_AHEAD, FetchSender, Transport, flat_layout

SENDERS_NUMBER, READERS_NUMBER = 0, 3
"""Of one and the same GPU, in lists of devices that differ."""
EXPORTED: dict[int, torch.Tensor] = {}
OPENED: list[int] = []


class Storage:
    """In place of torch's: counters of exports that nobody reads any more."""

    down: ClassVar[list[tuple[str, int, int]]] = []

    @classmethod
    def _release_ipc_counter(cls, file: str, place: int, device: int) -> None:
        cls.down.append((file, place, device))


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
        memory = (ctypes.c_uint8 * len(tensor)).from_address(tensor.data_ptr())  # a storage of its own, as in another process
        EXPORTED[key] = torch.frombuffer(memory, dtype=torch.uint8)
        return rebuild, (key, *[None] * 3, Storage, None, SENDERS_NUMBER, *[None] * 4, "counters", key, *[None] * 2)

    for one in (EXPORTED, OPENED, Storage.down):
        one.clear()
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

    names = list(signature(rebuild_cuda_tensor).parameters)
    assert (names[memory._STORAGE], names[memory._DEVICE]) == ("storage_cls", "storage_device")
    assert names[memory._COUNTER] == ["ref_counter_handle", "ref_counter_offset"]
    released = signature(torch.TypedStorage._release_ipc_counter).parameters
    assert [str(one) for one in released.values()] == ["*args", "device=None", "**kwargs"]


@pytest.mark.usefixtures("exports")
def test_exported_memory_lies_in_no_expandable_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes these settings on a CPU too. All others stand while memory is allocated, and afterwards."""
    before = torch._C._accelerator_getAllocatorSettings()
    settings = "expandable_segments:True,max_split_size_mb:64"
    found = []
    monkeypatch.setattr(memory.Watched, "__init__", lambda *_: found.append(torch._C._accelerator_getAllocatorSettings()))
    try:
        torch._C._accelerator_setAllocatorSettings(settings)
        memory.GpuSegment(8, 1)
        with pytest.raises(AttributeError):  # nothing is there to be exported
            memory.ExportedSegment(8, 1)
        assert found == [settings, "expandable_segments:False,max_split_size_mb:64"]
        assert torch._C._accelerator_getAllocatorSettings() == settings
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


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
def test_others_hear_of_memory_only_once_the_device_is_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU needs no wait, and without one a GPU would send half a bucket: the order is recorded, thread by thread."""
    told: dict[int, list[str]] = defaultdict(list)

    def recorded(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            told[threading.get_ident()].append(arguments[3] if name == "announce" else name)
            return function(*arguments)

        return call

    monkeypatch.setattr(transport, "flatten", recorded("write", transport.flatten))
    monkeypatch.setattr(transport, "wait_for_device", recorded("wait", transport.wait_for_device))
    monkeypatch.setattr(TransferGroup, "announce", recorded("announce", TransferGroup.announce))
    plan, state = make_plan(owners=1, engines={0: 1}, buckets=3)
    members = Members(plan, transport="cuda_ipc", homes=on_gpus("a", "a"))
    (sender,), (receiver,) = members.halves("trainer"), members.halves("engine")
    sending = members.pool.submit(send_all, sender, plan, state)
    for route in plan.routes:
        receiver.receive(route)
        receiver.release()
    sending.result(10)
    received = told.pop(threading.get_ident())
    (sent,) = told.values()
    assert sent == ["write", "wait", "here"] * 3
    assert [one for one, after in pairwise([*received, ""]) if after == "done"] == ["wait"] * 3
    members.close()


@pytest.mark.usefixtures("exports")
def test_buffers_on_a_gpu_are_two_however_much_buckets_differ_in_size() -> None:
    """Here every one is larger than those before it; a tensor that is alone in its bucket may be of any size."""
    plan, state = make_plan(owners=1, engines={0: 1}, buckets=6)
    members = Members(plan, transport="cuda_ipc", homes=on_gpus("a", "a"))
    (sender,), (receiver,) = members.halves("trainer"), members.halves("engine")
    sending = members.pool.submit(send_all, sender, plan, state)
    for route in plan.routes:
        assert_equal(receiver.receive(route), {tensor.name: state[tensor.name] for tensor in route.tensors})
        receiver.release()
    sending.result(10)
    (buffers,) = sender._buffers.values()
    assert [len(segment.whole) for segment in buffers.segments] == [flat_layout(plan.routes[-1].tensors).nbytes] * BUCKETS_AHEAD
    alone = replace(plan.routes[0], tensors=plan.routes[0].tensors[:1])
    assert replace(plan, routes=(alone,)).membership(1, "auto", "", 0, 1.0).bucket_nbytes == 0
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
    assert len(sender._buffers[plan.routes[0].channel].segments) == BUCKETS_AHEAD + 1, "one more than without what is kept"
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


class Trainer:
    """One rank, whose model is a dictionary."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        tensors = [ExportedTensor(n, tuple(t.shape), t.dtype, 0, number // 2) for number, (n, t) in enumerate(self.state.items())]
        return ExportPlan(tuple(tensors))

    def export_bucket(self, tensors: Sequence[ExportedTensor]) -> dict[str, torch.Tensor]:
        return {tensor.name: self.state[tensor.name] for tensor in tensors}


@pytest.mark.usefixtures("exports")
def test_what_was_exported_to_readers_who_have_died_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch kept it to the end of the run: two buckets of GPU memory for every engine that is lost."""
    collected: list[None] = []
    (home,) = on_gpus("a")
    monkeypatch.setattr(memory, "collect", lambda: collected.append(None))
    monkeypatch.setattr(Home, "here", staticmethod(lambda: home))
    sender = WeightSender(cast(TrainStrategy, Trainer({f"w{n}": torch.randn(9) for n in range(6)})), 0)
    export, port = sender.export_plan(1 << 20), sender.host("127.0.0.1", 30.0)
    pool = ThreadPoolExecutor(4)

    def epoch(number: int, processes: dict[int, int], timeout_s: float = 30.0, absent: tuple[int, ...] = ()) -> None:
        plan = plan_transfers(export, dict.fromkeys(processes, 1))
        membership = plan.membership(number, "cuda_ipc", "127.0.0.1", port, timeout_s)
        joining = [
            pool.submit(half, membership, plan.first_member(engine), False, replace(home, process=process))
            for engine, process in processes.items()
            if engine not in absent
        ]
        sender.connect(plan, membership)
        receivers = [future.result(20) for future in joining]
        receiving = [pool.submit(receive_all, receiver, plan) for receiver in receivers]
        sender.send()
        for future in receiving:
            assert_equal(future.result(20), sender._strategy.state)  # type: ignore[attr-defined]

    epoch(1, {0: 10, 1: 11, 2: 12})
    epoch(2, {0: 10, 1: 11, 2: 12})
    assert Storage.down == [] == collected, "who is still there gives back its own"
    buffers = len(EXPORTED) // 6
    with pytest.raises(TransferTimeout, match="engine 2 worker 0 did not join"):
        epoch(3, {0: 10, 2: 12}, timeout_s=1.0, absent=(2,))
    assert Storage.down == [], "nobody knows yet who is left"
    epoch(4, {0: 10, 2: 22})  # engine 1 has left, and engine 2 was started anew
    exported = range(len(EXPORTED))[3 * buffers : 6 * buffers]
    assert sorted(Storage.down) == [("counters", key, SENDERS_NUMBER) for key in exported if key % 3 in (1, 2)]
    assert len(collected) == 1
    epoch(5, {0: 10, 2: 22})
    assert len(collected) == 1, "no export is taken back twice"


@pytest.mark.usefixtures("exports")
def test_what_a_reader_had_not_come_to_when_an_update_broke_off_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    (home,) = on_gpus("a")
    monkeypatch.setattr(memory, "collect", lambda: None)
    monkeypatch.setattr(Home, "here", staticmethod(lambda: home))
    sender = WeightSender(cast(TrainStrategy, Trainer({f"w{n}": torch.randn(9) for n in range(6)})), 0)
    export, port = sender.export_plan(1 << 20), sender.host("127.0.0.1", 30.0)
    pool = ThreadPoolExecutor(4)

    def join(epoch: int, processes: dict[int, int]) -> list[Any]:
        plan = plan_transfers(export, dict.fromkeys(processes, 1))
        membership = plan.membership(epoch, "cuda_ipc", "127.0.0.1", port, 3.0)
        joining = [
            pool.submit(half, membership, plan.first_member(engine), False, replace(home, process=process))
            for engine, process in processes.items()
        ]
        sender.connect(plan, membership)
        routes.extend(plan.routes[:1])
        return [future.result(20) for future in joining]

    routes: list[Any] = []
    stays, _dies = join(1, {0: 10, 1: 11})
    sending = pool.submit(sender.send)
    stays.receive(routes[0])
    stays.release()
    with pytest.raises(TransferError, match="engine 1 worker 0"):
        sending.result(20)
    stays.close()
    assert OPENED == [0] and len(EXPORTED) == 2 * BUCKETS_AHEAD, "two readers"
    join(2, {0: 10})
    assert sorted(key for _, key, _ in Storage.down) == [1, 2, 3], "all but what its reader has opened and gives back itself"


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(connect_gloo, BucketSegment, "cpu", polled=True)
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
    """A process group whose broadcasts are queued and never end, or whose communicator is never made: the others are lost."""

    def __init__(self, made: bool) -> None:
        self.made = made
        self.aborted = threading.Event()

    def broadcast(self, *_: Any) -> Any:
        if not self.made:
            self.aborted.wait(60)
        return SimpleNamespace(is_completed=lambda: False)

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("made", [True, False], ids=["a broadcast", "a communicator that is made"])
def test_what_somebody_is_lost_in_ends_with_the_epoch(made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL says nothing of it: whoever is left would wait until the time is up."""
    left = Lonely(made)
    wire = Wire(lambda *_: left, BucketSegment, "cpu", polled=True)
    monkeypatch.setitem(TRANSPORTS, "nccl", Transport(partial(BroadcastSender, wire=wire), partial(BroadcastReceiver, wire=wire)))
    plan, state = make_plan(owners=1, engines={0: 1})
    members = Members(plan, transport="nccl", homes=on_gpus("a", "b"), timeout_s=30)
    (sender,), (receiver,) = members.halves("trainer"), members.halves("engine")
    route = plan.routes[0]
    sender.send(route, state)
    receiver.group.meet(route, Announcement(flat_layout(route.tensors).signature))  # it comes, and is lost before it takes its part
    finishing = members.pool.submit(sender.finish)
    with pytest.raises(TimeoutError):
        finishing.result(0.3)
    interrupt(rendezvous_client("127.0.0.1", members.store.port), 2)
    with pytest.raises(StaleEpoch):
        finishing.result(10)
    assert left.aborted.is_set()
    members.close()


FAR = [Home("other", f"GPU-{one}", ("GPU-c", "GPU-d")) for one in "cd"]


@pytest.mark.usefixtures("exports", "nccl")
def test_engines_beside_the_trainer_and_apart_from_it_in_one_update(sent: Counter[int]) -> None:
    """As in a mixed placement: a bucket is gathered once, and goes to some by exports and to others by broadcast."""
    plan, state = make_plan(owners=2, engines={0: 1, 1: 1, 2: 2})
    members = Members(plan, transport="auto", homes=[*on_gpus("a", "b", "a", "b", visible="ab"), *FAR])
    for _ in range(3):
        received, state = {}, fresh(state)  # what was received is kept by nobody
        received = members.update(state)
        assert len(received) == 4
        for copy in received.values():
            assert_equal(copy, state)
    assert sent.total() == 3 * 2 * sum(flat_layout(route.tensors).nbytes for route in plan.routes)
    assert len(OPENED) == len(set(OPENED)) == len(EXPORTED), "an export has one reader, who opens it once"
    members.close()


@pytest.mark.usefixtures("exports", "nccl")
def test_a_bucket_waits_for_the_slowest_of_its_transports() -> None:
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1}, buckets=BUCKETS_AHEAD + 1)
    members = Members(plan, transport="auto", homes=[*on_gpus("a", "a", visible="a"), FAR[0]])
    (sender,), (near, far) = members.halves("trainer"), members.halves("engine")
    sending = members.pool.submit(send_all, sender, plan, state)
    assert_equal(receive_all(far, replace(plan, routes=plan.routes[:BUCKETS_AHEAD])), {f"w{n}": state[f"w{n}"] for n in range(4)})
    with pytest.raises(TimeoutError):
        sending.result(0.3)
    assert_equal(receive_all(near, plan), state)
    with pytest.raises(TimeoutError):
        sending.result(0.3)
    receive_all(far, replace(plan, routes=plan.routes[BUCKETS_AHEAD:]))
    sending.result(10)
    members.close()


@pytest.mark.usefixtures("nccl")
def test_nccl_has_a_group_for_each_of_the_engines_that_share_a_gpu() -> None:
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1, 2: 1})
    members = Members(plan, transport="auto", homes=[*on_gpus("a"), FAR[0], FAR[1], FAR[0]])
    for copy in members.update(state).values():
        assert_equal(copy, state)
    (sender,) = members.halves("trainer")
    assert set(sender._transports["nccl"].broadcasts._groups) == {(0, (1, 2)), (0, (3,))}
    members.close()


def test_where_a_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may open what it sees and what its own GPU reads from."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: {(1, 0): False, (1, 2): True}[own, other])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"GPU-{number}"))
    here = Home.here()
    assert (here.device, here.visible, here.process) == ("GPU-1", ("GPU-1", "GPU-2"), os.getpid())


ONE, OTHER = Home("one"), Home("other")
MIXED = None


@pytest.mark.parametrize(
    ("homes", "chosen"),
    [
        (on_gpus("a", "b", "a", "b"), "cuda_ipc"),
        (on_gpus("a", "b", "c", "d", visible="abcd"), "cuda_ipc"),
        ([*on_gpus("a", visible="a"), *on_gpus("b", visible="b"), *on_gpus("c", "d", visible="cd")], "nccl"),
        ([*on_gpus("a", visible="a"), *on_gpus("b", visible="b"), *on_gpus("a", "b", visible="ab")], "cuda_ipc"),
        ([*on_gpus("a", "b"), *FAR], "nccl"),
        ([*on_gpus("a", "b"), Home("one machine"), Home("one machine")], "shared_memory"),
        ([*on_gpus("a", "b"), OTHER, OTHER], "gloo"),
        ([ONE, ONE, ONE, ONE], "shared_memory"),
        ([ONE, OTHER, OTHER, ONE], MIXED),
        ([*on_gpus("a", "b"), *on_gpus("a"), FAR[1]], MIXED),
        ([*on_gpus("a", visible="a"), *on_gpus("b", visible="b"), *on_gpus("a", visible="a"), *on_gpus("b", visible="b")], "cuda_ipc"),
        ([*on_gpus("a", visible="a"), *on_gpus("b", visible="b"), *on_gpus("a", visible="a"), *on_gpus("c", visible="c")], MIXED),
    ],
)  # fmt: skip
def test_auto_takes_what_connects_each(homes: list[Home], chosen: str | None) -> None:
    plan, _ = make_plan(owners=2, engines={0: 2})
    group: Any = Joined(plan.membership(1, "auto", "", 0, 1.0), homes)
    ways = [split_by_transport(group, route) for route in plan.routes]
    names = {name for parts in ways for name, _ in parts}
    assert transport_of(group) is SIDE_BY_SIDE and (names == {chosen} if chosen is not MIXED else len(names) == 2)


def read_from(homes: list[Home], ranks: int, workers: int) -> list[str]:
    """Whose memory each engine worker opens, or from whom it gets a copy, where the first rank gathers everything."""
    export = ExportPlan((ExportedTensor("w", (3,), torch.float32, 0, 0),), tuple(range(ranks)))
    plan = plan_transfers(export, dict.fromkeys(range(workers), 1))
    group: Any = Joined(plan.membership(1, "auto", "", 0, 1.0), homes)
    sent = {one: (name, part.sender) for name, part in split_by_transport(group, plan.routes[0]) for one in part.receivers}
    assert plan.routes[0].sender == 0 and sorted(sent) == list(plan.routes[0].receivers), "each has one sender"
    return [f"{name} {sender}" for _, (name, sender) in sorted(sent.items())]


def test_engines_on_the_trainers_gpus_read_from_the_rank_on_their_own() -> None:
    """Also two engines of one GPU, on a second node, and those that see neighbours too; nobody is in an NCCL group with the trainer."""
    alone = [home for device in "abcd" for home in on_gpus(device, visible=device)]
    assert read_from(alone * 2, 4, 4) == [f"cuda_ipc {rank}" for rank in range(4)]
    assert read_from([*alone, *alone, *alone], 4, 8) == [f"cuda_ipc {rank}" for rank in range(4)] * 2
    elsewhere = [replace(home, machine="other") for home in alone]
    assert read_from([*alone, *elsewhere] * 2, 8, 8) == [f"cuda_ipc {rank}" for rank in range(8)]
    assert read_from([*on_gpus("a", "b"), *on_gpus("b", "a")], 2, 2) == ["cuda_ipc 1", "cuda_ipc 0"]


def test_engines_apart_read_in_turn_from_gpus_that_they_see_and_get_copies_from_the_owner_otherwise() -> None:
    trainers = on_gpus("a", "b", visible="ab")
    assert read_from([*trainers, *on_gpus("c", "d", "e", "f")], 2, 4) == ["cuda_ipc 0", "cuda_ipc 1"] * 2, "two contexts on each GPU"
    assert read_from([*trainers, *on_gpus("c", "d", visible="cd")], 2, 2) == ["nccl 0"] * 2
    assert read_from([*trainers, *FAR], 2, 2) == ["nccl 0"] * 2
    assert read_from([*trainers, ONE, OTHER], 2, 2) == ["gloo 0"] * 2
    assert read_from([*trainers, Home("one machine"), *on_gpus("b", visible="b")], 2, 2) == ["shared_memory 0", "cuda_ipc 1"]


@pytest.mark.parametrize(
    ("sender", "receiver", "chosen"),
    [
        (on_gpus("a", visible="a")[0], on_gpus("a", visible="a")[0], "cuda_ipc"),
        (on_gpus("a", visible="a")[0], on_gpus("b", visible="ab")[0], "cuda_ipc"),
        (on_gpus("a", visible="ab")[0], on_gpus("b", visible="b")[0], "nccl"),
        (on_gpus("a")[0], FAR[0], "nccl"),
        (on_gpus("a")[0], Home("other", "GPU-a", ("GPU-a",)), "gloo"),
        (on_gpus("a", visible="a")[0], Home("one machine", "GPU-a"), "shared_memory"),
        (on_gpus("a")[0], ONE, "gloo"),
        (ONE, replace(ONE, process=2), "shared_memory"),
        (ONE, OTHER, "gloo"),
    ],
)
def test_what_connects_two(sender: Home, receiver: Home, chosen: str) -> None:
    assert link(sender, receiver) == chosen


class Joined(TransferGroup):
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


@pytest.mark.parametrize("given", [None, "0"])
def test_no_thread_of_torchs_ends_the_process_when_a_member_of_an_nccl_group_is_gone(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """torch starts its watchdog unless the variable is set; groups of the trainer and the engine keep theirs."""
    if given is None:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", given)

    class ProcessGroupNCCL:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.made = (rank, size, os.environ["TORCH_NCCL_BLOCKING_WAIT"])

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = SimpleNamespace(store=store, membership=SimpleNamespace(timeout_s=3.0))
    assert connect_nccl(cast(Any, group), "prefix", 1, 2).made == (1, 2, "1")
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == given
