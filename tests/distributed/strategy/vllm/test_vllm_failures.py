"""Engines that die, are given up, or are told to go: what runs comes back, and no process stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from engine_harness import Harness

from roll_lite.data.samples import Completion
from roll_lite.distributed.strategy.inference.engine import EngineDead
from roll_lite.distributed.weight_sync.transport import TransferError

LONG = 1500


@pytest_asyncio.fixture
async def engine(tmp: Path) -> AsyncIterator[Harness]:
    harness = await Harness.start(tmp / "m", max_model_len=2000)
    yield harness
    await harness.stop()


def engine_processes(engine: Harness) -> list[psutil.Process]:
    return list(engine.strategy._processes._all)


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def sockets(folder: str) -> list[Path]:
    return [path for path in Path(folder).glob("*") if path.is_socket()]


async def start(engine: Harness, count: int) -> asyncio.Task[list[Completion]]:
    task = asyncio.create_task(engine.all([engine.request(LONG, min_tokens=LONG) for _ in range(count)]))  # noqa: RUF006
    await asyncio.sleep(0.2)
    return task


async def test_killed_engine(engine: Harness) -> None:
    task = await start(engine, 20)
    (process,) = engine_processes(engine)
    process.kill()
    completions = await asyncio.wait_for(task, 5.0)
    assert len(completions) == 20
    assert {completion.error for completion in completions} == {"the engine's process died"}
    health = await engine.strategy.health()
    assert not health.alive and health.running == health.waiting == 0 and "died" in health.details["failure"]
    assert (await engine.one(4)).error == "the engine's process died"
    with pytest.raises(EngineDead, match="process died"):
        await engine.strategy.resume()
    await engine.strategy.abort()  # of nothing
    started = time.monotonic()
    await engine.strategy.shutdown()
    assert time.monotonic() - started < 5.0
    assert not running([process])


@pytest.mark.slow
async def test_shutdown_is_prompt_while_requests_run(engine: Harness) -> None:
    task = await start(engine, 20)
    processes = engine_processes(engine)
    assert engine.strategy._scratch is not None
    scratch = engine.strategy._scratch.path
    assert sockets(scratch)
    started = time.monotonic()
    await engine.strategy.shutdown()
    assert time.monotonic() - started < 5.0
    assert not running(processes)
    assert not sockets(scratch)
    assert all(completion.error for completion in await asyncio.wait_for(task, 2.0))


@pytest.mark.slow
async def test_engine_killed_while_it_waits_for_weights(engine: Harness) -> None:
    await engine.connect(timeout_s=60.0)
    await engine.strategy.begin_weight_update(engine.tensors)
    receiving = asyncio.create_task(engine.strategy.receive_bucket(engine.tensors[:3]))
    await asyncio.sleep(0.5)
    engine_processes(engine)[0].kill()
    with pytest.raises(EngineDead, match="process died"):
        await asyncio.wait_for(receiving, 5.0)


@pytest.mark.slow
async def test_update_that_breaks_off_ends_the_engine(engine: Harness) -> None:
    """Weights half old, half new must never generate."""
    await engine.connect(timeout_s=2.0)
    assert engine.plan is not None and engine.sender is not None
    await engine.strategy.begin_weight_update(engine.tensors)
    await engine.transfer(0, seed=1)
    waiting = asyncio.create_task(engine.one(4))
    engine.sender.process.kill()
    with pytest.raises(TransferError, match=r"trainer \(transfer rank 0\) did not take part in bucket 1"):
        await engine.strategy.receive_bucket(engine.plan.transfers[1].tensors)
    assert "neither the old nor the new weights" in ((await asyncio.wait_for(waiting, 5.0)).error or "")
    health = await engine.strategy.health()
    assert not health.alive and "half-way" in health.details["failure"]
    psutil.wait_procs(engine_processes(engine), timeout=3.0)
    assert not running(engine_processes(engine))


_HOST = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from engine_harness import Harness

async def main():
    harness = await Harness.start(Path({folder!r}), tensor_parallel={workers})
    print(harness.strategy._scratch.path, *(process.pid for process in harness.strategy._processes._all), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_no_process_outlives_a_killed_host(tmp: Path, workers: int) -> None:
    script = tmp / "host.py"
    script.write_text(_HOST.format(tests=str(Path(__file__).parents[3] / "contracts"), folder=str(tmp / "m"), workers=workers))
    host = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        scratch, *pids = host.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        assert Path(scratch).exists()
        assert len(processes) >= workers and len(running(processes)) == len(processes)
        os.kill(host.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=6.0)
        assert not running(alive)
        assert not Path(scratch).exists()
    finally:
        host.kill()
        host.wait()
