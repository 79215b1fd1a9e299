"""Placement of workers on devices: GPUs or, in a cluster without GPUs, shares of cores.

Devices are numbered across nodes; roles that list the same number share it. `placement.nodes` fixes each device's node; else Ray chooses.
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

import psutil
import ray
from ray.util.placement_group import NODE_ID_LABEL_KEY, PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll_lite.config.arithmetic import device_numbers
from roll_lite.config.placement import describe, nodes_of, ranges
from roll_lite.config.schema.models import Devices
from roll_lite.config.schema.run import PlacementConfig
from roll_lite.distributed.place import on_node

NODE_SHARE = 0.001
"""Share of Ray's resource `node:ADDRESS` in each bundle: any positive amount binds the bundle."""
LARGEST_SLOT = 1.0
SMALLEST_SLOT = 0.01
CHOOSE_AGAIN_S = 10.0
"""Seconds to reserve devices on the chosen nodes; if another job took them, nodes are chosen again."""
ANSWER_SECONDS = 1.0
USABLE_SHARE = 0.9
PLACED = "ROLL_LITE_PLACED"
"""Environment variable of workers: `Slot.placed`."""


class PlacementTimeout(TimeoutError):
    pass


@dataclass(frozen=True)
class Slot:
    strategy: Any = None
    local_rank: int = 0
    """Index of the worker's first device among those it sees: 0 on GPUs, the slot's number in the node on CPUs."""
    gpus: tuple[str, ...] = ()
    placed: str = ""
    """"NODE_ID BUNDLE BUNDLE ..." of the GPUs, as first placed by Ray; "" without GPUs."""
    reserved: PlacementGroup | None = None
    """Own placement group of a worker that starts when devices become free."""
    own_gpus: int = 0


@dataclass(frozen=True)
class Device:
    bundle: int
    node: str
    gpu: str | None = None


class Placement:
    def __init__(self, roles: Mapping[str, Devices], timeout_s: float, layout: PlacementConfig | None = None) -> None:
        self.roles = {role: list(device_numbers(devices)) for role, devices in roles.items()}
        numbers = sorted({number for devices in self.roles.values() for number in devices})
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        wanted = _Wanted("GPU" if gpus else "CPU", numbers, self.roles, timeout_s, time.monotonic() + timeout_s)
        self._kind = wanted.kind
        if layout is None or layout.nodes is None:
            size = 1.0 if gpus else _cpu_slot(len(numbers))
            self.group = _reserve(wanted, size, timeout_s) or _no_room(wanted, size)
            order = [node.id for node in _nodes(wanted.kind)]
        else:
            self.group, order = _on_nodes(wanted, layout)
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        own_gpus = _gpu_numbers(self.group, range(len(numbers))) if gpus else [None] * len(numbers)
        devices = [Device(bundle, nodes[bundle], gpu) for bundle, gpu in enumerate(own_gpus)]
        # A node that has just joined may not be listed yet.
        order = [*order, *sorted({device.node for device in devices} - set(order))]
        devices.sort(key=lambda device: (order.index(device.node), _gpu_order(device.gpu or "0"), device.bundle))
        self.devices = dict(zip(numbers, devices, strict=True))

    def slots(self, role: str, devices_per_worker: int = 1, workers_per_device: int = 1) -> list[Slot]:
        """Return slots in rank order. A worker's devices are consecutive, as are the ranks of workers on one device."""
        slots = self.slots_by_node(role, devices_per_worker, workers_per_device)
        for worker, own in enumerate(slots):
            if len(own) > 1:
                first = worker // workers_per_device * devices_per_worker
                raise ValueError(
                    f"{role}.devices: a worker of {devices_per_worker} devices needs them on one node, but devices "
                    f"{self.roles[role][first : first + devices_per_worker]} lie on {len(own)}. An engine that spans nodes needs "
                    "placement.nodes and placement.devices_per_node"
                )
        return [slot for own in slots for slot in own]

    def slots_by_node(self, role: str, devices_per_worker: int = 1, workers_per_device: int = 1) -> list[list[Slot]]:
        numbers = self.roles[role]
        if len(numbers) % devices_per_worker:
            raise ValueError(f"{role}.devices: {len(numbers)} devices cannot be shared out to workers of {devices_per_worker} devices each")
        devices = [self.devices[number] for number in numbers]
        slots: list[list[Slot]] = []
        seen: Counter[str] = Counter()
        for start in range(0, len(devices), devices_per_worker):
            nodes = [list(own) for _, own in groupby(devices[start : start + devices_per_worker], key=lambda device: device.node)]
            slots += [[self._slot(own, seen) for own in nodes] for _ in range(workers_per_device)]
        return slots

    def _slot(self, devices: Sequence[Device], seen: Counter[str]) -> Slot:
        node = devices[0].node
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=devices[0].bundle)
        gpus = tuple(device.gpu for device in devices if device.gpu is not None)
        placed = " ".join([node, *(str(device.bundle) for device in devices)]) if gpus else ""
        slot = Slot(place, 0 if gpus else seen[node], gpus, placed)
        seen[node] += 1
        return slot

    def nodes_by_role(self) -> dict[str, set[str]]:
        return {role: {self.devices[number].node for number in numbers} for role, numbers in self.roles.items()}

    def later_slot(self, devices: int) -> Slot:
        """Return a slot for a worker that starts once a node has `devices` free GPUs (or cores)."""
        group = placement_group([{self._kind: devices}])
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return Slot(strategy, reserved=group, own_gpus=devices if self._kind == "GPU" else 0)

    def release(self) -> None:
        remove_placement_group(self.group)


def draining_nodes() -> set[str]:
    """Return ids of nodes that will leave the cluster; none if Ray does not answer."""
    from ray._private.worker import global_worker  # Ray has no public call for this.

    try:
        return set(global_worker.gcs_client.get_draining_nodes(timeout=ANSWER_SECONDS))
    except ray.exceptions.RpcError:
        return set()


def anywhere(workers: int) -> list[Slot]:
    return [Slot("SPREAD", number) for number in range(workers)]


def beside_driver() -> Slot:
    return Slot(on_node(ray.get_runtime_context().get_node_id()))


def _cpu_slot(slots: int) -> float:
    """Return the largest share of a core, at most 1, with which all slots fit into the free cores."""
    free = [cores * USABLE_SHARE for cores in _free("CPU").values() if cores > 0]
    sizes = sorted({min(LARGEST_SLOT, math.floor(100 * cores / n) / 100) for cores in free for n in range(1, slots + 1)}, reverse=True)
    for size in sizes:
        if size >= SMALLEST_SLOT and sum(math.floor(cores / size + 1e-9) for cores in free) >= slots:
            return size
    return SMALLEST_SLOT


def _slot_of_nodes(counts: Mapping[str, int]) -> float:
    """Return the largest share of a core that fits each node's slots. `counts`: {node id: slots}."""
    free = _free("CPU")
    sizes = [math.floor(100 * free.get(node, 0.0) * USABLE_SHARE / count) / 100 for node, count in counts.items()]
    return max(min(LARGEST_SLOT, *sizes), SMALLEST_SLOT)


def _free(kind: str) -> dict[str, float]:
    # Ray has no public call for this.
    from ray._private.state import available_resources_per_node

    return {node: resources.get(kind, 0.0) for node, resources in available_resources_per_node().items()}


@dataclass(frozen=True)
class Node:
    id: str
    address: str
    devices: float


def _nodes(kind: str) -> list[Node]:
    here = ray.get_runtime_context().get_node_id()
    alive = [Node(one["NodeID"], one["NodeManagerAddress"], one["Resources"].get(kind, 0.0)) for one in ray.nodes() if one["Alive"]]
    return sorted((node for node in alive if node.devices > 0), key=lambda node: (node.id != here, node.address, node.id))


@dataclass(frozen=True)
class _Wanted:
    kind: str
    numbers: Sequence[int]
    roles: Mapping[str, Sequence[int]]
    timeout_s: float
    deadline: float


def _on_nodes(wanted: _Wanted, layout: PlacementConfig) -> tuple[PlacementGroup, list[str]]:
    counts = Counter(number // layout.devices_per_node for number in wanted.numbers)
    while True:
        nodes = _nodes_of_the_run(wanted, layout, counts)
        size = 1.0 if wanted.kind == "GPU" else _slot_of_nodes({nodes[node].id: count for node, count in counts.items()})
        of_devices = [nodes[number // layout.devices_per_node] for number in wanted.numbers]
        if (group := _reserve(wanted, size, min(CHOOSE_AGAIN_S, wanted.timeout_s), of_devices)) is not None:
            return group, [nodes[node].id for node in sorted(counts)]
        if time.monotonic() > wanted.deadline:
            _no_room(wanted, size)


def _nodes_of_the_run(wanted: _Wanted, layout: PlacementConfig, counts: Mapping[int, int]) -> dict[int, Node]:
    """Choose a Ray node for each node number; wait for missing or busy nodes. `counts`: {node number: devices}."""
    assert layout.nodes is not None
    while True:
        nodes, free = _nodes(wanted.kind), _free(wanted.kind)
        for size in (1.0,) if wanted.kind == "GPU" else (LARGEST_SLOT / USABLE_SHARE, SMALLEST_SLOT / USABLE_SHARE):
            found = _assign([(node, free.get(node.id, 0.0) / size) for node in nodes], counts)
            if found is not None and len(nodes) >= layout.nodes:
                return found
        if time.monotonic() > wanted.deadline:
            told, there = describe(nodes_of(layout)), _described(nodes, wanted.kind)
            unused = f"{sum(free.values()):g} of them free ({', '.join(f'{node.address}: {free.get(node.id, 0.0):g}' for node in nodes)})"
            waited = f"after {wanted.timeout_s:g} s the cluster has {there}, {unused}"
            raise PlacementTimeout(f"placement.nodes: the run wants {told}; {waited}")
        time.sleep(min(1.0, wanted.timeout_s))


def _assign(room: Sequence[tuple[Node, float]], wanted: Mapping[int, int]) -> dict[int, Node] | None:
    """Assign a Ray node to each node number, in order: the first with enough free devices that leaves enough nodes for the others. `room`:
    (Ray node, free devices). `wanted`: {node number: devices}."""
    found: dict[int, Node] = {}
    left = list(room)
    for number in sorted(wanted):
        needs = sorted((count for other, count in wanted.items() if other > number), reverse=True)
        for one in left:
            others = sorted((devices for node, devices in left if node is not one[0]), reverse=True)
            if one[1] >= wanted[number] and len(others) >= len(needs) and all(map(operator.ge, others, needs)):
                break
        else:
            return None
        found[number] = one[0]
        left.remove(one)
    return found


def _described(nodes: Sequence[Node], kind: str) -> str:
    return describe([(node.address, int(node.devices)) for node in nodes], "GPUs" if kind == "GPU" else "cores")


def _reserve(wanted: _Wanted, size: float, timeout_s: float, nodes: Sequence[Node] = ()) -> PlacementGroup | None:
    """Reserve one bundle per device; None after `timeout_s`. `size`: GPUs or cores per bundle. `nodes`: node of each device; empty: Ray
    chooses."""
    bundles = [{wanted.kind: size} for _ in wanted.numbers]
    labels = [{NODE_ID_LABEL_KEY: node.id} for node in nodes] or None
    if nodes and len({node.address for node in nodes}) == len({node.id for node in nodes}):
        # A lost node that comes back has a new id but the same address.
        bundles = [bundle | {f"node:{node.address}": NODE_SHARE} for bundle, node in zip(bundles, nodes, strict=True)]
        labels = None
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    return None


def _no_room(wanted: _Wanted, size: float) -> NoReturn:
    free = ray.available_resources().get(wanted.kind, 0)
    has = _described(_nodes(wanted.kind), wanted.kind)
    roles = "; ".join(f"{role}: {ranges(devices)}" for role, devices in wanted.roles.items())
    devices = f"{len(wanted.numbers)} of {size:g} {wanted.kind} each ({roles})"
    raise PlacementTimeout(
        f"no room for the run's devices after {wanted.timeout_s:g} s. Wanted: {devices}. "
        f"The cluster has {has}, {free:g} of them free. Use fewer devices, wait for other jobs, or raise ray.placement_timeout_s."
    )


def _gpu_order(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (0, gpu)


def _gpu_numbers(group: PlacementGroup, bundles: Iterable[int]) -> list[str]:
    """Return each bundle's GPU. Ray names it only to tasks in the bundle."""
    probe = ray.remote(_own_gpu)
    refs = [
        probe.options(num_cpus=0, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for bundle in bundles
    ]
    return ray.get(refs)


def _own_gpu() -> str:
    if PLACED in os.environ:
        # Ray would look up the GPU's number in the list that this task inherits from a worker on another node; the raylet's list is right.
        of_node = psutil.Process(os.getppid()).environ().get("CUDA_VISIBLE_DEVICES")
        ray._private.worker.global_worker.original_visible_accelerator_ids["GPU"] = of_node and of_node.split(",")
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def find_gpus() -> None:
    """Let this worker see the GPUs that its bundles have here: Ray moves a lost node's bundles to GPUs that may have other numbers."""
    node, *bundles = os.environ.get(PLACED, "").split(" ")
    if node not in ("", ray.get_runtime_context().get_node_id()):
        group = ray.util.get_current_placement_group()
        nodes = placement_group_table(group)["bundles_to_node_id"]
        if len({nodes[int(bundle)] for bundle in bundles}) > 1:
            raise RuntimeError("Ray has placed this worker's GPUs on several nodes; placement.nodes keeps them together")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_gpu_numbers(group, map(int, bundles)))
