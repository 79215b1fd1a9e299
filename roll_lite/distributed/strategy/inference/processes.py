from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from roll_lite.distributed.liveness import is_running, name_of
from roll_lite.distributed.session_guard import SHARED, remove_folder
from roll_lite.distributed.strategy.inference.scratch import SCRATCH

HOST_PID = "ROLL_LITE_ENGINE_HOST_PID"
"""Environment variable: pid of the hosting process, with which the engine's processes end."""
_PATIENCE_S = 3.5
_HOST_CHECK_S = 1.0


COMPILERS = frozenset({"ninja", "nvcc", "cudafe++", "cicc", "ptxas", "ptxas-blackwell", "nvlink", "fatbinary"})


class EngineProcesses:
    def __init__(self) -> None:
        self.all: list[psutil.Process] = []
        self._lasting: list[psutil.Process] = []
        self._shared: set[Path] = set()

    def watch(self, pids: Sequence[int]) -> None:
        heads = [psutil.Process(pid) for pid in pids]
        found = {process.pid: process for head in heads for process in (head, *head.children(recursive=True))}
        self.all = [process for process in found.values() if not cleans_up(process)]
        self._lasting = [process for process in self.all if process in heads or not _may_end(process)]
        self._shared = _left_behind(self.all)

    def running(self) -> bool:
        return all(is_running(process) for process in self._lasting)

    def are_compiling(self) -> bool:
        own = {process.pid for process in self.all}
        compilers = [process for process in psutil.process_iter() if name_of(process) in COMPILERS]
        return any(not own.isdisjoint(_ancestors(compiler)) for compiler in compilers)

    async def end(self, ask: Callable[[], None]) -> None:
        """Call `ask`, which requests an exit; then kill what still runs."""
        await asyncio.wait({asyncio.create_task(asyncio.to_thread(ask))}, timeout=_PATIENCE_S)
        self._kill()
        await asyncio.to_thread(psutil.wait_procs, self.all, _PATIENCE_S)
        remove(self._shared)

    def kill(self) -> None:
        """Kill the processes and remove their shared memory without waiting: the caller may be killed soon."""
        self._kill()
        remove(self._shared)

    def _kill(self) -> None:
        for process in self.all:
            if is_running(process):
                process.kill()


def _ancestors(process: psutil.Process) -> set[int]:
    try:
        return {parent.pid for parent in process.parents()}
    except psutil.Error:
        return set()


def _may_end(process: psutil.Process) -> bool:
    # Compilers and other programs do, and torch's compile workers when they have been idle for a minute.
    try:
        return process.exe() != psutil.Process().exe() or any("compile_worker" in word for word in process.cmdline())
    except psutil.Error:
        return True


def cleans_up(process: psutil.Process) -> bool:
    """True for Python's resource tracker, which removes dead processes' shared memory and exits."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def shared_memory(pid: int) -> set[Path]:
    """Return shared-memory files that a process has mapped; they outlive a kill."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    mapped = (line.split(maxsplit=5)[5] for line in lines if f" {SHARED}/" in line)
    return {Path(path) for path in mapped if path.startswith(f"{SHARED}/") and not path.endswith(" (deleted)")}


def _left_behind(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the processes' shared-memory files, without semaphores, which may be the hosting process's."""
    return {path for process in processes for path in shared_memory(process.pid) if not path.name.startswith("sem.")}


def remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def when_host_is_gone(act: Callable[[], None]) -> None:
    if HOST_PID in os.environ:
        _when_gone(int(os.environ[HOST_PID]), act)


def end_group_with_host_or_leader() -> None:
    leader = os.getpgid(0)

    def end() -> None:
        kill_all(group(leader))

    when_host_is_gone(end)
    if leader != os.getpid():
        _when_gone(leader, end)


def _when_gone(pid: int, act: Callable[[], None]) -> None:
    """Wait in a thread for the end of process `pid`; then call `act`, after removing the engine's scratch folder if the hosting process has
    ended too."""
    watched, host = _process(pid), _process(int(os.environ.get(HOST_PID, os.getpid())))

    def watch() -> None:
        while watched is not None and is_running(watched):
            time.sleep(_HOST_CHECK_S)
        if SCRATCH in os.environ and (host is None or not is_running(host)):
            remove_folder(Path(os.environ[SCRATCH]))
        act()

    threading.Thread(target=watch, daemon=True, name=f"end-with-{pid}").start()


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Remove the processes' shared memory; kill all but Python's resource trackers, the caller last."""
    remove(_left_behind(processes))
    killed = [process for process in processes if not cleans_up(process)]
    for process in sorted(killed, key=lambda process: process.pid == os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def group(leader: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _group_of(process.pid) == leader]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
