"""Engines that leave and join: epochs of the transfer group."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transfer_members import Members, assert_equal, deliver, fresh, half, make_plan

from roll_lite.distributed.weight_sync import group
from roll_lite.distributed.weight_sync.group import (
    Home,
    StaleEpoch,
    TransferError,
    TransferGroup,
    interrupt,
    rendezvous_client,
    rendezvous_store,
)
from roll_lite.distributed.weight_sync.plan import ExportPlan, TransferPlan, plan_transfers, tensors_of


def replanned(plan: TransferPlan, engines: dict[int, int]) -> TransferPlan:
    return plan_transfers(ExportPlan(tuple(tensors_of(plan.routes))), engines)


def test_an_engine_leaves_another_joins_and_the_next_update_reaches_all() -> None:
    plan, state = make_plan(owners=2, engines={0: 1, 1: 2})
    first = Members(plan)
    assert first.update(state).keys() == {"engine 0 worker 0", "engine 1 worker 0", "engine 1 worker 1"}
    for epoch, engines in ((2, {0: 1}), (3, {0: 1, 2: 2})):
        now = Members(replanned(plan, engines), epoch=epoch, store=first.store)
        for _ in range(2):
            state = fresh(state)
            received = now.update(state)
            assert len(received) == sum(engines.values())
            for copy in received.values():
                assert_equal(copy, state)
    assert "engine 2 worker 1" in received and "engine 1 worker 0" not in received


@pytest.mark.parametrize("who", ["engine 1 worker 0", "trainer rank 0"])
def test_whoever_belongs_to_an_earlier_epoch_is_refused(who: str) -> None:
    """Whether it stays behind when it has received before, or comes too late to join."""
    plan, state = make_plan(owners=1, engines={0: 1, 1: 1})
    before = Members(plan)
    before.update(state)
    now = Members(replanned(plan, {0: 1}), epoch=2, store=before.store)
    now.halves()
    (stale,) = before.halves(who)
    message = rf"{who} belongs to epoch 1 of the transfer group, which is at epoch 2: engines have left or joined since; connect again"
    with pytest.raises(StaleEpoch, match=message):
        deliver(stale, plan.routes[0], state) if who.startswith("trainer") else stale.receive(plan.routes[0])
    with pytest.raises(TransferError, match="connect again"):
        deliver(stale, plan.routes[0], state) if who.startswith("trainer") else stale.receive(plan.routes[0])
    number = before.membership.members.index(who)
    with pytest.raises(StaleEpoch, match=message):
        half(before.membership, number, sends=who.startswith("trainer"))
    state = fresh(state)
    assert_equal(now.update(state)["engine 0 worker 0"], state)  # it disturbed nobody


def test_one_that_waits_when_the_next_epoch_begins_does_not_wait_until_its_time_is_up() -> None:
    plan, _ = make_plan(owners=1, engines={0: 1, 1: 1})
    before = Members(plan, timeout_s=20.0)
    left_behind = before.pool.submit(before.halves("engine 1")[0].receive, plan.routes[0])
    Members(replanned(plan, {0: 1}), epoch=2, store=before.store).halves()
    with pytest.raises(StaleEpoch):
        left_behind.result(5)


@pytest.mark.parametrize("late", [[], [100, 250]])
def test_joining_takes_few_requests_to_the_store_and_names_the_late_members(late: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = make_plan(owners=1, engines=dict.fromkeys(range(300), 1))
    store = rendezvous_store("127.0.0.1")
    membership = plan.membership(1, "gloo", "127.0.0.1", store.port, 0.5)
    for number in set(range(1, len(membership.members))) - {engine + 1 for engine in late}:
        store.set(f"1/joined/{number}", json.dumps(asdict(Home("another machine"))))
    asked: list[list[str]] = []

    class CountingStore(group.TCPStore):
        def check(self, keys: list[str]) -> Any:
            asked.append(keys)
            return super().check(keys)

    monkeypatch.setattr(group, "TCPStore", CountingStore)
    if late:
        with pytest.raises(TransferError, match="transfer: engine 100 worker 0, engine 250 worker 0 did not join"):
            TransferGroup(membership, 0)
    else:
        assert len(TransferGroup(membership, 0).homes) == 301 and len(asked) < 10


def test_one_that_cannot_join_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    here, asked = Home.here, itertools.count()

    def first_fails() -> Home:
        if next(asked) == 0:
            raise OSError("no GPU")
        return here()

    monkeypatch.setattr(Home, "here", staticmethod(first_fails))
    plan, _ = make_plan(owners=1, engines={0: 1, 1: 1})
    failures = [future.exception(20) for future in Members(plan, timeout_s=100.0).joining.values()]
    assert sorted(type(failure).__name__ for failure in failures) == ["OSError", "StaleEpoch", "StaleEpoch"]
    assert sum("has broken off (OSError: no GPU); connect again" in str(failure) for failure in failures) == 2


def test_a_broken_group_is_made_again() -> None:
    """A trainer or an engine that ran into a time-out connects anew: the next epoch works."""
    plan, state = make_plan(owners=1, engines={0: 1})
    before = Members(plan, timeout_s=0.5)
    with pytest.raises(TransferError):
        deliver(before.halves("trainer")[0], plan.routes[0], state)
    now = Members(plan, epoch=2, store=before.store)
    state = {name: torch.ones_like(value) for name, value in state.items()}
    assert_equal(now.update(state)["engine 0 worker 0"], state)


def test_an_interruption_leaves_it_to_others_to_tell_that_the_rendezvous_is_gone() -> None:
    store = rendezvous_store("127.0.0.1")
    client = rendezvous_client("127.0.0.1", store.port)
    interrupt(client, 2)
    assert store.get("interrupted") == b"2"
    del store
    with pytest.raises(dist.DistNetworkError):
        while True:  # what is written at first finds nobody to refuse it
            client.set("key", "value")
    interrupt(client, 3)
