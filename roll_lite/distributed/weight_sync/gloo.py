"""Weights over gloo: host memory and TCP. The transport of machines without GPUs.

A rendezvous store brings the group together and, before each bucket, shows who has arrived: gloo itself only says that
somebody did not. Each sender has a process group of its own with all engine workers, so that trainers which send
different buckets need not wait for each other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from roll_lite.distributed.strategy.base import ExportedTensor, TransferEndpoint
from roll_lite.distributed.weight_sync.transport import (
    TransferError,
    TransferTimeout,
    WeightReceiver,
    WeightSender,
    flat_layout,
    flatten,
    unflatten,
)

LONGEST_PAUSE_S = 0.01  # between two looks at who has come


def open_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """A rendezvous on a port that the system has just given out; its number is `store.port`.

    The store is the server: keep it for as long as the group is used.
    """
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class _Group:
    """One member's view of the transfer group."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, senders: int, timeout_s: float, names: Sequence[str]) -> None:
        assert 0 < senders < world_size and 0 <= rank < world_size, f"rank {rank} of {world_size} with {senders} senders"
        self.rank = rank
        self.senders = senders
        self.timeout_s = timeout_s
        self._names = list(names) or [f"{'trainer' if r < senders else 'engine worker'} (transfer rank {r})" for r in range(world_size)]
        assert len(self._names) == world_size, f"{len(self._names)} names for {world_size} members"
        self._receivers = range(senders, world_size)
        self._sequence = dict.fromkeys(range(senders), 0)
        self._failure: str | None = None
        try:
            self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferTimeout(
                f"weight transfer: {self._names[rank]} found no rendezvous at {host}:{port} within {timeout_s:g} s"
            ) from error
        self._store.set(f"joined/{rank}", "1")
        self._await([f"joined/{other}" for other in range(world_size)], range(world_size), "join the transfer group")
        self._groups = {s: self._make_group(s, host, port) for s in range(senders) if rank >= senders or rank == s}

    def _make_group(self, sender: int, host: str, port: int) -> ProcessGroupGloo:
        members = [sender, *self._receivers]
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(host, port))]
        options._timeout = timedelta(seconds=self.timeout_s)
        return ProcessGroupGloo(PrefixStore(f"gloo/{sender}", self._store), members.index(self.rank), len(members), options)

    def broadcast(self, buffer: torch.Tensor, sender: int, signature: str) -> None:
        """Meet at the bucket's door, compare notes, exchange bytes."""
        if self._failure is not None:
            raise TransferError(f"weight transfer: connect again, the group failed earlier: {self._failure}")
        try:
            self._meet(sender, signature)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._groups[sender].broadcast([buffer], options).wait()  # type: ignore[attr-defined]
        except TransferError as error:
            self._failure = str(error)
            raise
        except RuntimeError as error:
            me, them = self._names[self.rank], self._names[sender]
            self._failure = f"weight transfer: the connection broke in the middle of a bucket from {them} (seen by {me}): {error}"
            raise TransferError(self._failure) from error

    def _meet(self, sender: int, signature: str) -> None:
        number = self._sequence[sender]
        self._sequence[sender] = number + 1
        self._store.set(f"bucket/{sender}/{number}/{self.rank}", signature)
        # Everybody has read the keys of the bucket before the last one: its sender came here only after all had received the last.
        self._store.delete_key(f"bucket/{sender}/{number - 2}/{self.rank}")
        others = list(self._receivers) if self.rank == sender else [sender]
        keys = [f"bucket/{sender}/{number}/{other}" for other in others]
        self._await(keys, others, f"take part in bucket {number} from {self._names[sender]}")
        for other, theirs in zip(others, self._store.multi_get(keys), strict=True):
            if theirs.decode() != signature:
                me, them = self._names[self.rank], self._names[other]
                raise TransferError(f"weight transfer: out of step, {me} is at a bucket of {signature}, {them} at one of {theirs.decode()}")

    def _await(self, keys: Sequence[str], owners: Iterable[int], what: str) -> None:
        """Looks again and again: the store's own waiting writes a warning for each time-out and cannot say which key is missing."""
        deadline = time.monotonic() + self.timeout_s
        pause = 0.0002
        missing = dict(zip(keys, owners, strict=True))
        try:
            while missing:
                missing = {key: owner for key, owner in missing.items() if not self._store.check([key])}
                if missing and time.monotonic() > deadline:
                    names = ", ".join(self._names[owner] for owner in missing.values())
                    me = self._names[self.rank]
                    raise TransferTimeout(f"weight transfer: {names} did not {what} within {self.timeout_s:g} s ({me} waited)")
                if missing:
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        except dist.DistNetworkError as error:
            raise TransferError(f"weight transfer: {self._names[self.rank]} lost the rendezvous: {error}") from error

    def close(self) -> None:
        self._failure = "closed"
        self._groups.clear()


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to the rendezvous. Left alone, gloo asks for the address of the machine's name, which
    often cannot be resolved, or is one that others cannot reach."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


class GlooSender(WeightSender):
    """The end of a trainer that owns buckets. Making it blocks until all members have come."""

    def __init__(
        self, host: str, port: int, rank: int, world_size: int, senders: int = 1, timeout_s: float = 300.0, names: Sequence[str] = ()
    ) -> None:
        assert rank < senders, f"transfer rank {rank} is not among the {senders} senders"
        self._group = _Group(host, port, rank, world_size, senders, timeout_s, names)

    def send(self, bucket: Sequence[ExportedTensor], tensors: Mapping[str, torch.Tensor]) -> None:
        layout = flat_layout(bucket)
        self._group.broadcast(flatten(bucket, tensors, layout), self._group.rank, layout.signature)

    def close(self) -> None:
        self._group.close()


class GlooReceiver(WeightReceiver):
    """The end of one engine worker."""

    def __init__(self, endpoint: TransferEndpoint, worker: int) -> None:
        self._group = _Group(
            endpoint.host, endpoint.port, endpoint.first_rank + worker, endpoint.world_size, endpoint.senders, endpoint.timeout_s, ()
        )

    def receive(self, bucket: Sequence[ExportedTensor], sender: int) -> dict[str, torch.Tensor]:
        layout = flat_layout(bucket)
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        self._group.broadcast(buffer, sender, layout.signature)
        return unflatten(buffer, bucket, layout)

    def close(self) -> None:
        self._group.close()
