"""Engines of their own: other models, two at a time, over two workers, and those that die."""

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
from engine_harness import Harness, Make, assert_log_probs, random_state, require
from support_models import Family

from roll_lite.distributed.strategy.inference.engine import EngineDead
from roll_lite.distributed.weight_sync.checksum import checksum
from roll_lite.distributed.weight_sync.transport import TransferError

LONG = 1500
NOTICED_S = 10.0
"""Seconds in which a death is noticed; a second or two on an idle machine."""


async def serves_reference(engine: Harness, temperature: float = 0.0) -> None:
    completion = await engine.one(24)
    assert list(completion.token_ids) == engine.hf_greedy(24)
    assert_log_probs(completion, engine.hf_logits(completion.token_ids))
    sampled = await engine.one(24, temperature=0.7, seed=3)
    assert_log_probs(sampled, engine.hf_logits(sampled.token_ids) / 0.7)


def expected_checksums(engine: Harness, seed: int) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in random_state(engine.family, engine.tied, seed, engine.dtype).items()}


OTHER_MODELS = [
    pytest.param("vllm", "llama", False, id="vllm-llama-untied"),
    pytest.param("vllm", "qwen3", True, id="vllm-qwen3-tied", marks=pytest.mark.slow),
    pytest.param("sglang", "llama", False, id="sglang-llama-untied", marks=pytest.mark.slow),
    pytest.param("sglang", "qwen3", True, id="sglang-qwen3-tied", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "family", "tied"), OTHER_MODELS)
async def test_numbers_of_other_models(make: Make, family: Family, tied: bool, tmp: Path) -> None:
    require(make)
    engine = await Harness.start(tmp / "m", family, tied, make=make)
    try:
        await serves_reference(engine)
        await engine.update(seed=7)
        await serves_reference(engine)
        assert await engine.strategy.weight_checksums() == expected_checksums(engine, 7)
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_bfloat16_is_held_bit_for_bit(make: Make, tmp: Path) -> None:
    """Other kernels, other packed layouts than in float32."""
    engine = await Harness.start(tmp / "m", dtype="bfloat16", make=make)
    try:
        await engine.update(seed=171)
        assert await engine.strategy.weight_checksums() == expected_checksums(engine, 171)
        completion = await engine.one(32, temperature=1.0, seed=1)
        assert engine.mean_difference(completion) < 0.1
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_two_engines_are_independent(make: Make, tmp: Path) -> None:
    first, second = [await Harness.start(tmp / name, make=make) for name in ("a", "b")]
    try:
        await first.update(seed=31)
        await serves_reference(first)
        await serves_reference(second)
        first.kill()
        await serves_reference(second)
        assert (await second.strategy.health()).alive
    finally:
        await first.stop()
        await second.stop()


@pytest.mark.slow
async def test_two_workers(make: Make, tmp: Path) -> None:
    """A single key/value head, which both workers hold."""
    engine = await Harness.start(tmp / "m", tensor_parallel=2, make=make)
    try:
        await serves_reference(engine)
        await engine.update(seed=21)
        await serves_reference(engine)
        assert await engine.strategy.weight_checksums() == expected_checksums(engine, 21)
        _, task = await engine.started(1, 450)
        engine.processes()[-1].kill()  # one of its processes, not the first
        assert "died" in ((await asyncio.wait_for(task, 2 * NOTICED_S))[0].error or "")
        assert not (await engine.strategy.health()).alive
    finally:
        await engine.stop()


# ---------------------------------------------------------------- death


@pytest_asyncio.fixture
async def mortal(make: Make, tmp: Path) -> AsyncIterator[Harness]:
    harness = await Harness.start(tmp / "m", max_model_len=2000, make=make)
    yield harness
    await harness.stop()


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def sockets(folder: str) -> list[Path]:
    return [path for path in Path(folder).glob("*") if path.is_socket()]


@pytest.mark.slow
async def test_a_killed_engine_is_noticed_and_another_takes_its_place(mortal: Harness, tmp: Path) -> None:
    _, task = await mortal.started(20, LONG)
    processes = mortal.processes()
    mortal.kill()
    completions = await asyncio.wait_for(task, NOTICED_S)
    assert len(completions) == 20
    assert {completion.error for completion in completions} == {"the engine's process died"}
    health = await mortal.strategy.health()
    assert not health.alive and health.running == health.waiting == 0 and "died" in health.details["failure"]
    assert (await mortal.one(4)).error == "the engine's process died"
    with pytest.raises(EngineDead, match="process died"):
        await mortal.strategy.resume()
    await mortal.strategy.abort()  # of nothing
    await asyncio.wait_for(mortal.strategy.shutdown(), 2 * NOTICED_S)
    assert not running(processes)
    again = await Harness.start(tmp / "again", make=mortal.make)
    try:
        await again.update(seed=41)
        await serves_reference(again)
    finally:
        await again.stop()


@pytest.mark.slow
async def test_shutdown_leaves_nothing_behind_while_requests_run(mortal: Harness) -> None:
    _, task = await mortal.started(20, LONG)
    processes = mortal.processes()
    assert mortal.strategy._scratch is not None
    scratch = mortal.strategy._scratch.path
    assert Path(scratch).exists() and running(processes)  # noqa: ASYNC240
    await asyncio.wait_for(mortal.strategy.shutdown(), 2 * NOTICED_S)
    assert not running(processes)
    assert not Path(scratch).exists()  # noqa: ASYNC240
    assert all(completion.error for completion in await asyncio.wait_for(task, NOTICED_S))


@pytest.mark.slow
async def test_an_engine_killed_while_it_waits_for_weights(mortal: Harness) -> None:
    await mortal.connect(timeout_s=60.0)
    await mortal.strategy.begin_weight_update(mortal.tensors)
    receiving = asyncio.create_task(mortal.strategy.receive_bucket(mortal.tensors[:3]))
    await asyncio.sleep(0.5)
    mortal.kill()
    with pytest.raises(EngineDead, match="process died"):
        await asyncio.wait_for(receiving, NOTICED_S)


@pytest.mark.slow
async def test_an_update_that_breaks_off_ends_the_engine(mortal: Harness) -> None:
    """Weights half old, half new must never generate."""
    await mortal.connect(timeout_s=5.0)
    assert mortal.plan is not None and mortal.sender is not None
    await mortal.strategy.begin_weight_update(mortal.tensors)
    await mortal.transfer(0, seed=1)
    waiting = asyncio.create_task(mortal.one(4))
    mortal.sender.process.kill()
    with pytest.raises(TransferError, match=r"trainer \(transfer rank 0\) did not take part in bucket 1"):
        await mortal.strategy.receive_bucket(mortal.plan.transfers[1].tensors)
    assert "neither the old nor the new weights" in ((await asyncio.wait_for(waiting, NOTICED_S)).error or "")
    health = await mortal.strategy.health()
    assert not health.alive and "half-way" in health.details["failure"]
    psutil.wait_procs(mortal.processes(), timeout=NOTICED_S)
    assert not running(mortal.processes())


_HOST = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from engine_harness import Harness

async def main():
    harness = await Harness.start(Path({folder!r}), tensor_parallel={workers}, make={make!r})
    print(harness.strategy._scratch.path, *(process.pid for process in harness.processes()), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_no_process_outlives_a_killed_host(make: Make, tmp: Path, workers: int) -> None:
    script = tmp / "host.py"
    script.write_text(_HOST.format(tests=str(Path(__file__).parent), folder=str(tmp / "m"), workers=workers, make=make))
    host = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        scratch, *pids = host.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        assert Path(scratch).exists()
        assert len(processes) >= workers and len(running(processes)) == len(processes)
        os.kill(host.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=2 * NOTICED_S)
        assert not running(alive)
        deadline = time.monotonic() + NOTICED_S
        while Path(scratch).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(scratch).exists()
    finally:
        host.kill()
        host.wait()
