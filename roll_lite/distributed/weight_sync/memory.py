"""Memory for buckets, and how another process comes to read it: the one thing in which transports differ whose receivers fetch.

On the host a segment has no name, only a number in the process that made it, through which others open it; the last process that maps one
takes it with it, however it ends. On a GPU a segment is exported by CUDA IPC, once for each reader, since an export counts one reader.
"""

from __future__ import annotations

import base64
import hashlib
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from roll_lite.distributed.weight_sync.devices import Home, local_number, uuid_of
from roll_lite.distributed.weight_sync.group import TransferError

Export = tuple[Callable[..., torch.Tensor], Sequence[Any]]
"""A function and its arguments, which make the tensor in another process."""


class Lent(NamedTuple):
    """What a reader has to give back once it has opened it."""

    to: Home
    export: Export
    name: str
    """The reader says under it that it has."""


class Watched:
    """Bytes of which views are given out; it knows whether some are still there."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self._users = _users(whole)

    def is_kept(self) -> bool:
        return _users(self.whole) > self._users


def _users(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _roomy(nbytes: int) -> int:
    """Buckets differ in size, and use each other's segments. What nobody writes to takes no memory on the host."""
    return 1 << (nbytes - 1).bit_length()


class Segment(Watched):
    """A sender's buffer on the host, which no other process reads."""

    handle = ""
    """How others get at it."""
    exports: Sequence[Export] = ()
    """One for each reader, who has to give it back."""

    def __init__(self, nbytes: int, readers: int) -> None:
        super().__init__(torch.empty(_roomy(nbytes), dtype=torch.uint8))

    def close(self) -> None:
        """Whoever has opened it keeps it."""


class SharedSegment(Segment):
    """On the host."""

    def __init__(self, nbytes: int, readers: int) -> None:
        nbytes = _roomy(nbytes)
        descriptor = os.memfd_create("roll_lite_weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            Watched.__init__(self, torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8))
        except OSError as error:
            os.close(descriptor)
            raise TransferError(f"weight transfer: no shared memory for a bucket of {nbytes >> 20} MB: {error}") from error
        self._descriptor = descriptor
        self.handle = f"/proc/{os.getpid()}/fd/{descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)


class GpuSegment(Segment):
    """On this process's GPU, for itself alone."""

    def __init__(self, nbytes: int, readers: int) -> None:
        Watched.__init__(self, torch.empty(nbytes, dtype=torch.uint8, device=GPU))


class ExportedSegment(GpuSegment):
    """On this process's GPU. Readers with other lists of devices find that by its UUID."""

    def __init__(self, nbytes: int, readers: int) -> None:
        super().__init__(nbytes, readers)
        self.exports = [export(self.whole) for _ in range(readers)]
        self.handle = ";".join([uuid_of(self.whole.device.index), *(base64.b64encode(pickle.dumps(one)).decode() for one in self.exports)])


def export(tensor: torch.Tensor) -> Export:
    """What one reader makes the tensor of."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)


def take_back(lent: Iterable[Lent], homes: Collection[Home], was_opened: Callable[[str], bool]) -> None:
    """What was exported to readers who have died, or who never came to open it. `homes`: of all processes that are left, each of which
    gives back what it has opened.

    torch keeps exported memory, also when the exporter has dropped it, until every reader has counted its export down.
    """
    abandoned = [one for one in lent if not was_opened(one.name) or one.to not in homes]
    for one in abandoned:
        count_down(one.export)
    if abandoned:
        collect()


def name_of_export(handle: str, reader: int) -> str:
    return hashlib.sha256(handle.split(";")[1 + reader].encode()).hexdigest()


def count_down(one: Export) -> None:
    """As a reader does when it drops the tensor."""
    _, arguments = one
    arguments[_STORAGE]._release_ipc_counter(*arguments[_COUNTER], device=arguments[_DEVICE])


def collect() -> None:
    """torch looks which exports nobody counts any more."""
    torch.cuda.ipc_collect()


_STORAGE = 4
"""Place of the storage's class in an export."""
_DEVICE = 6
"""Of the GPU's number: the sender's, which the receiver may know by another one."""
_COUNTER = slice(11, 13)
"""Of its counter's file and place there."""

GPU = "cuda"

Open = Callable[[str, int], torch.Tensor]
"""Handle, and place among its readers -> the segment. OSError where it cannot be reached."""


def open_shared(handle: str, reader: int) -> torch.Tensor:
    descriptor = os.open(handle, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes into it
        return torch.from_numpy(np.frombuffer(memory, np.uint8))


def open_exported(handle: str, reader: int) -> torch.Tensor:
    uuid, *exports = handle.split(";")
    rebuild, arguments = pickle.loads(base64.b64decode(exports[reader]))
    return rebuild(*arguments[:_DEVICE], local_number(uuid), *arguments[_DEVICE + 1 :])
