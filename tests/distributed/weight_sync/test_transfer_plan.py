from __future__ import annotations

import json

import pytest
import torch

from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, Membership, Route, by_bucket, plan_transfers, tensors_of
from roll_lite.distributed.weight_sync.transport import flat_layout, flatten, unflatten


def tensor(name: str, owner: int, bucket: int, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> ExportedTensor:
    return ExportedTensor(name, shape, dtype, owner, bucket)


def two_owners() -> ExportPlan:
    """Pipeline stages 0 and 1: the last stage's first rank is 4."""
    return ExportPlan((tensor("a", 0, 0), tensor("b", 4, 1, dtype=torch.bfloat16), tensor("c", 0, 0), tensor("d", 4, 2)))


def test_buckets_find_their_senders_and_receivers() -> None:
    plan = plan_transfers(two_owners(), {0: 1, 1: 2})
    assert [(r.bucket, r.sender, r.receivers, r.nbytes, [x.name for x in r.tensors]) for r in plan.routes] == [
        (0, 0, (2, 3, 4), 48, ["a", "c"]),
        (1, 1, (2, 3, 4), 12, ["b"]),
        (2, 1, (2, 3, 4), 24, ["d"]),
    ]
    assert plan.nbytes == 84


def test_experts_go_to_the_workers_that_have_them() -> None:
    """Of every engine: members 1 and 2 are the first one's workers, 3 and 4 the other's. Of four experts each has two."""
    experts = [tensor(f"model.layers.0.mlp.experts.{number}.up_proj.weight", 0, number // 3) for number in (2, 0, 1, 3)]
    export = ExportPlan((tensor("model.layers.0.mlp.gate.weight", 0, 0), *experts))
    plan = plan_transfers(export, {0: 2, 5: 2}, expert_parallel=2)
    assert [(r.bucket, r.receivers, [one.name.removeprefix("model.layers.0.mlp.") for one in r.tensors]) for r in plan.routes] == [
        (0, (1, 2, 3, 4), ["gate.weight"]),
        (0, (2, 4), ["experts.2.up_proj.weight"]),
        (0, (1, 3), ["experts.0.up_proj.weight", "experts.1.up_proj.weight"]),
        (1, (2, 4), ["experts.3.up_proj.weight"]),
    ]
    assert [len(bucket) for bucket in by_bucket(plan.routes)] == [3, 1]
    assert {one.name for one in tensors_of(plan.routes)} == {one.name for one in export.tensors}
    assert plan.nbytes == plan_transfers(export, {0: 2, 5: 2}).nbytes == 5 * 24
    assert {route.receivers for route in plan_transfers(export, {0: 2, 5: 2}).routes} == {(1, 2, 3, 4)}
    for engines, count, message in (({0: 3}, 3, "3 workers cannot share 4 experts"), ({0: 2, 1: 1}, 2, "cannot share experts 2-fold")):
        with pytest.raises(AssertionError, match=message):
            plan_transfers(export, engines, expert_parallel=count)


def test_members_are_trainers_first_then_the_workers_of_each_engine() -> None:
    """Engine 1 has left."""
    plan = plan_transfers(two_owners(), {0: 1, 2: 2})
    assert plan.trainers == (0, 4)
    assert plan.members == ("trainer rank 0", "trainer rank 4", "engine 0 worker 0", "engine 2 worker 0", "engine 2 worker 1")
    assert [plan.first_member(engine) for engine in plan.engines] == [2, 3]
    membership = plan.membership(3, "gloo", "host", 77, 5.0)
    assert membership.channels == ((0, (2, 3, 4)), (1, (2, 3, 4)))


def test_what_crosses_an_engines_own_calls_comes_back_the_same() -> None:
    """As lists, numbers and strings: engines pass nothing else."""
    plan = plan_transfers(two_owners(), {0: 2})
    membership = plan.membership(3, "gloo", "host", 77, 5.0)
    assert Membership.of(json.loads(json.dumps(membership.plain()))) == membership
    for route in plan.routes:
        assert Route.of(json.loads(json.dumps(route.plain()))) == route


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((tensor("a", 0, 0), tensor("a", 0, 1)), "exported twice: \\['a'\\]"),
        ((), "export plan is empty"),
        ((tensor("a", 0, 0), tensor("b", 4, 1), tensor("c", 0, 1)), r"bucket 1 belongs to trainer ranks \[0, 4\]; a bucket has one owner"),
    ],
)
def test_broken_plans(tensors: tuple[ExportedTensor, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        plan_transfers(ExportPlan(tensors), {0: 1})


def test_flat_buffer_and_back() -> None:
    state = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(3, dtype=torch.int64), "d": torch.randn(4, 4).t()}
    bucket = [tensor(name, 0, 0, tuple(value.shape), value.dtype) for name, value in state.items()]
    layout = flat_layout(bucket)
    assert layout.offsets == (0, 64, 128, 192) and layout.nbytes == 256
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    flatten(bucket, state, layout, buffer)
    received = unflatten(buffer.clone(), bucket, layout)
    assert all(torch.equal(received[name], value) and received[name].dtype == value.dtype for name, value in state.items())


def test_flat_buffer_refuses_what_was_not_planned() -> None:
    bucket = [tensor("a", 0, 0)]
    layout = flat_layout(bucket)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    with pytest.raises(KeyError, match="a"):
        flatten(bucket, {}, layout, buffer)
    with pytest.raises(AssertionError, match=r"a is \(torch.float32, 3, 2\), planned as \(torch.float32, 2, 3\)"):
        flatten(bucket, {"a": torch.zeros(3, 2)}, layout, buffer)
    with pytest.raises(AssertionError, match=r"a is \(torch.bfloat16, 2, 3\)"):
        flatten(bucket, {"a": torch.zeros(2, 3).bfloat16()}, layout, buffer)


def test_tensors_are_cast_where_that_makes_them_smaller() -> None:
    whole, half, number = torch.float32, torch.bfloat16, torch.int64
    cases = {(whole, half): half, (half, whole): half, (whole, whole): whole, (number, half): number}
    for (held, wanted), sent in cases.items():
        plan = plan_transfers(ExportPlan((tensor("a", 0, 0, dtype=held),)), {0: 1}, wanted)
        (one,) = plan.routes[0].tensors
        assert (one.dtype, one.cast_from) == (sent, held if sent != held else None)
        assert plan.nbytes == 6 * sent.itemsize


def test_signatures_tell_buckets_apart() -> None:
    base = tensor("a", 0, 0)
    others = [tensor("b", 0, 0), tensor("a", 0, 0, (3, 2)), tensor("a", 0, 0, dtype=torch.int32)]
    assert len({flat_layout([bucket]).signature for bucket in (base, *others)}) == 4
