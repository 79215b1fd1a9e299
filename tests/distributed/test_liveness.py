"""Silence is counted only while this process itself runs and listens."""

from __future__ import annotations

import asyncio
import subprocess

import psutil
import pytest

from roll_lite.distributed.liveness import Heartbeat, Silence, StoppedTime, first_of
from roll_lite.simulator.clock import run_virtual


def test_a_gap_between_two_looks_counts_little() -> None:
    """Looks at 0, 1 and 2; then this process is stopped until 100."""
    times = iter([0.0, 1.0, 2.0, 100.0, 100.5])
    silence = Silence(lambda: next(times))
    assert [silence.look(2.0) for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, 4.5]


def test_a_heartbeat_counts_from_the_last_answer_and_limits_a_question() -> None:
    async def main() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        heartbeat = Heartbeat(lambda: asyncio.sleep(1.0 if loop.time() < 10.0 else 1e6), 3.0, pause_s=4.0)
        limit_s = await heartbeat.until_silent()
        return limit_s, heartbeat.silent_s, loop.time()

    assert run_virtual(main()) == (3.0, 4.0 + 3.5, 10.0 + 3.5), "asked at 0, 5 and 10, answered at 1 and 6"


def test_a_heartbeat_asks_nothing_of_a_busy_process_and_passes_errors_on() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()

        async def dies() -> None:
            raise ConnectionError("gone")

        with pytest.raises(ConnectionError, match="gone"):
            await Heartbeat(dies, 3.0, 5.0, is_busy=lambda: loop.time() < 12.0).until_silent()
        return loop.time()

    assert run_virtual(main()) == 15.0


def test_a_stopped_process_is_told_after_its_limit() -> None:
    stopped = StoppedTime(0.5)
    with subprocess.Popen(["sleep", "100"]) as sleep:
        process = psutil.Process(sleep.pid)
        try:
            process.suspend()
            while process.status() != psutil.STATUS_STOPPED:
                pass
            found = [stopped.look([process], 1.0, "limits.silence") for _ in range(3)]
            assert found == [None] * 2 + [f"its process {sleep.pid} (sleep) has been stopped, as by SIGSTOP, for 1 s (limits.silence)"]
            assert stopped.look([process], None, "limits.silence") is None
            process.resume()
            while process.status() == psutil.STATUS_STOPPED:
                pass
            assert stopped.look([process], 1.0, "limits.silence") is None
            process.suspend()
            while process.status() != psutil.STATUS_STOPPED:
                pass
            assert stopped.look([process], 1.0, "limits.silence") is None, "counted from its new stop"
        finally:
            sleep.kill()


def test_the_first_to_end_ends_the_others() -> None:
    ended: list[str] = []

    async def work(name: str, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
            return name
        finally:
            ended.append(name)

    async def main() -> str:
        return await first_of(work("slow", 9.0), work("fast", 1.0))

    assert run_virtual(main()) == "fast" and ended == ["fast", "slow"]
