from __future__ import annotations

import pytest
import torch

from roll_lite.distributed.strategy.base import ExportedTensor, ExportPlan, TransferEndpoint
from roll_lite.distributed.weight_sync.plan import plan_transfers
from roll_lite.distributed.weight_sync.transport import flat_layout, flatten, unflatten


def tensor(name: str, owner: int, bucket: int, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> ExportedTensor:
    return ExportedTensor(name, shape, dtype, owner, bucket)


def two_owners() -> ExportPlan:
    """Pipeline stages 0 and 1: the last stage's first rank is 4."""
    return ExportPlan((tensor("a", 0, 0), tensor("b", 4, 1, dtype=torch.bfloat16), tensor("c", 0, 0), tensor("d", 4, 2)))


def test_buckets_find_their_senders() -> None:
    plan = plan_transfers(two_owners(), [1, 2])
    assert [(t.bucket, t.owner, t.sender, t.nbytes, [x.name for x in t.tensors]) for t in plan.transfers] == [
        (0, 0, 0, 48, ["a", "c"]),
        (1, 4, 1, 12, ["b"]),
        (2, 4, 1, 24, ["d"]),
    ]


def test_ranks_are_senders_first_then_the_workers_of_each_engine() -> None:
    plan = plan_transfers(two_owners(), [1, 2])
    assert plan.senders == (0, 4) and plan.world_size == 5
    assert plan.members() == ["trainer rank 0", "trainer rank 4", "engine 0 worker 0", "engine 1 worker 0", "engine 1 worker 1"]
    assert plan.endpoint(1, "gloo", "host", 77, 5.0) == TransferEndpoint(
        "gloo", "host", 77, world_size=5, first_rank=3, senders=2, timeout_s=5.0
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((tensor("a", 0, 0), tensor("b", 1, 0)), "bucket 0 has several owners"),
        ((tensor("a", 0, 0), tensor("a", 0, 1)), "exported twice: \\['a'\\]"),
        ((), "export plan is empty"),
    ],
)
def test_broken_plans(tensors: tuple[ExportedTensor, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        plan_transfers(ExportPlan(tensors), [1])


def test_flat_buffer_and_back() -> None:
    state = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(3, dtype=torch.int64), "d": torch.randn(4, 4).t()}
    bucket = [tensor(name, 0, 0, tuple(value.shape), value.dtype) for name, value in state.items()]
    layout = flat_layout(bucket)
    assert layout.offsets == (0, 64, 128, 192) and layout.nbytes == 256
    received = unflatten(flatten(bucket, state, layout).clone(), bucket, layout)
    assert all(torch.equal(received[name], value) and received[name].dtype == value.dtype for name, value in state.items())


def test_flat_buffer_refuses_what_was_not_planned() -> None:
    bucket = [tensor("a", 0, 0)]
    layout = flat_layout(bucket)
    with pytest.raises(ValueError, match="a is in the plan but not in the bucket"):
        flatten(bucket, {}, layout)
    with pytest.raises(ValueError, match=r"a is torch.float32\(3, 2\), planned as torch.float32\(2, 3\)"):
        flatten(bucket, {"a": torch.zeros(3, 2)}, layout)
    with pytest.raises(ValueError, match=r"a is torch.bfloat16\(2, 3\)"):
        flatten(bucket, {"a": torch.zeros(2, 3).bfloat16()}, layout)


def test_signatures_tell_buckets_apart() -> None:
    base = tensor("a", 0, 0)
    others = [tensor("b", 0, 0), tensor("a", 0, 0, (3, 2)), tensor("a", 0, 0, dtype=torch.int32)]
    assert len({flat_layout([bucket]).signature for bucket in (base, *others)}) == 4
