"""The operating system processes of an engine: are they alive, and are they gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from roll_lite.distributed.strategy.inference.scratch import SCRATCH

HOST_PID = "ROLL_LITE_ENGINE_HOST_PID"
"""Process whose end must end the engine's processes too, whatever way it ended."""
_PATIENCE_S = 3.5
_HOST_CHECK_S = 1.0
_SHARED = "/dev/shm"


class EngineProcesses:
    """An engine's process and its workers."""

    def __init__(self) -> None:
        self._heads: list[psutil.Process] = []
        self._all: list[psutil.Process] = []
        self._shared: set[Path] = set()

    def watch(self, pids: Sequence[int]) -> None:
        self._heads = [psutil.Process(pid) for pid in pids]
        found = {process.pid: process for head in self._heads for process in (head, *head.children(recursive=True))}
        self._all = [process for process in found.values() if not cleans_up(process)]
        # Semaphores may be the host's own, which removes them itself.
        self._shared = {path for process in self._all for path in shared_memory(process.pid) if not path.name.startswith("sem.")}

    def running(self) -> bool:
        return all(is_running(process) for process in self._heads)

    async def end(self, ask: Callable[[], None]) -> None:
        """Ask them to leave, which must not take long, and see to it that they did."""
        await asyncio.wait({asyncio.create_task(asyncio.to_thread(ask))}, timeout=_PATIENCE_S)
        self.kill()
        await asyncio.to_thread(psutil.wait_procs, self._all, _PATIENCE_S)
        remove(self._shared)

    def kill(self) -> None:
        for process in self._all:
            if is_running(process):
                process.kill()


def cleans_up(process: psutil.Process) -> bool:
    """Python's own resource tracker: it removes what processes leave in shared memory, and then ends by itself."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def is_running(process: psutil.Process) -> bool:
    """A process that has ended but that nobody has waited for is not running."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shared_memory(pid: int) -> set[Path]:
    """Files of shared memory that a process has mapped: one that is killed leaves them behind."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    mapped = (line.split(maxsplit=5)[5] for line in lines if f" {_SHARED}/" in line)
    return {Path(path) for path in mapped if path.startswith(f"{_SHARED}/") and not path.endswith(" (deleted)")}


def remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def when_host_is_gone(act: Callable[[], None]) -> None:
    """In a process of an engine: watch the process that hosts it, however it goes."""
    if HOST_PID not in os.environ:
        return
    host = psutil.Process(int(os.environ[HOST_PID]))

    def watch() -> None:
        while is_running(host):
            time.sleep(_HOST_CHECK_S)
        if SCRATCH in os.environ:
            shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)
        act()

    threading.Thread(target=watch, daemon=True, name="end-with-host").start()


def end_group_with_host() -> None:
    """In an engine's processes, of which one or more lead or share a group of their own: kill the group when the host is gone."""
    when_host_is_gone(lambda: kill_all(_group()))


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """This process among them is the last. What they share in memory goes with them."""
    remove({path for process in processes for path in shared_memory(process.pid)})
    for process in sorted(processes, key=lambda process: process.pid == os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _group() -> list[psutil.Process]:
    """The processes of this one's group but for those that clean up."""
    return [process for process in psutil.process_iter() if _group_of(process.pid) == os.getpgid(0) and not cleans_up(process)]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
