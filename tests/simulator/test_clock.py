from __future__ import annotations

import asyncio
import time

import pytest

from roll_lite.simulator.clock import run_virtual


def test_hours_take_no_time_and_timers_fire_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        log: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            log.append((name, loop.time()))

        await asyncio.gather(sleeper("slow", 7200.0), sleeper("fast", 1.5), sleeper("middle", 60.0))
        return log

    started = time.monotonic()
    assert run_virtual(main()) == [("fast", 1.5), ("middle", 60.0), ("slow", 7200.0)]
    assert time.monotonic() - started < 600


def test_time_outs_work_on_the_virtual_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.sleep(7200)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3600)


def test_waiting_for_nothing_is_an_error_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="stuck"):
        run_virtual(main())
