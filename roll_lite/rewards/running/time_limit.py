"""A time limit that stops computations, not only waits for them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

REPEAT_S = 0.2
"""A library's bare `except:` may swallow the first interruption; the next comes after this time."""


class TimeLimitExceeded(Exception):
    """The computation was stopped."""


class _Interruption(BaseException):
    """Raised in a computation; no Exception, because computations catch those."""


def limited(seconds: float, call: Callable[[], T], *, waiting: bool = False) -> T:
    """Run call(), interrupted after it has used this much CPU time, the system's for it included: a busy machine changes no outcome.

    With `waiting` every second counts, asleep or not; code that sets alarms of its own takes this one's place. A limit of CPU time inside
    of one of waiting stops the clock of the outer one: on a busy machine it would end a computation that is allowed to go on. Python runs
    signal handlers in the main thread only, so this must be called there.
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
    if interrupted:  # swallowed on its way up: the result is that of a computation broken off somewhere inside
        raise TimeLimitExceeded(f"more than {seconds:g} s{what}")
    return result
