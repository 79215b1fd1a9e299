"""Section: which devices the roles of a run take."""

from __future__ import annotations

from typing import Annotated, Literal

from roll_lite.config.schema.base import PositiveInt, Section, below


class PlacementConfig(Section):
    """Which devices the roles take: `placement: colocated` names a preset. A role's `devices`, where it is a number, says how many; without
    it the role takes as many as those beside it. A list says which, whatever the preset. Roles that a preset has share devices
    take turns on them (`offload: true`), unless their own `offload` says otherwise. Judges have devices of their own under every preset."""

    name: Literal["by_role", "colocated", "split", "pairs", "apart"] = "by_role"
    """by_role: a number n is devices 0 to n-1, `offload` is what each role says. colocated: all roles on the same devices. split: models
    that train or score on some, engines on others. pairs: actor and reference, critic and reward models, engines. apart: every role on
    its own."""
    nodes: Annotated[PositiveInt, below(4097, "more than a cluster has")] | None = None
    """Nodes of the cluster that have devices: of those where the run's are free, the driver's first, then by address. A start holds the
    cluster against it. Absent: the first nodes with room, none of which can be named."""
    devices_per_node: Annotated[PositiveInt, below(1025, "more than a node has")] = 8
    """Devices of each of the `nodes`: node n has n * devices_per_node and those that follow."""
    fill: Literal["pack", "spread"] = "pack"
    """How roles take devices: pack fills a node before the next, spread takes one of each node in turn, or as many as tensor-parallel ranks
    need (needs `nodes`)."""

    @property
    def devices(self) -> int:
        """Of all nodes; 0 where it is not told how many there are."""
        return (self.nodes or 0) * self.devices_per_node
