"""Time limits, and the thread that steps in where the driver itself hangs."""

from __future__ import annotations

import math
import subprocess
import time

import psutil
import pytest

from roll_lite.distributed import watchdog as module
from roll_lite.distributed.watchdog import SessionLost, Watchdog

SECONDS = 60.0


def test_a_driver_that_hangs_is_given_up_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.5)
    causes: list[str] = []
    dog = Watchdog()
    with dog.patrol(causes.append), dog.limit("train", 0.5):
        deadline = time.monotonic() + SECONDS
        while not causes and time.monotonic() < deadline:
            time.sleep(0.05)
    (cause,) = causes
    assert cause.startswith("the driver did not come back from train (limits.train: 0.5 s)")
    assert "the driver stands at" in cause and "test_a_driver_that_hangs" in cause


def test_no_limit_is_none() -> None:
    dog = Watchdog()
    for none in (0, None):
        with dog.limit("generate", none):
            # Not no limit at all: a cluster's own for calls of no phase would count instead (pending.py).
            assert dog.nearest is not None and dog.nearest.deadline == math.inf
    with dog.limit("train", 100), dog.limit("generate", 10):
        assert dog.nearest is not None and str(dog.nearest) == "limits.generate: 10 s"
    assert dog.nearest is None


def test_limits_can_be_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    dog = Watchdog()
    with dog.limit("sync_weights", 300) as limit:
        now = 100.0
        with dog.suspended():
            now = 5100.0
            assert dog.nearest is None
        assert dog.nearest is limit and limit.deadline == 5300.0, "200 s are left"
    assert dog.nearest is None


@pytest.mark.parametrize("first", ["the main thread", "the watchdog"])
def test_time_in_which_the_driver_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    now, causes = time.monotonic, list[str]()
    ahead = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now() + ahead)
    dog = Watchdog()
    with dog.patrol(causes.append), dog.limit("train", 100.0) as limit:
        ahead = 1000.0
        if first == "the watchdog":
            time.sleep(3 * module.PATROL_SECONDS)
        assert 50.0 < limit.deadline - dog.time() <= 100.0 and causes == []
    ahead = 2000.0
    assert limit.deadline - dog.time() < 0.0, "nothing is noticed where nobody looks"


@pytest.mark.parametrize(("how", "said"), [("kill", r"\(sleep\) died"), ("suspend", r"\(sleep\) has been stopped, as by SIGSTOP, for 1 s")])
def test_a_lost_process_of_the_session_is_told_where_the_driver_waits(how: str, said: str) -> None:
    dog = Watchdog()
    dog.silence_s = 1.0
    process = subprocess.Popen(["sleep", "1000"])
    try:
        with dog.patrol(lambda cause: None), dog.over([psutil.Process(process.pid)]):
            dog.check()
            getattr(psutil.Process(process.pid), how)()
            with pytest.raises(SessionLost, match=said):
                deadline = time.monotonic() + SECONDS
                while time.monotonic() < deadline:
                    dog.check()
                    time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
