"""The transports by name, and which of them connects the members of a transfer group."""

from __future__ import annotations

from functools import partial

from roll_lite.distributed.weight_sync.broadcast import (
    NCCL,
    BroadcastReceiver,
    BroadcastSender,
    GlooReceiver,
    GlooSender,
    NearAndFarReceiver,
    NearAndFarSender,
)
from roll_lite.distributed.weight_sync.fetch import FetchReceiver, FetchSender
from roll_lite.distributed.weight_sync.group import TransferError, TransferGroup
from roll_lite.distributed.weight_sync.memory import ExportedSegment, SharedSegment, open_exported, open_shared
from roll_lite.distributed.weight_sync.transport import Transport

TRANSPORTS: dict[str, Transport] = {
    "shared_memory": Transport(partial(FetchSender, make=SharedSegment), partial(FetchReceiver, open_segment=open_shared)),
    "gloo": Transport(GlooSender, GlooReceiver),
    "cuda_ipc": Transport(partial(FetchSender, make=ExportedSegment), partial(FetchReceiver, open_segment=open_exported)),
    "nccl": Transport(partial(BroadcastSender, wire=NCCL), partial(BroadcastReceiver, wire=NCCL)),
}
NEAR_AND_FAR = Transport(NearAndFarSender, NearAndFarReceiver)
AUTO = "auto"
"""The first of cuda_ipc, nccl and shared_memory that connects all members; else memory on one machine, gloo between machines."""


def transport_of(group: TransferGroup) -> Transport:
    wanted = group.membership.transport
    if wanted == AUTO:
        return next((TRANSPORTS[name] for name in ("cuda_ipc", "nccl", "shared_memory") if obstacle(name, group) is None), NEAR_AND_FAR)
    if reason := obstacle(wanted, group):
        raise TransferError(f"weight_sync.transport: {wanted}, but {reason}; auto finds a way")
    return TRANSPORTS[wanted]


def obstacle(name: str, group: TransferGroup) -> str | None:
    """Why a transport does not connect all members. None: it does."""
    names, homes = group.membership.members, group.homes
    if name in ("cuda_ipc", "nccl"):
        on_cpu = [who for who, home in zip(names, homes, strict=True) if not home.device]
        if on_cpu:
            return f"{', '.join(on_cpu)} computes on the CPU"
    if name in ("cuda_ipc", "shared_memory"):
        elsewhere = [who for who, home in zip(names, homes, strict=True) if home.machine != homes[0].machine]
        if elsewhere:
            them = "on another machine, in another container, or another user's"
            return f"{', '.join(elsewhere)} cannot map the memory of {names[0]}: {them}"
    if name == "cuda_ipc":
        for sender, receivers in group.membership.channels:
            blind = [names[receiver] for receiver in receivers if homes[sender].device not in homes[receiver].visible]
            if blind:
                return f"{', '.join(blind)} does not see the GPU of {names[sender]}"
    if name == "nccl":
        first: dict[str, str] = {}
        for who, home in zip(names, homes, strict=True):
            if (other := first.setdefault(home.device, who)) != who:
                return f"{other} and {who} share a GPU, which NCCL refuses"
    return None
