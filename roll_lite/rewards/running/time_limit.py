from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

REPEAT_S = 0.2
"""Seconds between repeated interruptions: a bare `except:` in a library may swallow the first."""


class TimeLimitExceeded(Exception):
    """Computation stopped at its time limit."""


class _Interruption(BaseException):
    """Interruption of a computation. A BaseException, because computations catch Exception."""


def limited(seconds: float, call: Callable[[], T], *, waiting: bool = False) -> T:
    """Return call(). TimeLimitExceeded after `seconds` of CPU time, which does not depend on the machine's load. Main thread only.

    With `waiting`, the limit is in wall-clock time, paused while a nested call counts CPU time.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a computation can be stopped in the main thread of a process only: run it in a process of its own")
    interrupted = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise _Interruption

    number, timer, what = (signal.SIGALRM, signal.ITIMER_REAL, "") if waiting else (signal.SIGPROF, signal.ITIMER_PROF, " of computing")
    clock = (0.0, 0.0) if waiting else signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(number, interrupt)
    try:
        signal.setitimer(timer, seconds, REPEAT_S)
        try:
            result = call()
        finally:
            signal.setitimer(timer, 0)
    except _Interruption:
        raise TimeLimitExceeded(f"more than {seconds:g} s{what}") from None
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
        if not waiting:
            signal.setitimer(signal.ITIMER_REAL, *clock)
    if interrupted:  # the function swallowed the exception: its result is incomplete
        raise TimeLimitExceeded(f"more than {seconds:g} s{what}")
    return result
