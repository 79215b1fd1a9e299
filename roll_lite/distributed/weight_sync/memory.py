"""Buffers for one bucket of weights, shared with other processes through /proc (host memory) or CUDA IPC."""

from __future__ import annotations

import base64
import hashlib
import mmap
import os
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from roll_lite.distributed.weight_sync.group import Home, TransferError, uuid_of

Export = tuple[Callable[..., torch.Tensor], Sequence[Any]]


class ExportedMemory(NamedTuple):
    """GPU memory exported to one reader; allocated until the reader has opened and dropped it."""

    to: Home
    export: Export
    name: str


class Watched:
    """Byte tensor that knows whether other tensors share its storage."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self._users = _users(whole)

    def is_kept(self) -> bool:
        return _users(self.whole) > self._users


def _users(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _roomy(nbytes: int) -> int:
    """Round up to a power of two, so that reused segments fit more buckets. Untouched pages take no memory."""
    return 1 << (nbytes - 1).bit_length()


class BucketSegment(Watched):
    """Send buffer for a bucket, in private host memory."""

    handle = ""
    exports: Sequence[Export] = ()
    """CUDA IPC exports, one per reader: torch's reference count allows for one reader each."""

    def __init__(self, nbytes: int, readers: int) -> None:
        super().__init__(torch.empty(_roomy(nbytes), dtype=torch.uint8))

    def close(self) -> None:
        """Release the segment; readers keep their mappings."""


class SharedSegment(BucketSegment):
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


class GpuSegment(BucketSegment):
    def __init__(self, nbytes: int, readers: int) -> None:
        Watched.__init__(self, torch.empty(nbytes, dtype=torch.uint8, device=GPU))


class ExportedSegment(GpuSegment):
    """Send buffer exported by CUDA IPC. The handle has the GPU's UUID."""

    def __init__(self, nbytes: int, readers: int) -> None:
        with without_expandable_segments():
            super().__init__(nbytes, readers)
        self.exports = [export(self.whole) for _ in range(readers)]
        self.handle = ";".join([uuid_of(self.whole.device.index), *(base64.b64encode(pickle.dumps(one)).decode() for one in self.exports)])


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Turn the allocator's expandable segments off: their export by CUDA IPC needs permission to copy another process's file
    descriptors."""
    settings = torch._C._accelerator_getAllocatorSettings()
    fixed = re.sub(r"expandable_segments\s*:\s*True", "expandable_segments:False", settings)
    if fixed == settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(fixed)  # all settings: those not named would be reset
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def export(tensor: torch.Tensor) -> Export:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)


def free_abandoned_exports(exported: Iterable[ExportedMemory], homes: Collection[Home], was_opened: Callable[[str], bool]) -> None:
    """Free exports that no reader will release and torch would keep: never opened, or of readers not in `homes`."""
    abandoned = [one for one in exported if not was_opened(one.name) or one.to not in homes]
    for one in abandoned:
        _, arguments = one.export
        # Decrement torch's counter of the export's readers on behalf of the reader.
        arguments[_STORAGE]._release_ipc_counter(*arguments[_COUNTER], device=arguments[_DEVICE])
    if abandoned:
        collect()


def name_of_export(handle: str, reader: int) -> str:
    return hashlib.sha256(handle.split(";")[1 + reader].encode()).hexdigest()


def collect() -> None:
    torch.cuda.ipc_collect()


_STORAGE = 4
"""Index of the storage class in the arguments of torch's `rebuild_cuda_tensor`."""
_DEVICE = 6
_COUNTER = slice(11, 13)

GPU = "cuda"

Open = Callable[[str, int], torch.Tensor]
"""Opens a segment by (handle, reader index). OSError if it is out of reach."""


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


def local_number(uuid: str) -> int:
    return [uuid_of(number) for number in range(torch.cuda.device_count())].index(uuid)


def wait_for_device(tensor: torch.Tensor) -> None:
    """Wait for pending work: other processes may then read the tensor."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def use_device_of(tensor: torch.Tensor) -> None:
    """Select the tensor's GPU for this thread; new threads start with GPU 0."""
    if tensor.is_cuda:
        torch.cuda.set_device(tensor.device)
