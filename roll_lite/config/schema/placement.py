"""Section of device placement."""

from __future__ import annotations

from typing import Annotated, Literal

from roll_lite.config.schema.base import PositiveInt, Section, below


class PlacementConfig(Section):
    """Assigns devices to roles; `placement: colocated` names a preset. If a role's `devices` is a number, it says how many; without it, the
    role takes as many as the others of its group. A list names the devices, under any preset. Roles that share devices by a preset take
    turns on them (`offload: true`), unless their `offload` says otherwise. Judges have separate devices under every preset.
    """

    name: Literal["by_role", "colocated", "split", "pairs", "apart"] = "by_role"
    """by_role: a number n is devices 0 to n-1, and each role sets its `offload`. colocated: all roles on the same devices. split: models
    that train or score on some, engines on others. pairs: actor and reference, critic and reward models, engines. apart: every role on
    separate devices.
    """
    nodes: Annotated[PositiveInt, below(4097, "more than a cluster has")] | None = None
    """Number of nodes with devices. The run takes nodes whose devices are free, the driver's first, then by address; its start checks the
    cluster against this number. Absent: the first nodes with room, which cannot be named."""
    devices_per_node: Annotated[PositiveInt, below(1025, "more than a node has")] = 8
    """Devices of each of the `nodes`: node n has devices n * devices_per_node and following."""
    fill: Literal["pack", "spread"] = "pack"
    """Order in which roles take devices. pack: fill a node before the next; spread: take one of each node in turn, or as many as
    tensor-parallel ranks need (needs `nodes`)."""

    @property
    def devices(self) -> int:
        """Number of devices of all nodes; 0 if `nodes` is absent."""
        return (self.nodes or 0) * self.devices_per_node
