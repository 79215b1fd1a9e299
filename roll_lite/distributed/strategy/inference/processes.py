"""The operating system processes of an engine: are they alive, and are they gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence

import psutil

from roll_lite.distributed.strategy.inference.scratch import SCRATCH

HOST_PID = "ROLL_LITE_ENGINE_HOST_PID"
"""Process whose end must end the engine's processes too, whatever way it ended."""
_PATIENCE_S = 3.5
_HOST_CHECK_S = 1.0


class EngineProcesses:
    """An engine's process and its workers."""

    def __init__(self) -> None:
        self._heads: list[psutil.Process] = []
        self._all: list[psutil.Process] = []

    def watch(self, pids: Sequence[int]) -> None:
        self._heads = [psutil.Process(pid) for pid in pids]
        found = {process.pid: process for head in self._heads for process in (head, *head.children(recursive=True))}
        self._all = [process for process in found.values() if not cleans_up(process)]

    def running(self) -> bool:
        return all(is_running(process) for process in self._heads)

    async def end(self, ask: Callable[[], None]) -> None:
        """Ask them to leave, which must not take long, and see to it that they did."""
        await asyncio.wait({asyncio.create_task(asyncio.to_thread(ask))}, timeout=_PATIENCE_S)
        self.kill()
        await asyncio.to_thread(psutil.wait_procs, self._all, _PATIENCE_S)

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


def end_group_with_host() -> None:
    """In an engine's processes, of which one or more lead or share a group of their own: kill the group when the host is gone."""
    if HOST_PID not in os.environ:
        return
    host = psutil.Process(int(os.environ[HOST_PID]))

    def watch() -> None:
        while is_running(host):
            time.sleep(_HOST_CHECK_S)
        if SCRATCH in os.environ:
            shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-host").start()
