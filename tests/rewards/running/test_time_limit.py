"""A limit that stops computations, whatever they do with exceptions."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited


def spin() -> None:
    deadline = time.process_time() + 5
    while time.process_time() < deadline:
        pass


def test_results_pass_and_the_process_is_left_as_it_was() -> None:
    before = signal.getsignal(signal.SIGPROF)
    assert limited(1.0, lambda: 42) == 42
    with pytest.raises(TimeLimitExceeded, match=r"more than 0\.05 s of computing"):
        limited(0.05, spin)
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        limited(1.0, lambda: 1 // 0)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_code_that_catches_everything_is_stopped_too() -> None:
    def stubborn() -> str:
        for _ in range(3):
            try:
                spin()
            except:  # noqa: E722 - what is tested
                continue
        return "done at last"

    started = time.process_time()
    with pytest.raises(TimeLimitExceeded):
        limited(0.05, stubborn)
    assert time.process_time() - started < 3


def test_time_in_the_system_counts() -> None:
    def copy() -> None:
        with Path("/dev/zero").open("rb", buffering=0) as zeros:
            block = bytearray(1 << 24)
            while time.process_time() - started < 20:
                zeros.readinto(block)

    started = time.process_time()
    with pytest.raises(TimeLimitExceeded):
        limited(0.2, copy)
    assert time.process_time() - started < 10


def test_waiting_is_not_computing() -> None:
    assert limited(0.05, lambda: time.sleep(0.2)) is None


def test_only_the_main_thread_can_be_stopped() -> None:
    caught: list[str] = []

    def elsewhere() -> None:
        try:
            limited(1.0, lambda: None)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert caught and "in the main thread" in caught[0]
