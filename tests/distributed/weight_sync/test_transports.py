"""What a transport may be: buckets of several owners and for some of the engines only, memory that receivers read, and which one it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from transfer_members import Members, assert_equal, fresh, make_plan, send_all

from roll_lite.config.schema.run import WeightSyncConfig
from roll_lite.distributed.weight_sync.broadcast import GlooReceiver, GlooSender
from roll_lite.distributed.weight_sync.endpoints import AUTO, TRANSPORTS
from roll_lite.distributed.weight_sync.group import TransferError, TransferTimeout
from roll_lite.distributed.weight_sync.plan import ExportedTensor, Route, TransferPlan
from roll_lite.distributed.weight_sync.transport import BUCKETS_AHEAD, FetchReceiver, FetchSender, flat_layout


def segments(sender: FetchSender) -> int:
    return sum(len(buffers.segments) for buffers in sender._buffers.values())


def test_segments_are_used_again() -> None:
    plan, state = make_plan(owners=2, engines={0: 2, 1: 1})
    members = Members(plan, transport="shared_memory")
    senders, receivers = members.halves("trainer"), members.halves("engine")

    def take_all(receiver: FetchReceiver) -> None:
        for route in plan.routes:
            assert_equal(receiver.receive(route), {tensor.name: state[tensor.name] for tensor in route.tensors})
            receiver.release()

    for _ in range(3):
        state = fresh(state)
        both = [members.pool.submit(send_all, sender, plan, state) for sender in senders]
        both += [members.pool.submit(take_all, receiver) for receiver in receivers]
        for future in both:
            future.result(20)
    assert [segments(sender) for sender in senders] == [BUCKETS_AHEAD] * 2
    members.close()


def test_what_a_receiver_keeps_stays_as_it_is() -> None:
    """An engine holds on to parts of a layer until all of it has come; other tensors of the bucket are gone."""
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1})
    members = Members(plan, transport="shared_memory")
    kept: list[tuple[Mapping[str, torch.Tensor], torch.Tensor]] = []
    for _ in range(4):
        state = fresh(state)
        received = members.update(state)
        kept.append((state, received["engine 1 worker 0"]["w3"]))
        del received
    for sent, tensor in kept:
        assert torch.equal(tensor, sent["w3"])
    members.close()
    for sent, tensor in kept:
        assert torch.equal(tensor, sent["w3"]), "also when the group is gone"


def test_a_segment_is_used_again_only_when_every_receiver_is_done() -> None:
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1}, buckets=BUCKETS_AHEAD + 2)
    members = Members(plan, transport="shared_memory")
    (sender,), receivers = members.halves("trainer"), members.halves("engine")
    for route in plan.routes[:BUCKETS_AHEAD]:
        sender.send(route, state)  # waits for nobody
    third = members.pool.submit(sender.send, plan.routes[BUCKETS_AHEAD], state)
    for receiver in receivers:
        assert torch.equal(receiver.receive(plan.routes[0])["w0"], state["w0"])
    receivers[0].release()
    with pytest.raises(TimeoutError):
        third.result(0.3)
    receivers[1].release()
    third.result(10)
    assert segments(sender) == BUCKETS_AHEAD
    members.close()


def test_those_who_do_not_come_are_named() -> None:
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1})
    members = Members(plan, transport="shared_memory", timeout_s=1.0)
    (sender,), receivers = members.halves("trainer"), members.halves("engine")
    for route in plan.routes[:BUCKETS_AHEAD]:
        sender.send(route, state)
        receivers[1].receive(route)
    receivers[1].release()
    with pytest.raises(TransferTimeout, match="engine 0 worker 0 did not take part in bucket 0 from trainer rank 0 within 1 s"):
        sender.send(plan.routes[BUCKETS_AHEAD], state)
    with pytest.raises(TransferError, match="connect again, the group failed earlier: .*engine 0 worker 0"):
        sender.finish()
    with pytest.raises(TransferTimeout, match="trainer rank 0 did not take part in bucket 2 from trainer rank 0 within 1 s"):
        receivers[1].receive(plan.routes[BUCKETS_AHEAD])


def test_memory_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, state = make_plan(owners=1, engines={0: 1})
    members = Members(plan, transport="shared_memory")
    (sender,), (receiver,) = members.halves("trainer"), members.halves("engine")
    sender.send(plan.routes[0], state)
    sender.close()
    with pytest.raises(TransferError, match=r"engine 0 worker 0 cannot open the memory of trainer rank 0: .*weight_sync\.transport: gloo"):
        receiver.receive(plan.routes[0])


def test_the_configuration_knows_all_of_them() -> None:
    assert set(get_args(WeightSyncConfig.model_fields["transport"].annotation)) == {AUTO, *TRANSPORTS}


def chosen_by_auto() -> list[type]:
    """Halves that an update has made."""
    plan, state = make_plan(owners=1, engines={0: 1})
    members = Members(plan, transport="auto")
    members.update(state)
    return [type(one) for both in members.halves() for one in both._transports.values()]


def test_auto_is_shared_memory_on_one_machine() -> None:
    assert chosen_by_auto() == [FetchSender, FetchReceiver]


def test_auto_is_gloo_between_machines(machines: None) -> None:
    assert chosen_by_auto() == [GlooSender, GlooReceiver]


def test_shared_memory_between_machines_is_refused(machines: None) -> None:
    plan, _ = make_plan(owners=1, engines={0: 1})
    with pytest.raises(TransferError, match="transport: shared_memory, but .* cannot map the memory of trainer rank 0: .* auto finds"):
        Members(plan, transport="shared_memory").halves()


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


def test_a_signature_names_the_size() -> None:
    assert flat_layout((ExportedTensor("a", (3,), torch.float32, 0, 0),)).signature.startswith("1 tensors, 64 bytes, ")
