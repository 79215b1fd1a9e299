from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

ALIGNMENT = 64  # bytes in a buffer; a view of any dtype may start at such an offset

Channel = tuple[int, tuple[int, ...]]
"""Member numbers of a sender and its receivers."""


@dataclass(frozen=True)
class ExportedTensor:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    """Training rank that gathers and sends the full tensor."""
    bucket: int
    """Bucket number; a bucket is sent and loaded as one."""
    cast_from: torch.dtype | None = None
    """Original dtype, if the sender casts the tensor."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def aligned_nbytes(self) -> int:
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    def sent_as(self, dtype: torch.dtype | None) -> ExportedTensor:
        """Return the tensor as sent to engines of `dtype`: cast if that saves bytes."""
        if dtype is None or not self.dtype.is_floating_point or dtype.itemsize >= self.dtype.itemsize:
            return self
        return replace(self, dtype=dtype, cast_from=self.dtype)


@dataclass(frozen=True)
class ExportPlan:
    tensors: tuple[ExportedTensor, ...]
    handing_on: tuple[int, ...] = ()
    """Training ranks with GPUs, which can forward others' tensors to engine workers."""

    def buckets(self) -> list[list[ExportedTensor]]:
        grouped: dict[int, list[ExportedTensor]] = {}
        for tensor in self.tensors:
            grouped.setdefault(tensor.bucket, []).append(tensor)
        return [grouped[number] for number in sorted(grouped)]


def bucket_limit(bucket_bytes: int, expert_owners: int, layer_bytes: int) -> int:
    """Return the size limit of a bucket with experts. An engine holds one per owner, together at most `bucket_bytes` or, if larger, one
    layer's experts. `layer_bytes`: one owner's part of a layer."""
    return min(bucket_bytes, max(bucket_bytes // expert_owners, layer_bytes))


@dataclass(frozen=True)
class Route:
    """Transfer of a bucket's tensors from one sender to several engine workers, by member numbers."""

    bucket: int
    sender: int
    receivers: tuple[int, ...]
    tensors: tuple[ExportedTensor, ...]

    @property
    def channel(self) -> Channel:
        return self.sender, self.receivers

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def plain(self) -> dict[str, Any]:
        tensors = [[t.name, list(t.shape), str(t.dtype).removeprefix("torch."), t.owner] for t in self.tensors]
        return {"bucket": self.bucket, "sender": self.sender, "receivers": list(self.receivers), "tensors": tensors}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Route:
        bucket = plain["bucket"]
        tensors = (
            ExportedTensor(name, tuple(shape), getattr(torch, dtype), owner, bucket) for name, shape, dtype, owner in plain["tensors"]
        )
        return Route(bucket, plain["sender"], tuple(plain["receivers"]), tuple(tensors))


@dataclass(frozen=True)
class Membership:
    """Members of a transfer group and their rendezvous store. A membership of higher `epoch` replaces this."""

    epoch: int
    transport: str
    host: str
    port: int
    timeout_s: float
    members: tuple[str, ...]
    channels: tuple[Channel, ...]
    bucket_nbytes: int = 0
    """Size of send buffers: fits any bucket of several tensors. Larger single tensors get larger buffers."""
    trainers: int = 0
    """Number of training ranks."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Membership:
        channels = tuple((sender, tuple(receivers)) for sender, receivers in plain["channels"])
        return Membership(**{**plain, "members": tuple(plain["members"]), "channels": channels})


@dataclass(frozen=True)
class TransferPlan:
    """Routes of a weight update. Member numbers: first the training ranks, then each engine's workers."""

    routes: tuple[Route, ...]
    trainers: tuple[int, ...]
    engines: Mapping[int, int]

    @property
    def members(self) -> tuple[str, ...]:
        workers = [f"engine {engine} worker {worker}" for engine, count in self.engines.items() for worker in range(count)]
        return (*(f"trainer rank {rank}" for rank in self.trainers), *workers)

    def first_member(self, engine: int) -> int:
        before = list(self.engines).index(engine)
        return len(self.trainers) + sum(list(self.engines.values())[:before])

    @property
    def nbytes(self) -> int:
        return sum(route.nbytes for route in self.routes)

    def membership(self, epoch: int, transport: str, host: str, port: int, timeout_s: float) -> Membership:
        channels = tuple(dict.fromkeys(route.channel for route in self.routes))
        several = [route.tensors for route in self.routes if len(route.tensors) > 1]
        largest = max((sum(tensor.aligned_nbytes for tensor in tensors) for tensors in several), default=0)
        return Membership(epoch, transport, host, port, timeout_s, self.members, channels, largest, len(self.trainers))


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def plan_transfers(
    export: ExportPlan, engines: Mapping[int, int], dtype: torch.dtype | None = None, expert_parallel: int = 1
) -> TransferPlan:
    """Plan a weight update. A bucket's owner sends to all engine workers, expert tensors to workers holding them. `engines`: {engine:
    workers}. `expert_parallel`: workers that divide an engine's experts."""
    assert engines and all(workers > 0 for workers in engines.values()), f"engines without workers: {engines}"
    assert expert_parallel == 1 or set(engines.values()) == {expert_parallel}, f"{engines} cannot share experts {expert_parallel}-fold"
    assert export.tensors, "the export plan is empty"
    names = [tensor.name for tensor in export.tensors]
    assert len(set(names)) == len(names), f"exported twice: {sorted({name for name in names if names.count(name) > 1})}"
    trainers = tuple(sorted({*export.handing_on, *(tensor.owner for tensor in export.tensors)}))
    _require_one_owner(export)
    members = range(len(trainers), len(trainers) + sum(engines.values()))
    worker_of = _workers_of_experts(names, expert_parallel)
    ways: dict[tuple[int, int, int | None], list[ExportedTensor]] = {}
    for tensor in sorted(export.tensors, key=lambda one: one.bucket):
        ways.setdefault((tensor.bucket, trainers.index(tensor.owner), worker_of.get(tensor.name)), []).append(tensor.sent_as(dtype))
    routes = [
        # Engines that share experts have equal numbers of workers.
        Route(bucket, sender, tuple(members if worker is None else members[worker::expert_parallel]), tuple(tensors))
        for (bucket, sender, worker), tensors in ways.items()
    ]
    return TransferPlan(tuple(routes), trainers, dict(engines))


def _require_one_owner(export: ExportPlan) -> None:
    """Assert that each bucket has one owner. With two, gloo workers, which forward all buckets through two buffers, could deadlock."""
    for bucket in export.buckets():
        owners = sorted({tensor.owner for tensor in bucket})
        assert len(owners) == 1, f"bucket {bucket[0].bucket} belongs to trainer ranks {owners}; a bucket has one owner"


def _workers_of_experts(names: Sequence[str], expert_parallel: int) -> dict[str, int]:
    """Return {name of an expert's tensor: index of its engine worker}; empty if experts are sharded over all workers."""
    if expert_parallel == 1:
        return {}
    experts = {name: int(found[1]) for name in names if (found := _EXPERT.search(name))}
    count, rest = divmod(max(experts.values(), default=-1) + 1, expert_parallel)
    assert not rest, f"{expert_parallel} workers cannot share {count * expert_parallel + rest} experts"
    return {name: expert // count for name, expert in experts.items()}


def by_bucket(routes: Iterable[Route]) -> list[list[Route]]:
    grouped: dict[int, list[Route]] = {}
    for route in routes:
        grouped.setdefault(route.bucket, []).append(route)
    return list(grouped.values())


def tensors_of(routes: Sequence[Route]) -> list[ExportedTensor]:
    return list({tensor.name: tensor for route in routes for tensor in route.tensors}.values())
