"""Gloo between machines: a bucket goes to each of them once, and is spread there through memory. Machines are declared."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from transfer_members import Members, assert_equal, fresh, make_plan

from roll_lite.distributed.weight_sync.group import Home, TransferError
from roll_lite.distributed.weight_sync.plan import TransferPlan
from roll_lite.distributed.weight_sync.transport import BUCKETS_AHEAD, flat_layout


def homes(machines: str) -> list[Home]:
    return [Home(machine) for machine in machines]


def whole(plan: TransferPlan, sender: int) -> int:
    return sum(flat_layout(route.tensors).nbytes for route in plan.routes if route.sender == sender)


def updated(members: Members, state: Any, rounds: int = 3) -> None:
    for _ in range(rounds):
        state = fresh(state)
        received = members.update(state)
        assert len(received) == 6
        for copy in received.values():
            assert_equal(copy, state)


@pytest.mark.parametrize(("transport", "machines_reached"), [("gloo", (3, 3)), ("auto", (2, 2))])
def test_each_machine_gets_the_bytes_once(transport: str, machines_reached: tuple[int, int], sent: Counter[int]) -> None:
    """Six workers on three machines; by auto those beside a trainer read its own memory."""
    plan, state = make_plan(owners=2, engines={0: 3, 1: 2, 2: 1})
    members = Members(plan, transport=transport, homes=homes("ab" + "aabbbc"))
    updated(members, state)
    assert [sent[0], sent[1]] == [3 * reached * whole(plan, sender) for sender, reached in enumerate(machines_reached)]
    members.close()


def test_auto_goes_by_what_each_trainer_has_beside_it(sent: Counter[int]) -> None:
    plan, state = make_plan(owners=2, engines={0: 3, 1: 3})
    members = Members(plan, transport="auto", homes=homes("ac" + "aaabbb"))
    updated(members, state, rounds=1)
    assert [set(half._transports) for half in members.halves("trainer")] == [{"shared_memory", "gloo"}, {"gloo"}]
    assert [sent[0], sent[1]] == [whole(plan, 0), 2 * whole(plan, 1)]
    members.close()


def test_memory_of_the_first_of_a_machine_is_used_again_only_when_the_others_are_done() -> None:
    plan, state = make_plan(owners=1, engines={0: 2}, buckets=BUCKETS_AHEAD + 1)
    members = Members(plan, transport="gloo", homes=homes("abb"))
    (sender,), (first, second) = members.halves("trainer"), members.halves("engine")
    sending = members.pool.submit(lambda: [sender.send(route, state) for route in plan.routes] and sender.finish())
    for route in plan.routes[:BUCKETS_AHEAD]:
        first.receive(route)
        first.release()
    last = members.pool.submit(first.receive, plan.routes[-1])
    with pytest.raises(TimeoutError):
        last.result(0.3)
    for route in plan.routes[:BUCKETS_AHEAD]:
        assert_equal(second.receive(route), {tensor.name: state[tensor.name] for tensor in route.tensors})
        second.release()
    assert_equal(last.result(10), {tensor.name: state[tensor.name] for tensor in plan.routes[-1].tensors})
    sending.result(10)
    members.close()


def test_what_the_first_of_a_machine_keeps_stays_as_it_is() -> None:
    plan, state = make_plan(owners=1, engines={0: 2})
    members = Members(plan, transport="gloo", homes=homes("abb"))
    kept = []
    for _ in range(4):
        state = fresh(state)
        received = members.update(state)
        kept.append((state, [copy["w3"] for copy in received.values()]))
        del received
    for sent, copies in kept:
        assert all((copy == sent["w3"]).all() for copy in copies)
    members.close()


def test_memory_of_the_first_of_a_machine_that_cannot_be_opened() -> None:
    plan, state = make_plan(owners=1, engines={0: 2})
    members = Members(plan, transport="gloo", homes=homes("abb"))
    (sender,), (first, second) = members.halves("trainer"), members.halves("engine")
    sending = members.pool.submit(sender.send, plan.routes[0], state)
    first.receive(plan.routes[0])
    sending.result(10)
    first.close()
    refused = r"engine 0 worker 1 cannot open the memory of engine 0 worker 0: .*; by gloo .* a machine with one does without"
    with pytest.raises(TransferError, match=refused):
        second.receive(plan.routes[0])
    members.close()
