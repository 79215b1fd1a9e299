"""A virtual clock: hours of rollouts in moments, with the very code that runs on the wall clock."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

ASK_OUTSIDE = 100
"""While something can run here, sockets and other threads are asked every so many rounds: that is a system call."""


class _JumpingSelector(selectors.SelectSelector):
    """Instead of sleeping, moves the clock to where the next timer fires."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._passed_by = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:  # something can run: time stands still, and nobody outside need be asked yet
            self._passed_by += 1
            if self._passed_by % ASK_OUTSIDE:
                return []
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("the simulation is stuck: every task waits for something that will not happen")
        self.now += max(0.0, timeout)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while anything can run, and then jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        try:
            return runner.run(main)
        finally:
            runner.run(_settle())


async def _settle() -> None:
    """Whatever was about to start has started, and is cancelled with the rest when the loop closes."""
    for _ in range(5):
        await asyncio.sleep(0)
