"""Section of device placement."""

from __future__ import annotations

from typing import Annotated, Literal

from roll_lite.config.schema.base import PositiveInt, Section, below


class PlacementConfig(Section):
    """Assigns devices to roles. `placement: colocated` names a preset. A role's `devices` is a number or, under any preset, a list; if left
    out, the role takes as many as the roles it shares devices with. Roles that share devices under a preset take turns (`offload: true`),
    unless they set `offload`. Judges have separate devices under every preset."""

    name: Literal["by_role", "colocated", "split", "pairs", "apart"] = "by_role"
    """by_role: `devices: n` means devices 0 to n-1, and roles set their `offload`. colocated: all roles share devices. split: models that
    train or score share some, engines have others. pairs: actor and reference share some, critic and reward models others, engines have the
    rest. apart: every role has separate devices."""
    nodes: Annotated[PositiveInt, below(4097, "more than a cluster has")] | None = None
    """Number of nodes. The run takes nodes with free devices, the driver's first, then by address; it fails at its start if the cluster
    lacks them. null: the first nodes with room; then `devices` cannot name nodes."""
    devices_per_node: Annotated[PositiveInt, below(1025, "more than a node has")] = 8
    """Devices of each node. Those of node n are numbered from n * devices_per_node."""
    fill: Literal["pack", "spread"] = "pack"
    """pack: fill one node after the other. spread: take one device of each node in turn, or as many as tensor parallelism needs on one
    node. Needs `nodes`."""

    @property
    def devices(self) -> int:
        """Number of devices of all nodes; 0 if `nodes` is null."""
        return (self.nodes or 0) * self.devices_per_node
