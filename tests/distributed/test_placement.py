"""Devices on a machine without GPUs. Several nodes and GPUs: test_ray_cluster.py."""

from __future__ import annotations

import re

import pytest
import ray
from cluster_workers import Adder

from roll_lite.config.schema.run import PlacementConfig
from roll_lite.distributed import placement
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.placement import Node, Placement, PlacementTimeout


def bundles(place: Placement, role: str) -> list[int]:
    return [slot.strategy.placement_group_bundle_index for slot in place.slots(role)]


def test_roles_that_name_the_same_device_share_it(ray_local: object) -> None:
    place = Placement({"actor_train": 2, "actor_infer": [2, 3], "critic": [1, 2]}, timeout_s=20)
    try:
        assert bundles(place, "actor_train") == [0, 1]
        assert bundles(place, "actor_infer") == [2, 3]
        assert bundles(place, "critic") == [1, 2]
        assert [slot.local_rank for slot in place.slots("critic")] == [0, 1]
        actors, critics = (start_cluster(ClusterSpec(role, place.slots(role)), Adder) for role in ("actor_train", "critic"))
        assert actors.all(Adder.add, 0) == [0, 100] and critics.all(Adder.add, 0) == [0, 100]
        actors.shutdown()
        critics.shutdown()
    finally:
        place.release()


def test_more_slots_than_cores_fit(ray_local: object) -> None:
    place = Placement({"actor_train": int(8 * ray.cluster_resources()["CPU"])}, timeout_s=20)
    assert len(place.slots("actor_train")) == 8 * ray.cluster_resources()["CPU"]
    place.release()


def test_workers_of_several_devices(ray_local: object) -> None:
    place = Placement({"actor_infer": 4}, timeout_s=20)
    try:
        assert [slot.strategy.placement_group_bundle_index for slot in place.slots("actor_infer", devices_per_worker=2)] == [0, 2]
        with pytest.raises(ValueError, match=r"actor_infer\.devices: 4 devices cannot be shared out to workers of 3 devices each"):
            place.slots("actor_infer", devices_per_worker=3)
    finally:
        place.release()


def test_several_workers_share_a_device(ray_local: object) -> None:
    place = Placement({"actor_infer": [1, 2]}, timeout_s=20)
    try:
        slots = place.slots("actor_infer", workers_per_device=2)
        assert [slot.strategy.placement_group_bundle_index for slot in slots] == [0, 0, 1, 1]
        assert [slot.local_rank for slot in slots] == [0, 1, 2, 3]
        engines = start_cluster(ClusterSpec("actor_infer", slots), Adder)
        assert engines.all(Adder.add, 0) == [0, 100, 200, 300]
        engines.shutdown()
    finally:
        place.release()


def test_nodes_that_are_told_of(ray_local: object) -> None:
    place = Placement({"actor_train": [0, 3]}, timeout_s=20, layout=PlacementConfig(nodes=1, devices_per_node=4))
    assert len(place.slots("actor_train")) == 2
    place.release()
    with pytest.raises(
        PlacementTimeout, match=r"the run wants 2 nodes with 8 devices \(node0 has 4, node1 has 4\); after 0.5 s the cluster has"
    ):
        Placement({"actor_train": [0, 4]}, timeout_s=0.5, layout=PlacementConfig(nodes=2, devices_per_node=4))


def test_no_room_says_what_was_wanted_and_what_there_is(ray_local: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_cpu_slot", lambda slots: 1000.0)
    with pytest.raises(PlacementTimeout) as caught:
        Placement({"actor_train": 2, "critic": [0, 5]}, timeout_s=0.5)
    message = str(caught.value)
    cores = ray.cluster_resources()["CPU"]
    assert "after 0.5 s. Wanted: 3 of 1000 CPU each (actor_train: 0-1; critic: 0, 5)" in message
    assert re.search(rf"The cluster has 1 node with {cores:g} cores \([\d.]+ has {cores:g}\), [\d.]+ of them free", message)


@pytest.mark.parametrize(
    ("cores", "slots", "size"),
    [
        ({"a": 2.0}, 1, 1.0),
        ({"a": 2.0}, 6, 0.3),  # 0.9 of two cores
        ({"a": 1.0, "b": 1.0}, 3, 0.45),  # 0.6 would fit in sum, but not on the nodes: one slot each, the third nowhere
        ({"a": 64.0}, 8, 1.0),
        ({"a": 0.0}, 2, 0.01),
    ],
)
def test_size_of_a_cpu_slot(monkeypatch: pytest.MonkeyPatch, cores: dict[str, float], slots: int, size: float) -> None:
    monkeypatch.setattr(placement, "_free", lambda kind: cores)
    assert placement._cpu_slot(slots) == pytest.approx(size)


@pytest.mark.parametrize(
    ("free", "wanted", "chosen"),
    [
        ([8, 8, 8], {0: 8, 1: 8}, "ab"),
        ([0, 8, 8], {0: 8, 1: 8}, "bc"),  # another job has all of the driver's node
        ([7, 8, 3], {0: 4, 1: 3}, "ab"),
        ([8, 4, 0], {0: 4, 1: 8}, "ba"),  # the first would do for either, and only it for the second
        ([8, 4, 2], {0: 2, 1: 4, 2: 8}, "cba"),
        ([8, 0], {1: 8}, "a"),  # nobody wants devices of node0
        ([8, 7], {0: 8, 1: 8}, None),
        ([8], {0: 1, 1: 1}, None),
    ],
)
def test_nodes_where_the_devices_are_free(free: list[int], wanted: dict[int, int], chosen: str | None) -> None:
    room = [(Node(name, name, 8.0), float(devices)) for name, devices in zip("abc", free, strict=False)]
    found = placement._assign(room, wanted)
    assert (found and [found[number].id for number in sorted(found)]) == (chosen and list(chosen))
