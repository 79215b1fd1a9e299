from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil

T = TypeVar("T")


FROZEN_SECONDS = 5.0
"""Maximum seconds between two calls of a watched AwakeClock; more means that this process was stopped."""


class AwakeClock:
    """Clock that stops while this process is stopped, as by SIGSTOP or `docker pause`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stopped_s = 0.0
        self._looked: float | None = None
        self._lock = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice stops in the block, in which something must call `time` about once a second."""
        self._looked = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._looked = None

    def time(self) -> float:
        with self._lock:
            now = self._clock()
            if self._looked is not None:
                self._stopped_s += now - self._looked if now - self._looked > FROZEN_SECONDS else 0.0
                self._looked = now
            return now - self._stopped_s


class Silence:
    """Measures a process's silence. Each `look` adds the time since the last look, at most `most_s`: pauses of the observer hardly
    count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._looked: float | None = None

    def look(self, most_s: float) -> float:
        now = self._clock()
        if self._looked is not None:
            self.seconds += min(now - self._looked, most_s)
        self._looked = now
        return self.seconds


class Heartbeat:
    """Periodic liveness check. A process that is stopped, hangs or holds the GIL does not answer."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Any]],
        limit_s: float | None,
        pause_s: float,
        look_s: float = 0.5,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`ask`: liveness call. `limit_s`: timeout of an answer. `pause_s`: pause after it. `look_s`: poll interval. `is_busy`: True skips
        the check."""
        self.waited_s = 0.0
        self._silence = Silence(lambda: asyncio.get_running_loop().time())
        self._ask = ask
        self._limit_s = limit_s
        self._pause_s = pause_s
        self._look_s = look_s
        self._is_busy = is_busy

    @property
    def silent_s(self) -> float:
        return self._silence.seconds

    def limit(self) -> float | None:
        return self._limit_s

    async def until_silent(self) -> float:
        """Wait until an answer takes longer than the limit, and return the limit."""
        self.listen(0.0)
        while True:
            if not self._is_busy():
                question = asyncio.ensure_future(self._ask())
                self.waited_s = 0.0
                try:
                    while not question.done():
                        await asyncio.wait((question,), timeout=self._look_s)
                        self.listen()
                        limit_s = self.limit()
                        if limit_s is not None and self.waited_s > limit_s and not question.done():
                            return limit_s
                    question.result()
                finally:
                    question.cancel()
                self._silence.seconds = 0.0
            await asyncio.sleep(self._pause_s)
            self.listen(self._pause_s)

    def listen(self, most_s: float | None = None) -> None:
        """Add the time since the last call, at most `most_s` (default: 2 * `look_s`), to `silent_s` (since the last answer) and `waited_s`
        (since the last question)."""
        before = self.silent_s
        self.waited_s += self._silence.look(2 * self._look_s if most_s is None else most_s) - before


class StoppedTime:
    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._seconds: dict[psutil.Process, float] = {}

    def look(self, processes: Iterable[psutil.Process], limit_s: float | None, setting: str) -> str | None:
        """Return a message about a process stopped longer than `limit_s`, if any. Call every `look_s` seconds. `setting`: the limit's YAML
        path."""
        self._seconds = {process: self._seconds.get(process, 0.0) + self._look_s for process in processes if is_stopped(process)}
        for process, seconds in self._seconds.items():
            if limit_s is not None and seconds > limit_s:
                return f"{describe(process)} has been stopped, as by SIGSTOP, for {limit_s:g} s ({setting})"
        return None


def status_of(process: psutil.Process) -> str | None:
    try:
        return process.status() if process.is_running() else None
    except psutil.Error:
        return None


def is_running(process: psutil.Process) -> bool:
    return status_of(process) not in (None, psutil.STATUS_ZOMBIE)


def is_stopped(process: psutil.Process) -> bool:
    return status_of(process) == psutil.STATUS_STOPPED


def describe(process: psutil.Process) -> str:
    return f"its process {process.pid} ({name_of(process)})"


def name_of(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [process.name()])[0].rpartition("/")[2].partition(" ")[0] or process.name()
    except psutil.Error:
        return "gone"


async def first_of(*works: Awaitable[T]) -> T:
    """Return or raise the outcome of the first awaitable that finishes; cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
