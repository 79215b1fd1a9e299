"""The operating system processes of an engine: are they alive, and are they gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import psutil

_PATIENCE_S = 3.5


class EngineProcesses:
    """vLLM's engine process and its workers."""

    def __init__(self) -> None:
        self._heads: list[psutil.Process] = []
        self._all: list[psutil.Process] = []

    def watch(self, pids: Sequence[int]) -> None:
        self._heads = [psutil.Process(pid) for pid in pids]
        self._all = [process for head in self._heads for process in (head, *head.children(recursive=True))]

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


def is_running(process: psutil.Process) -> bool:
    """A process that has ended but that nobody has waited for is not running."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
