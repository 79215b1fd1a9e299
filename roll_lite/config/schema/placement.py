"""Section of device placement."""

from __future__ import annotations

from typing import Annotated, Literal

from roll_lite.config.schema.base import PositiveInt, Section, below


class PlacementConfig(Section):
    """Device placement. A role's `devices` is a number or, under every preset, a list; if left out, the role gets as many as the roles it
    shares devices with. Except under by_role, roles that share devices take turns (`offload: true`) unless they set `offload`, and judges
    never share devices. `placement: colocated` is short for `placement: {name: colocated}`."""

    name: Literal["by_role", "colocated", "split", "pairs", "apart"] = "by_role"
    """by_role: `devices: n` means devices 0 to n-1, and roles set `offload`. colocated: all roles share devices. split: models that train
    or score share devices, engines have others. pairs: actor and reference share devices, critic and reward models others, engines have the
    rest. apart: each role has its own."""
    nodes: Annotated[PositiveInt, below(4097, "more than a cluster has")] | None = None
    """Number of nodes, taken from those with free devices: the driver's first, then by address. With too few, the run fails at its start.
    null: the first nodes with room; `devices` cannot name nodes then."""
    devices_per_node: Annotated[PositiveInt, below(1025, "more than a node has")] = 8
    """Devices of each node. Those of node n are numbered from n * devices_per_node."""
    fill: Literal["pack", "spread"] = "pack"
    """pack: fill one node after the other. spread: take one device of each node in turn, or as many as tensor parallelism needs on one
    node. Needs `nodes`."""

    @property
    def devices(self) -> int:
        """Devices of all nodes; 0 if `nodes` is null."""
        return (self.nodes or 0) * self.devices_per_node
