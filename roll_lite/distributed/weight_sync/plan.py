"""Who sends what to whom: made once from a trainer's export plan and the engines' sizes.

Transfer ranks: trainers that own buckets come first, in the order of their trainer ranks, then the workers of engine 0,
of engine 1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_lite.distributed.strategy.base import ExportedTensor, ExportPlan, TransferEndpoint
from roll_lite.distributed.weight_sync.transport import tensor_bytes


@dataclass(frozen=True)
class Transfer:
    """One bucket's way: from one trainer to all engine workers."""

    bucket: int
    owner: int
    """Trainer rank that holds the gathered tensors."""
    sender: int
    """The same rank's number in the transfer group."""
    tensors: tuple[ExportedTensor, ...]
    nbytes: int


@dataclass(frozen=True)
class TransferPlan:
    transfers: tuple[Transfer, ...]
    """In the order in which they are carried out."""
    senders: tuple[int, ...]
    """Trainer ranks; the place in the tuple is the transfer rank."""
    engine_workers: tuple[int, ...]
    """Workers of each engine."""

    @property
    def world_size(self) -> int:
        return len(self.senders) + sum(self.engine_workers)

    def first_rank(self, engine: int) -> int:
        return len(self.senders) + sum(self.engine_workers[:engine])

    def members(self) -> list[str]:
        """What to call each transfer rank in a message."""
        names = [f"trainer rank {rank}" for rank in self.senders]
        for engine, workers in enumerate(self.engine_workers):
            names += [f"engine {engine} worker {worker}" for worker in range(workers)]
        return names

    def endpoint(self, engine: int, transport: str, host: str, port: int, timeout_s: float) -> TransferEndpoint:
        return TransferEndpoint(transport, host, port, self.world_size, self.first_rank(engine), len(self.senders), timeout_s)


def sender_of(owner: int, tensors: Sequence[ExportedTensor]) -> int:
    """Transfer rank of a trainer rank, given all tensors of the plan."""
    return sorted({tensor.owner for tensor in tensors}).index(owner)


def plan_transfers(export: ExportPlan, engine_workers: Sequence[int]) -> TransferPlan:
    assert engine_workers and all(workers > 0 for workers in engine_workers), f"engines without workers: {engine_workers}"
    assert export.tensors, "the export plan is empty"
    names = [tensor.name for tensor in export.tensors]
    assert len(set(names)) == len(names), f"exported twice: {sorted({name for name in names if names.count(name) > 1})}"
    transfers = []
    for bucket in export.buckets():
        owners = {tensor.owner for tensor in bucket}
        assert len(owners) == 1, f"bucket {bucket[0].bucket} has several owners: {sorted(owners)}"
        owner = owners.pop()
        size = sum(tensor_bytes(tensor) for tensor in bucket)
        transfers.append(Transfer(bucket[0].bucket, owner, sender_of(owner, export.tensors), tuple(bucket), size))
    senders = tuple(sorted({tensor.owner for tensor in export.tensors}))
    return TransferPlan(tuple(transfers), senders, tuple(engine_workers))
