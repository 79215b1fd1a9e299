"""Devices -> places for workers. Device numbers count over the nodes of the cluster; roles that name the same number share the device.

A device is a GPU or, on a cluster without GPUs, a CPU slot: a share of a core, small enough that all slots fit, so that a
laptop's two cores can host every role of a run. One placement group holds all devices of a run, so that it starts with all
of them or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from roll_lite.config.arithmetic import device_numbers
from roll_lite.config.schema.models import Devices

LARGEST_SLOT = 1.0
SMALLEST_SLOT = 0.01
USABLE_SHARE = 0.9
"""Of a node's cores; the rest is left to services without a device."""


class PlacementTimeout(TimeoutError):
    """The cluster has no room for the run's devices."""


@dataclass(frozen=True)
class Slot:
    """Where one worker runs, and with which of its node's GPUs."""

    strategy: Any = None
    """Ray's scheduling strategy."""
    local_rank: int = 0
    """Number of the worker's first device among those that it sees: 0 where it sees only its own; on CPUs its number on the node."""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Device:
    """A bundle of the placement group, once it is known where it lies."""

    bundle: int
    node: str
    gpu: str | None = None


class Placement:
    """The devices of all roles of a run, reserved together."""

    def __init__(self, roles: Mapping[str, Devices], timeout_s: float) -> None:
        self.roles = {role: list(device_numbers(devices)) for role, devices in roles.items()}
        numbers = sorted({number for devices in self.roles.values() for number in devices})
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        bundle = {"GPU": 1.0} if gpus else {"CPU": _cpu_slot(len(numbers))}
        self.group = _reserve([bundle] * len(numbers), self.roles, timeout_s)
        self.devices = dict(zip(numbers, _in_node_order(self.group, len(numbers), gpus), strict=True))

    def slots(self, role: str, devices_per_worker: int = 1) -> list[Slot]:
        """One for each worker of the role, in rank order; a worker of several devices gets consecutive ones."""
        numbers = self.roles[role]
        if len(numbers) % devices_per_worker:
            raise ValueError(f"{role}.devices: {len(numbers)} devices cannot be shared out to workers of {devices_per_worker} devices each")
        devices = [self.devices[number] for number in numbers]
        slots = []
        seen: dict[str, int] = {}
        for start in range(0, len(devices), devices_per_worker):
            own = devices[start : start + devices_per_worker]
            if len({device.node for device in own}) > 1:
                raise ValueError(
                    f"{role}.devices: a worker of {devices_per_worker} devices needs them on one node, "
                    f"but devices {numbers[start : start + devices_per_worker]} lie on {len({device.node for device in own})}"
                )
            place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=own[0].bundle)
            gpus = tuple(device.gpu for device in own if device.gpu is not None)
            local_rank = 0 if gpus else seen.get(own[0].node, 0)
            seen[own[0].node] = seen.get(own[0].node, 0) + 1
            slots.append(Slot(place, local_rank, gpus))
        return slots

    def release(self) -> None:
        """Also ends what still runs there."""
        remove_placement_group(self.group)


def anywhere(workers: int) -> list[Slot]:
    """For workers without a device: Ray spreads them over the nodes."""
    return [Slot("SPREAD", number) for number in range(workers)]


def beside_driver() -> Slot:
    """For a service that talks to the driver all the time."""
    return Slot(NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False))


def _cpu_slot(slots: int) -> float:
    """The largest share of a core, at most one, with which all slots fit; in hundredths, rounded down."""
    free = [cores * USABLE_SHARE for cores in _free_cores().values() if cores > 0]
    sizes = sorted({min(LARGEST_SLOT, math.floor(100 * cores / n) / 100) for cores in free for n in range(1, slots + 1)}, reverse=True)
    for size in sizes:
        if size >= SMALLEST_SLOT and sum(math.floor(cores / size + 1e-9) for cores in free) >= slots:
            return size
    return SMALLEST_SLOT


def _free_cores() -> dict[str, float]:
    # Ray has no public call for what is free on each node.
    from ray._private.state import available_resources_per_node

    return {node: resources.get("CPU", 0.0) for node, resources in available_resources_per_node().items()}


def _reserve(bundles: list[dict[str, float]], roles: Mapping[str, Sequence[int]], timeout_s: float) -> PlacementGroup:
    group = placement_group(bundles, strategy="PACK")
    if group.wait(timeout_s):
        return group
    kind, size = next(iter(bundles[0].items()))
    has = _cluster_state(kind)
    remove_placement_group(group)
    wanted = "; ".join(f"{role}: {_numbers(devices)}" for role, devices in roles.items())
    raise PlacementTimeout(
        f"no room for the run's devices after {timeout_s:g} s. Wanted: {len(bundles)} devices of {size:g} {kind} each ({wanted}). "
        f"The cluster has: {has}. Use fewer devices, wait for other jobs, or raise ray.placement_timeout_s."
    )


def _numbers(devices: Sequence[int]) -> str:
    return f"devices {', '.join(map(str, devices))}" if len(devices) <= 8 else f"{len(devices)} devices"


def _cluster_state(kind: str) -> str:
    total, free = ray.cluster_resources().get(kind, 0), ray.available_resources().get(kind, 0)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = ", ".join(f"{node['NodeManagerAddress']} {node['Resources'].get(kind, 0):g}" for node in nodes)
    return f"{len(nodes)} node(s) with {total:g} {kind} in all ({each}), {free:g} of them free"


def _in_node_order(group: PlacementGroup, count: int, gpus: bool) -> list[Device]:
    """Bundles sorted by node, the driver's first, and by GPU: consecutive device numbers lie on the same node."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    numbers = _gpu_numbers(group, count) if gpus else [None] * count
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
    devices = [Device(bundle, nodes[bundle], numbers[bundle]) for bundle in range(count)]
    return sorted(devices, key=lambda device: (device.node != here, addresses[device.node], int(device.gpu or 0), device.bundle))


def _gpu_numbers(group: PlacementGroup, count: int) -> list[str | None]:
    """Which GPU of its node each bundle holds: only a task inside the bundle is told."""
    probe = ray.remote(_own_gpu)
    refs = [
        probe.options(num_cpus=0, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for bundle in range(count)
    ]
    return ray.get(refs)


def _own_gpu() -> str:
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
