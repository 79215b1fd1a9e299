"""The driver's watchdog: phases' time limits, and a thread that watches the main thread.

The main thread notices a passed limit or a lost Ray session while it waits (pending.py). If it is stuck in a call into Ray, the watchdog
thread records the run's end and kills the process.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from roll_lite.distributed.liveness import AwakeClock, StoppedTime, is_running, name_of

PATROL_SECONDS = 0.5
STUCK_SECONDS = 15.0
"""Seconds for the main thread to act on a passed limit before the process is killed."""


@dataclass(eq=False)
class Limit:
    phase: str
    seconds: float
    setting: str
    started: float
    """Start by the Watchdog's clock, plus the time in which limits were suspended."""

    @property
    def deadline(self) -> float:
        return self.started + self.seconds

    def __str__(self) -> str:
        return f"{self.setting}: {self.seconds:g} s" if self.setting else f"{self.seconds:g} s"


class SessionLost(RuntimeError):
    """Ray's raylet or GCS server on this machine died or was stopped."""


LEAST_SECONDS = 5.0
"""Minimum seconds to save after a SIGTERM, even if less of checkpoint.on_sigterm_s is left."""


class Preempted(BaseException):
    """Raised after a SIGTERM: the run saves its state and ends."""


class PreemptedUnsaved(BaseException):
    """Raised after a SIGTERM while trained weights are recovered: the run ends, and its newest checkpoint stays."""


class Watchdog:
    def __init__(self) -> None:
        self._limits: list[Limit] = []
        self._clock = AwakeClock(lambda: time.monotonic())
        self._processes: dict[psutil.Process, str] = {}
        self._stopped = StoppedTime(PATROL_SECONDS)
        self._lost: str | None = None
        self._lost_at = 0.0
        self._told = False
        self.silence_s: float | None = None
        self.preempted_at: float | None = None
        """Monotonic time of a SIGTERM; the next wait raises Preempted."""
        self._keeps_on = False

    # ------------------------------------------------------------ limits

    def time(self) -> float:
        """Return the monotonic time, without stops of this process while the `patrol` runs."""
        return self._clock.time()

    @contextmanager
    def limit(self, phase: str, seconds: float | None, setting: str | None = None) -> Iterator[Limit]:
        """Limit the block to `seconds`; None or 0: unlimited. `setting`: the limit's YAML path; default: limits.<phase>."""
        seconds = seconds or math.inf
        limit = Limit(phase, seconds, f"limits.{phase}" if setting is None else setting, self.time())
        self._limits.append(limit)
        try:
            yield limit
        finally:
            self._limits.remove(limit)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend all open limits during the block, which sets its own."""
        limits, self._limits = self._limits, []
        started = self.time()
        try:
            yield
        finally:
            for limit in limits:
                limit.started += self.time() - started
            self._limits = limits

    @property
    def nearest(self) -> Limit | None:
        return min(list(self._limits), key=lambda limit: limit.deadline, default=None)

    # ------------------------------------------------------------ Ray's own processes

    @contextmanager
    def over(self, processes: Sequence[psutil.Process]) -> Iterator[None]:
        self._processes = {process: name_of(process) for process in processes}
        self._lost, self._told = None, False
        try:
            yield
        finally:
            self._processes = {}

    def check(self) -> None:
        """Raise SessionLost or Preempted if due; called in every wait of the main thread."""
        if self._lost is not None:
            self._told = True
            raise SessionLost(self._lost)
        if self.preempted_at is not None and not self._keeps_on:
            raise Preempted

    def preempted_for(self, seconds: float) -> float:
        assert self.preempted_at is not None
        return max(LEAST_SECONDS, round(self.preempted_at + seconds - time.monotonic(), 1))

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Delay Preempted until the end of the block, such as a weight update or checkpoint."""
        before, self._keeps_on = self._keeps_on, True
        try:
            yield
        finally:
            self._keeps_on = before

    # ------------------------------------------------------------ the thread

    @contextmanager
    def patrol(self, give_up: Callable[[str], None]) -> Iterator[None]:
        """Run the watchdog thread in the block. If the main thread is stuck, `give_up(cause)` ends the process."""
        ended = threading.Event()
        main = threading.get_ident()
        thread = threading.Thread(target=self._patrol, args=(ended, main, give_up), name="watchdog", daemon=True)
        thread.start()
        try:
            with self._clock.watched():
                yield
        finally:
            ended.set()

    def _patrol(self, ended: threading.Event, main: int, give_up: Callable[[str], None]) -> None:
        while not ended.wait(PATROL_SECONDS):
            if self._lost is None and (cause := self._loss()):
                self._lost, self._lost_at = cause, self.time()
            if cause := self._stuck():
                frame = sys._current_frames().get(main)
                stack = "".join(traceback.format_stack(frame)[-10:]) if frame else ""
                give_up(f"{cause}\n\nthe driver stands at\n{stack}")
                return

    def _stuck(self) -> str | None:
        now = self.time()
        if self._lost is not None and not self._told and now - self._lost_at > STUCK_SECONDS:
            return self._lost
        limit = self.nearest
        if limit is not None and now - limit.deadline > STUCK_SECONDS:
            return f"the driver did not come back from {limit.phase} ({limit})"
        return None

    def _loss(self) -> str | None:
        processes = list(self._processes.items())
        for process, name in processes:
            if not is_running(process):
                what = f"its process {process.pid} ({name})"
                return f"the Ray session is lost: {what} died; it may have been killed from outside, or for want of memory"
        stopped = self._stopped.look([process for process, _ in processes], self.silence_s, "limits.silence")
        return stopped and f"the Ray session is lost: {stopped}"


WATCHDOG = Watchdog()
