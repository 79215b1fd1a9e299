"""Virtual clock for asyncio: the schedulers' real code simulates hours of rollouts in seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

ASK_OUTSIDE = 100
"""Rounds of the event loop between polls of sockets and threads: a poll in every round would be slow."""


class _JumpingSelector(selectors.SelectSelector):
    """Moves the virtual clock to the next timer instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:  # tasks are ready, so time stands still and polling can wait
            self._rounds += 1
            if self._rounds % ASK_OUTSIDE:
                return []
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("the simulation is stuck: every task waits for something that will not happen")
        self.now += max(0.0, timeout)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run like asyncio.run, on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        try:
            return runner.run(main)
        finally:
            runner.run(_settle())


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
