"""Slots and node checks of engines that join when devices become free (`actor_infer.most_replicas`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import remove_placement_group

from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import Slot
from roll_lite.pipeline import node_facts, nodes


@dataclass(frozen=True)
class JoiningEngines:
    slots: list[Slot]
    new_slot: Callable[[], Slot]
    drivers: nodes.View
    """Files of the driver's node that must be equal on all nodes."""
    other_nodes: list[str]

    def check(self, engine: int) -> ray.ObjectRef:
        """Start a task that fails if the engine's node has other files or versions than the driver's."""
        task = ray.remote(require_same).options(num_cpus=0, max_retries=0, scheduling_strategy=self.slots[engine].strategy)
        return task.remote(self.drivers, node_facts.installed(), ray.util.get_node_ip_address())

    def release(self, engine: int) -> None:
        """Free the devices reserved for an engine, which ends the engine."""
        remove_placement_group(self.slots[engine].reserved)

    def reserve(self, engine: int) -> None:
        """Give an engine a new slot, so that it waits until devices are free."""
        self.slots[engine] = self.new_slot()

    def joined(self, place: Place) -> None:
        if place.node not in (*self.other_nodes, ray.get_runtime_context().get_node_id()):
            self.other_nodes.append(place.node)


def require_same(drivers: nodes.View, versions: Mapping[str, str], driver: str) -> None:
    """Raise ValueError if this node has other files or versions than the `driver` node (an address)."""
    here, engines = ray.util.get_node_ip_address(), {"actor_infer"}
    views = {driver: drivers, here: nodes.View(None, {reader: reader.files() for reader in drivers.files})}
    facts = {address: node_facts.NodeFacts(own, 0.0, 0.0, {}) for address, own in ((driver, versions), (here, node_facts.installed()))}
    problems = [*nodes.differences(views, {"actor_infer": {here}}, driver), *node_facts.differences(facts, dict.fromkeys(facts, engines))]
    if problems:
        raise ValueError("\n".join(problems))
