"""Write a rank's part of a checkpoint in a separate process while training continues.

A thread would block the rank, as torch.save holds the GIL; a fork of a threaded process can hang. The writer inherits memfds
for tensors, job and result. A result proves success: Ray may reap the exit code.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from roll_lite.distributed.strategy.base import CheckpointWrite
from roll_lite.files import FileRecord, flush, record

ALIGNMENT = 64
TENSORS_SUFFIX = ".distcp"
COPIED_AT_ONCE = 16 << 20


@dataclass(frozen=True)
class TensorPlace:
    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def view(self, memory: mmap.mmap) -> torch.Tensor:
        if self.shape.numel() == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(memory, dtype=self.dtype, count=self.shape.numel(), offset=self.offset).view(self.shape)


@dataclass(frozen=True)
class SaveJob:
    folder: Path
    plan: SavePlan
    contents: dict[Any, TensorPlace | bytes]
    later: list[tuple[Path, int]]
    """(path, memfd) of files written after the tensors."""
    others: list[Path]


class StagedWriter(FileSystemWriter):
    """FileSystemWriter that copies contents to memory; another process writes them."""

    memory: io.FileIO
    plan: SavePlan
    contents: dict[Any, TensorPlace | bytes]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.later: list[tuple[Path, io.FileIO]] = []
        self._metadata: Metadata | None = None

    def write_later(self, file: Path, content: bytes) -> None:
        memory = _memory("file")
        shutil.copyfileobj(io.BytesIO(content), memory, COPIED_AT_ONCE)
        memory.seek(0)
        self.later.append((file, memory))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        found = {item.index: planner.resolve_data(item) for item in plan.items}
        contents: dict[Any, TensorPlace | bytes] = {}
        size = 0
        for index, content in found.items():
            if isinstance(content, torch.Tensor):
                contents[index] = TensorPlace(size, content.dtype, content.shape)
                size += -(-content.nbytes // ALIGNMENT) * ALIGNMENT
            else:
                contents[index] = content.getvalue()
        self.memory = _memory("tensors", max(size, 1))  # mmap refuses zero bytes
        copied = mmap.mmap(self.memory.fileno(), 0)
        for index, content in found.items():
            if isinstance(place := contents[index], TensorPlace) and isinstance(content, torch.Tensor):
                place.view(copied).copy_(content.detach())
        self.plan, self.contents = SavePlan(plan.items, storage_data=plan.storage_data), contents
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._metadata = metadata

    def complete(self, results: list[list[WriteResult]]) -> dict[Path, FileRecord]:
        """Write the index of all ranks' files on the coordinating rank. Return {index path: record} there, else {}."""
        if self._metadata is None:
            return {}
        super().finish(self._metadata, results)
        index = self.folder / ".metadata"
        flush([index])
        return {index: record(index)}


class RunningSave(CheckpointWrite):
    """Save by a background process. `files`: this rank's files; existing ones are flushed and recorded. `finish` is collective."""

    def __init__(self, folder: Path, files: Sequence[Path], writer: StagedWriter) -> None:
        super().__init__(folder)
        self._writer = writer
        later = [(file, memory.fileno()) for file, memory in writer.later]
        job = SaveJob(writer.folder, writer.plan, writer.contents, later, [file for file in files if file.is_file()])
        self._written, self._errors = _memory("written"), _memory("errors")
        with ExitStack() as ours:
            file = _memory("job")
            for each in (file, writer.memory, *(memory for _, memory in writer.later)):
                ours.enter_context(each)
            file.write(pickle.dumps(job))
            descriptors = [file.fileno(), writer.memory.fileno(), self._written.fileno()]
            arguments = ", ".join(map(str, descriptors))
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import write; write({arguments})"],
                pass_fds=[*descriptors, *(descriptor for _, descriptor in later)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def finish(self) -> dict[str, FileRecord]:
        self._process.wait()
        with self._written, self._errors:
            if not (written := _all_of(self._written)):
                said = _all_of(self._errors).decode(errors="replace").strip().splitlines() or ["its process was killed"]
                raise RuntimeError(f"the checkpoint in {self._writer.folder} was not written: {said[-1]}")
        own, records = pickle.loads(written)
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, own)
        records |= self._writer.complete(results)
        return {str(path.relative_to(self.folder)): found for path, found in records.items()}


class _Copied(DefaultSavePlanner):
    def __init__(self, contents: dict[Any, TensorPlace | bytes], memory: mmap.mmap) -> None:
        super().__init__()
        self._contents, self._memory = contents, memory

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        content = self._contents[write_item.index]
        return content.view(self._memory) if isinstance(content, TensorPlace) else io.BytesIO(content)


def write(job_descriptor: int, tensors_descriptor: int, written_descriptor: int) -> None:
    job: SaveJob = pickle.loads(_all_of(io.FileIO(job_descriptor)))
    results = FileSystemWriter(job.folder).write_data(job.plan, _Copied(job.contents, mmap.mmap(tensors_descriptor, 0))).wait()
    files = sorted(job.folder.glob(f"{job.plan.storage_data.prefix}*"))  # also files without tensors
    for path, descriptor in job.later:
        with io.FileIO(descriptor) as memory, path.open("wb") as file:
            shutil.copyfileobj(memory, file, COPIED_AT_ONCE)
        files.append(path)
    files += job.others
    flush(files)
    records = {path: record(path) for path in files}
    io.FileIO(written_descriptor, "w").write(pickle.dumps((results, records)))


def _memory(name: str, size: int = 0) -> io.FileIO:
    file = io.FileIO(os.memfd_create(f"checkpoint-{name}"), "r+")
    file.truncate(size)
    return file


def _all_of(file: io.FileIO) -> bytes:
    file.seek(0)
    return file.read()
