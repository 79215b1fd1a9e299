"""Engines of their own: other models, two at a time, over two workers, and those that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engine_harness import Harness, Make, assert_log_probs, random_state, require
from support_models import Family

from roll_lite.distributed.strategy.inference.engine import EngineDead
from roll_lite.distributed.strategy.inference.processes import shared_memory
from roll_lite.distributed.weight_sync.checksum import checksum
from roll_lite.distributed.weight_sync.transport import TransferError

LONG = 1500
MANY = 2000  # tokens that fit
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
async def test_bfloat16_is_held_bit_for_bit_and_a_busy_engine_leaves_nothing_behind(make: Make, tmp: Path) -> None:
    """Other kernels, other packed layouts than in float32."""
    engine = await Harness.start(tmp / "m", dtype="bfloat16", max_model_len=MANY, make=make)
    try:
        await engine.update(seed=171)
        assert await engine.strategy.weight_checksums() == expected_checksums(engine, 171)
        completion = await engine.one(32, temperature=1.0, seed=1)
        assert engine.mean_difference(completion) < 0.1
        await leaves_nothing_behind(engine)
    finally:
        await engine.stop()


async def leaves_nothing_behind(engine: Harness) -> None:
    """Shut down while requests run."""
    _, task = await engine.started(20, LONG)
    processes = engine.processes()
    assert engine.strategy._scratch is not None
    files = {Path(engine.strategy._scratch.path), *shared_files(processes)}
    assert present(files) == files and running(processes)
    await asyncio.wait_for(engine.strategy.shutdown(), 2 * NOTICED_S)
    assert not running(processes)
    assert not present(files)
    assert all(completion.error for completion in await asyncio.wait_for(task, NOTICED_S))


@pytest.mark.slow
async def test_two_engines_are_independent_and_a_third_takes_the_place_of_one_that_is_killed(make: Make, tmp: Path) -> None:
    first, second = [await Harness.start(tmp / name, max_model_len=MANY, make=make) for name in ("a", "b")]
    try:
        await first.update(seed=31)
        await serves_reference(first)
        await serves_reference(second)
        await dies_noticed(first)
        await serves_reference(second)
        assert (await second.strategy.health()).alive
    finally:
        await first.stop()
        await second.stop()
    third = await Harness.start(tmp / "c", make=make)
    try:
        await third.update(seed=41)
        await serves_reference(third)
    finally:
        await third.stop()


async def dies_noticed(engine: Harness) -> None:
    """kill -9: every request fails within seconds, and so does all that is asked of it later."""
    _, task = await engine.started(20, LONG)
    processes = engine.processes()
    engine.kill()
    completions = await asyncio.wait_for(task, NOTICED_S)
    assert len(completions) == 20
    assert {completion.error for completion in completions} == {"the engine's process died"}
    health = await engine.strategy.health()
    assert not health.alive and health.running == health.waiting == 0 and "died" in health.details["failure"]
    assert (await engine.one(4)).error == "the engine's process died"
    with pytest.raises(EngineDead, match="process died"):
        await engine.strategy.resume()
    await engine.strategy.abort()  # of nothing
    await asyncio.wait_for(engine.strategy.shutdown(), 2 * NOTICED_S)
    assert not running(processes)


@pytest.mark.slow
async def test_two_workers_of_which_one_is_killed_while_weights_are_awaited(make: Make, tmp: Path) -> None:
    """A single key/value head, which both workers hold."""
    engine = await Harness.start(tmp / "m", tensor_parallel=2, make=make)
    try:
        await serves_reference(engine)
        await engine.update(seed=21)
        await serves_reference(engine)
        assert await engine.strategy.weight_checksums() == expected_checksums(engine, 21)
        _, task = await engine.started(1, 450)
        await engine.strategy.begin_weight_update(engine.tensors)
        receiving = asyncio.create_task(engine.strategy.receive_bucket(engine.tensors[:3]))
        await asyncio.sleep(0.5)
        shared = shared_files(engine.processes())
        assert shared
        engine.processes()[-1].kill()  # not the first
        with pytest.raises(EngineDead, match="process died"):
            await asyncio.wait_for(receiving, 2 * NOTICED_S)
        assert "died" in ((await asyncio.wait_for(task, NOTICED_S))[0].error or "")
        assert not (await engine.strategy.health()).alive
    finally:
        await engine.stop()
    assert not present(shared)


# ---------------------------------------------------------------- death


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
async def test_an_update_that_breaks_off_ends_the_engine(make: Make, tmp: Path) -> None:
    """Weights half old, half new must never generate."""
    engine = await Harness.start(tmp / "m", make=make)
    try:
        await engine.connect(timeout_s=5.0)
        assert engine.plan is not None and engine.sender is not None
        await engine.strategy.begin_weight_update(engine.tensors)
        await engine.transfer(0, seed=1)
        waiting = asyncio.create_task(engine.one(4))
        engine.sender.process.kill()
        with pytest.raises(TransferError, match=r"trainer \(transfer rank 0\) did not take part in bucket 1"):
            await engine.strategy.receive_bucket(engine.plan.transfers[1].tensors)
        assert "neither the old nor the new weights" in ((await asyncio.wait_for(waiting, NOTICED_S)).error or "")
        health = await engine.strategy.health()
        assert not health.alive and "half-way" in health.details["failure"]
        psutil.wait_procs(engine.processes(), timeout=NOTICED_S)
        assert not running(engine.processes())
    finally:
        await engine.stop()


def shared_files(processes: list[psutil.Process]) -> set[Path]:
    """But for semaphores, which the host makes and removes."""
    return {path for process in processes for path in shared_memory(process.pid) if not path.name.startswith("sem.")}


def present(files: set[Path]) -> set[Path]:
    return {file for file in files if file.exists()}


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
@pytest.mark.parametrize(("make", "workers"), [("vllm", 1), ("vllm", 2), ("sglang", 2)])
def test_no_process_outlives_a_killed_host(make: Make, tmp: Path, workers: int) -> None:
    require(make)
    script = tmp / "host.py"
    script.write_text(_HOST.format(tests=str(Path(__file__).parent), folder=str(tmp / "m"), workers=workers, make=make))
    host = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        scratch, *pids = host.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        files = {Path(scratch), *shared_files(processes)}
        assert present(files) == files
        assert len(processes) >= workers and len(running(processes)) == len(processes)
        os.kill(host.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=2 * NOTICED_S)
        assert not running(alive)
        deadline = time.monotonic() + NOTICED_S
        while present(files) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not present(files)
    finally:
        host.kill()
        host.wait()
