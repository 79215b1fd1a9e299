"""Engines of their own: other models, two at a time, over two workers, and those that die."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engine_harness import Harness, Make, SenderProcess, assert_log_probs, random_state, require
from left_behind import Traces, nothing_left_behind
from support_models import Family

from roll_lite.distributed.strategy.inference.life import EngineDead
from roll_lite.distributed.weight_sync.group import TransferError, rendezvous_store
from roll_lite.distributed.weight_sync.update import checksum

LONG = 1500
MANY = 2000  # tokens that fit
NOTICED_S = 60.0
"""Seconds in which a death is noticed; a second or two on an idle machine."""


def started_by_sglang(engine: Harness, title: str) -> psutil.Process:
    return next(process for process in engine.processes() if title in " ".join(process.cmdline()))


async def serves_reference(engine: Harness, temperature: float = 0.0) -> None:
    completion = await engine.one(24)
    engine.assert_greedy(completion, 24)
    assert_log_probs(completion, engine.hf_logits(completion.token_ids))
    sampled = await engine.one(24, temperature=0.7, seed=3)
    assert_log_probs(sampled, engine.hf_logits(sampled.token_ids) / 0.7)


def expected_checksums(engine: Harness, seed: int) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in random_state(engine.family, engine.tied, seed, engine.dtype).items()}


OTHER_MODELS = [
    pytest.param("vllm", "llama", False, id="vllm-llama-untied"),
    pytest.param("vllm", "qwen3", True, id="vllm-qwen3-tied", marks=pytest.mark.nightly),
    pytest.param("sglang", "llama", False, id="sglang-llama-untied", marks=pytest.mark.nightly),
    pytest.param("sglang", "qwen3", True, id="sglang-qwen3-tied"),
]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("make", "family", "tied"), OTHER_MODELS)
async def test_numbers_of_other_models(make: Make, family: Family, tied: bool, tmp: Path) -> None:
    require(make)
    engine = await Harness.start(tmp / "m", family, tied, max_model_len=MANY, make=make)
    try:
        await serves_reference(engine)
        await engine.update(seed=7)
        await serves_reference(engine)
        assert await engine.strategy.weight_checksums() == expected_checksums(engine, 7)
        if make == "sglang":
            await dies_noticed(engine, started_by_sglang(engine, "detokenizer"))
    finally:
        await engine.stop()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("make", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly)], indirect=True, scope="session")
async def test_bfloat16_is_held_bit_for_bit_and_a_busy_engine_leaves_nothing_behind(make: Make, tmp: Path) -> None:
    """Other kernels, other packed layouts than in float32."""
    with nothing_left_behind(tmp / "t") as traces:
        engine = await Harness.start(tmp / "m", dtype="bfloat16", max_model_len=MANY, make=make)
        try:
            await engine.update(seed=171)
            assert await engine.strategy.weight_checksums() == expected_checksums(engine, 171)
            completion = await engine.one(32, temperature=1.0, seed=1)
            assert engine.mean_difference(completion) < 0.1
            assert traces.folders() and {process.pid for process in traces.processes()} >= {process.pid for process in engine.processes()}
            await shuts_down_while_requests_run(engine)
        finally:
            await engine.stop()


async def shuts_down_while_requests_run(engine: Harness) -> None:
    _, task = await engine.started(20, LONG)
    await asyncio.wait_for(engine.strategy.shutdown(), 2 * NOTICED_S)
    assert all(completion.error for completion in await asyncio.wait_for(task, NOTICED_S))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("make", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly)], indirect=True, scope="session")
async def test_two_engines_live_and_die_alone_and_a_third_takes_the_place_of_the_first(make: Make, tmp: Path) -> None:
    """The first is killed, the second loses its trainer in the middle of an update, goes on, and is stopped."""
    first, second = [await Harness.start(tmp / name, max_model_len=MANY, make=make) for name in ("a", "b")]
    first.version = 6  # it has been updated before
    try:
        await first.update(seed=31)
        await serves_reference(first)
        await serves_reference(second)
        lost, held = await first.one(24), await first.strategy.weight_checksums()
        await dies_noticed(first, first.processes()[0])
        await serves_reference(second)
        assert (await second.strategy.health()).alive
        await outlives_an_update_that_breaks_off(second)
    finally:
        await first.stop()
        await second.stop()
    third = await Harness.start(tmp / "c", make=make)
    third.version = first.version - 1
    try:
        await third.update(seed=31)
        assert third.strategy.life.version == first.version
        assert await third.strategy.weight_checksums() == held
        completion = await third.one(24)
        assert (completion.token_ids, completion.versions) == (lost.token_ids, lost.versions)
        await serves_reference(third)
        await steps_that_end_no_more_are_noticed(third)
    finally:
        await third.stop()


async def outlives_an_update_that_breaks_off(engine: Harness) -> None:
    """Weights half old, half new must never generate: the engine waits, with what it runs, for a whole update."""
    engine.sender = SenderProcess()  # its own: it dies here
    await engine.sender.call("ping")
    await engine.connect(timeout_s=5.0)
    assert engine.plan is not None
    await engine.strategy.begin_weight_update(engine.tensors)
    await engine.transfer(0, seed=1)
    waiting = asyncio.create_task(engine.one(24))
    engine.sender.process.kill()
    with pytest.raises(TransferError, match=r"trainer rank 0 did not take part in bucket 1"):
        await engine.strategy.receive_bucket(engine.plan.routes[1:2])
    health = await engine.strategy.health()
    assert health.alive and engine.strategy.life.state == "half updated" and not waiting.done()
    with pytest.raises(RuntimeError, match="broke off half-way"):
        await engine.strategy.weight_checksums()
    engine.sender, engine.plan = None, None
    await engine.update(seed=41)
    assert list((await asyncio.wait_for(waiting, 60.0)).token_ids) == engine.hf_greedy(24)
    assert await engine.strategy.weight_checksums() == expected_checksums(engine, 41)
    await serves_reference(engine)
    await hangs_noticed(engine)


async def hangs_noticed(engine: Harness) -> None:
    """SIGSTOP of one of its processes: like a death, once it has lasted."""
    engine.strategy._silence_s = 2.0
    _, task = await engine.started(4, LONG)
    engine.processes()[-1].suspend()
    completions = await asyncio.wait_for(task, NOTICED_S)
    (error,) = {completion.error for completion in completions}
    assert error is not None and "has been stopped, as by SIGSTOP, for 2 s (limits.engine_silence)" in error
    psutil.wait_procs(engine.processes(), timeout=NOTICED_S)
    assert not running(engine.processes())


async def steps_that_end_no_more_are_noticed(engine: Harness) -> None:
    """Its loop waits in a worker for what never comes, as for a kernel that hangs; its processes live, and those around it answer."""
    assert engine.plan is not None
    engine.strategy._steps._limit_s = 2.0
    await engine.one(3, temperature=1.0, min_tokens=3, seed=0)  # the first of this kind may take longer
    _, task = await engine.started(4, LONG)
    store = rendezvous_store("127.0.0.1")
    membership = engine.plan.membership(9, "gloo", "127.0.0.1", store.port, 1000.0)
    call = engine.strategy.make.call_workers("roll_lite_connect", first_member=1, membership=membership.plain())
    waits = asyncio.create_task(engine.strategy._answer(call))  # without the pause of the watch
    completions = await asyncio.wait_for(task, NOTICED_S)
    (error,) = {completion.error for completion in completions}
    with pytest.raises(EngineDead, match="no step has ended"):
        await waits
    assert re.fullmatch(r"no step has ended for .* s, the longest before took .* s \(limits\.engine_step\)", error or ""), error
    psutil.wait_procs(engine.processes(), timeout=NOTICED_S)
    assert not running(engine.processes())


async def dies_noticed(engine: Harness, victim: psutil.Process) -> None:
    """kill -9 of one of the engine's processes: every request fails within seconds, and so does all that is asked of it later."""
    _, task = await engine.started(20, LONG)
    processes = engine.processes()
    victim.kill()
    completions = await asyncio.wait_for(task, NOTICED_S)
    assert len(completions) == 20
    assert {completion.error for completion in completions} == {"the engine's process died"}
    health = await engine.strategy.health()
    assert not health.alive and health.running == health.waiting == 0 and "died" in str(engine.strategy.life.failure)
    assert (await engine.one(4)).error == "the engine's process died"
    with pytest.raises(EngineDead, match="process died"):
        await engine.strategy.resume()
    await engine.strategy.abort()  # of nothing
    await asyncio.wait_for(engine.strategy.shutdown(), 2 * NOTICED_S)
    assert not running(processes)
    with pytest.raises(RuntimeError, match="starts its engine once"):
        await engine.strategy.initialize()


@pytest.mark.nightly
@pytest.mark.slow
async def test_two_workers_of_which_one_is_killed_while_weights_are_awaited(make: Make, tmp: Path) -> None:
    """A single key/value head, which both workers hold."""
    traces = Traces(tmp / "t")
    engine = await Harness.start(tmp / "m", tensor_parallel=2, make=make)
    try:
        await serves_reference(engine)
        await engine.update(seed=21)
        await serves_reference(engine)
        assert await engine.strategy.weight_checksums() == expected_checksums(engine, 21)
        for seed in (None, 5):  # each worker samples for itself: were their tokens not the same, log-probs would be those of no text
            for sampled in await engine.all([engine.request(24, temperature=1.0, seed=seed) for _ in range(4)]):
                assert_log_probs(sampled, engine.hf_logits(sampled.token_ids))
        _, task = await engine.started(1, 450)
        await engine.strategy.begin_weight_update(engine.tensors)
        assert engine.plan is not None
        receiving = asyncio.create_task(engine.strategy.receive_bucket(engine.plan.routes[:1]))
        await asyncio.sleep(0.5)
        # Not the first of them.
        (started_by_sglang(engine, "scheduler_TP1") if make == "sglang" else engine.processes()[-1]).kill()
        with pytest.raises(EngineDead, match="process died"):
            await asyncio.wait_for(receiving, 2 * NOTICED_S)
        assert "died" in ((await asyncio.wait_for(task, NOTICED_S))[0].error or "")
        assert not (await engine.strategy.health()).alive
    finally:
        await engine.stop()
    traces.assert_none()


# ---------------------------------------------------------------- death


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


_HOST = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from engine_harness import Harness

async def main():
    harness = await Harness.start(Path({folder!r}), tensor_parallel={workers}, make={make!r})
    print(*(process.pid for process in harness.processes()), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("make", "workers"), [("vllm", 1), ("vllm", 2), ("sglang", 2)])
def test_no_process_outlives_a_killed_host(make: Make, tmp: Path, workers: int) -> None:
    require(make)
    script = tmp / "host.py"
    script.write_text(_HOST.format(tests=str(Path(__file__).parent), folder=str(tmp / "m"), workers=workers, make=make))
    traces = Traces(tmp / "t")
    environment = os.environ | {"TMPDIR": str(tmp / "t")}
    host = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert host.stdout is not None
        processes = {int(pid) for pid in host.stdout.readline().split()}
        assert len(processes) >= workers and processes <= {process.pid for process in traces.processes()}
        assert traces.folders()
        os.kill(host.pid, signal.SIGKILL)
        traces.assert_none()
    finally:
        host.kill()
        host.wait()
