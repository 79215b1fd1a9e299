"""Section of device placement."""

from __future__ import annotations

from typing import Annotated, Literal

from roll_lite.config.schema.base import PositiveInt, Section, below


class PlacementConfig(Section):
    """Assigns devices to roles; `placement: colocated` names a preset. A role's `devices` is a number or, under any preset, a list;
    without it the role takes as many as the others of its group. Roles that share devices by a preset take turns (`offload: true`)
    unless their `offload` says otherwise. Judges have separate devices under every preset."""

    name: Literal["by_role", "colocated", "split", "pairs", "apart"] = "by_role"
    """by_role: n is devices 0 to n-1, and roles set their `offload`. colocated: all roles on the same devices. split: models that train
    or score on some, engines on others. pairs: likewise actor and reference, critic and reward models, engines. apart: every role by
    itself."""
    nodes: Annotated[PositiveInt, below(4097, "more than a cluster has")] | None = None
    """Number of nodes. The run takes nodes with free devices, the driver's first, then by address, and checks the cluster at its start.
    Absent: the first nodes with room, which cannot be named."""
    devices_per_node: Annotated[PositiveInt, below(1025, "more than a node has")] = 8
    """Devices of each node: node n has n * devices_per_node and following."""
    fill: Literal["pack", "spread"] = "pack"
    """pack: fill a node before the next; spread: take one device of each node in turn, or as many as tensor-parallel ranks need (needs
    `nodes`)."""

    @property
    def devices(self) -> int:
        """Devices of all nodes; 0 if `nodes` is absent."""
        return (self.nodes or 0) * self.devices_per_node
