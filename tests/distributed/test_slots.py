"""Which workers get which devices, in a placement whose devices are known: no Ray. On a cluster: test_ray_cluster.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.config.schema.models import InferRoleConfig, VllmStrategyConfig
from roll_lite.config.schema.run import PlacementConfig
from roll_lite.distributed.cluster import ClusterSpec
from roll_lite.distributed.placement import Device, Placement, Slot, _gpu_order
from roll_lite.pipeline.build import Starter


def placement(nodes: str, gpus: bool = True) -> Placement:
    """Of devices that one role has, one for each letter, which names its node."""
    place = object.__new__(Placement)
    place.group = SimpleNamespace(bundle_count=len(nodes))  # type: ignore[assignment]
    place.roles = {"actor_infer": list(range(len(nodes)))}
    place.devices = {n: Device(n, node, str(nodes[:n].count(node)) if gpus else None) for n, node in enumerate(nodes)}
    return place


def bundles(slots: list[Slot]) -> list[int]:
    return [slot.strategy.placement_group_bundle_index for slot in slots]


def test_a_worker_has_consecutive_devices() -> None:
    slots = placement("aaab").slots("actor_infer")
    assert bundles(slots) == [0, 1, 2, 3] and [slot.gpus for slot in slots] == [("0",), ("1",), ("2",), ("0",)]
    slots = placement("aabb").slots("actor_infer", 2)
    assert bundles(slots) == [0, 2] and [slot.gpus for slot in slots] == [("0", "1")] * 2
    assert [slot.local_rank for slot in slots] == [0, 0], "the first that it sees"


def test_workers_of_a_device_follow_one_another() -> None:
    slots = placement("ab", gpus=False).slots("actor_infer", workers_per_device=2)
    assert bundles(slots) == [0, 0, 1, 1] and [slot.local_rank for slot in slots] == [0, 1, 0, 1]


def test_a_worker_that_spans_nodes_has_a_slot_on_each() -> None:
    by_node = placement("aabbccdd").slots_by_node("actor_infer", 4)
    assert [bundles(slots) for slots in by_node] == [[0, 2], [4, 6]]
    assert all(slot.gpus == ("0", "1") for slots in by_node for slot in slots)


def test_one_that_must_not_is_told_which_devices_lie_apart() -> None:
    with pytest.raises(ValueError, match=r"devices \[2, 3\] lie on 2. An engine that spans nodes needs placement.nodes"):
        placement("aaabbb").slots("actor_infer", 2)


@pytest.mark.parametrize(("told", "heads", "further"), [(2, [0], [[2]]), (None, [0, 2], [])])
def test_an_engines_further_nodes_are_told_to_its_worker(told: int | None, heads: list[int], further: list[list[int]]) -> None:
    starter: Any = object.__new__(Starter)
    starter.placement = placement("aabb")
    starter.config = SimpleNamespace(placement=PlacementConfig(nodes=told, devices_per_node=2))
    starter.spec = lambda name, slots, threads: ClusterSpec(name, slots, threads)
    size = 4 if told else 2
    slots, parts = starter.replica_slots(InferRoleConfig(devices=4, strategy=VllmStrategyConfig(tensor_parallel=size)))
    assert bundles(slots) == heads
    assert [[one["scheduling_strategy"].placement_group_bundle_index for one in own] for own in parts] == further
    for (one,) in parts:
        variables = one["runtime_env"]["env_vars"]
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["CUDA_VISIBLE_DEVICES"]) == ("1", "2", "0,1")


def test_gpus_of_a_node_may_have_uuids_for_names() -> None:
    """As where `CUDA_VISIBLE_DEVICES` has them."""
    assert sorted(["10", "9", "0"], key=_gpu_order) == ["0", "9", "10"]
    assert sorted(["GPU-b", "MIG-a", "GPU-a"], key=_gpu_order) == ["GPU-a", "GPU-b", "MIG-a"]
