from __future__ import annotations

from typing import Annotated, Literal

from roll_lite.config.schema.base import PositiveInt, Section, below


class PlacementConfig(Section):
    """Assignment of devices to roles. A role without `devices` gets as many as the roles that share devices with it. Roles on the same
    devices take turns (`offload: true`), except under by_role; judges never share. `placement: colocated` is short for `{name:
    colocated}`."""

    name: Literal["by_role", "colocated", "split", "pairs", "apart"] = "by_role"
    """by_role: `devices: n` means devices 0 to n-1. colocated: all roles share devices. split: models that train or score share devices,
    engines have others. pairs: actor with reference, critic with reward models, engines alone. apart: each role alone."""
    nodes: Annotated[PositiveInt, below(4097, "more than a cluster has")] | None = None
    """Number of nodes to take: the driver's first, then by address; the run fails if too few are free. null: the first nodes with room;
    `devices` then cannot name nodes."""
    devices_per_node: Annotated[PositiveInt, below(1025, "more than a node has")] = 8
    """Devices of each node, numbered over all nodes."""
    fill: Literal["pack", "spread"] = "pack"
    """pack: one node after the other. spread: one device (or tensor-parallel group) of each node in turn. Needs `nodes`."""

    @property
    def devices(self) -> int:
        """Devices of all nodes; 0 if `nodes` is null."""
        return (self.nodes or 0) * self.devices_per_node
