"""The gloo transport: what arrives, and who is blamed for what does not."""

from __future__ import annotations

import time

import pytest
from transfer_members import Members, assert_equal, deliver, fresh, half, make_plan

from roll_lite.distributed.weight_sync import group
from roll_lite.distributed.weight_sync.group import (
    Announcement,
    StaleEpoch,
    TransferError,
    TransferTimeout,
    interrupt,
    rendezvous_client,
    rendezvous_store,
)
from roll_lite.distributed.weight_sync.transport import flat_layout


def test_every_engine_worker_gets_every_bucket() -> None:
    """Two trainers that each send half of the buckets, an engine of two workers and one of one; several rounds."""
    plan, state = make_plan(owners=2, engines={0: 2, 1: 1})
    members = Members(plan)
    rounds = []
    for _ in range(3):
        state = fresh(state)
        rounds.append((state, members.update(state)))
    for sent, received in rounds:  # looked at after the last round: nothing overwrote an earlier round's tensors
        assert list(received) == ["engine 0 worker 0", "engine 0 worker 1", "engine 1 worker 0"]
        for copy in received.values():
            assert_equal(copy, sent)


def test_missing_member_is_named_while_joining() -> None:
    plan, _ = make_plan(owners=1, engines={0: 1, 1: 2})
    started = time.monotonic()
    members = Members(plan, timeout_s=1.0, absent=("engine 1 worker 1",))
    for waiting in ("trainer rank 0", "engine 0 worker 0"):
        with pytest.raises(TransferTimeout, match=rf"engine 1 worker 1 did not join the transfer group within 1 s \({waiting} waited\)"):
            members.halves(waiting)
    assert time.monotonic() - started < 60.0


@pytest.mark.parametrize(("timeout_s", "client_s"), [(1.0, 30.0), (300.0, 1.0)])
def test_no_rendezvous(timeout_s: float, client_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there before members are told of it: one that is gone is not waited for as long as others are."""
    monkeypatch.setattr(group, "_CLIENT_S", client_s)
    plan, _ = make_plan(owners=1, engines={0: 1})
    store = rendezvous_store("127.0.0.1")
    membership = plan.membership(1, "gloo", "127.0.0.1", store.port, timeout_s)
    del store
    with pytest.raises(TransferTimeout, match=f"trainer rank 0 found no rendezvous at 127.0.0.1:{membership.port} within 1 s"):
        half(membership, 0, sends=True)


@pytest.mark.usefixtures("machines")
def test_stuck_members_are_named_on_both_sides() -> None:
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1, 2: 1})
    members = Members(plan, timeout_s=1.0)
    (sender,), receivers = members.halves("trainer"), members.halves("engine")
    route = plan.routes[0]
    arrived = members.pool.submit(receivers[1].receive, route)
    with pytest.raises(
        TransferTimeout, match=r"engine 0 worker 0, engine 2 worker 0 did not take part in bucket 0 from trainer rank 0 within 1 s"
    ):
        deliver(sender, route, state)
    with pytest.raises(TransferError):
        arrived.result(60)
    with pytest.raises(TransferError, match="connect again, the group failed earlier: .*engine 0 worker 0"):
        deliver(sender, route, state)


def test_ends_out_of_step_exchange_nothing() -> None:
    plan, state = make_plan(owners=1, engines={0: 1})
    members = Members(plan, timeout_s=5.0)
    (sender,), (receiver,) = members.halves("trainer"), members.halves("engine")
    receiving = members.pool.submit(receiver.receive, plan.routes[1])
    with pytest.raises(TransferError, match="out of step, trainer rank 0 is at a bucket of 2 tensors, .*, engine 0 worker 0 at one of"):
        deliver(sender, plan.routes[0], state)
    with pytest.raises(TransferError, match="out of step"):
        receiving.result(60)


def test_rendezvous_that_goes_away_is_noticed() -> None:
    plan, state = make_plan(owners=1, engines={0: 1})
    members = Members(plan, timeout_s=5.0)
    (sender,), (receiver,) = members.halves("trainer"), members.halves("engine")
    del members.store
    started = time.monotonic()
    with pytest.raises(TransferError, match="lost the rendezvous"):
        receiver.receive(plan.routes[0])
    with pytest.raises(TransferError, match="lost the rendezvous"):
        deliver(sender, plan.routes[0], state)
    assert time.monotonic() - started < 60.0


def test_ports_are_the_systems_choice() -> None:
    stores = [rendezvous_store("127.0.0.1") for _ in range(3)]
    assert len({store.port for store in stores}) == 3


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("bucket", [0, 1], ids=["while they connect", "in the middle of a bucket"])
def test_a_sender_that_stops_keeps_nobody_until_the_time_is_up(bucket: int) -> None:
    """It has met the receivers, who wait inside gloo: for its address, or for its bytes. The time-out is longer than the test may take."""
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1})
    members = Members(plan, timeout_s=100.0)
    (sender,), receivers = members.halves("trainer"), members.halves("engine")
    for route in plan.routes[:bucket]:
        taking = [members.pool.submit(receiver.receive, route) for receiver in receivers]
        deliver(sender, route, state)
        for future in taking:
            future.result(20)
    route = plan.routes[bucket]
    taking = [members.pool.submit(receiver.receive, route) for receiver in receivers]
    sender.group.meet(route, Announcement(flat_layout(route.tensors).signature))
    with pytest.raises(TimeoutError):
        taking[0].result(0.3)
    interrupt(rendezvous_client("127.0.0.1", members.store.port), 2)
    for future in taking:
        with pytest.raises(StaleEpoch):
            future.result(10)
    members.close()
    now = Members(plan, epoch=3, store=members.store)
    for received in now.update(state := fresh(state)).values():
        assert_equal(received, state)
    now.close()
