"""Engines that follow one trainer: one of two is killed between two buckets of an update; one worker of two fails alone."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest
import torch
from engine_harness import Harness, Make, SenderProcess, export_plan, random_state, require

from roll_lite.distributed.strategy.inference.life import EngineDead
from roll_lite.distributed.weight_sync.group import StaleEpoch, TransferError, interrupt, rendezvous_client, rendezvous_store
from roll_lite.distributed.weight_sync.plan import TransferPlan, by_bucket, plan_transfers
from roll_lite.distributed.weight_sync.update import checksum

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

HOST, TIMEOUT_S = "127.0.0.1", 60.0
NIGHTLY = pytest.mark.nightly


class Pair:
    """Engines by number, and what the driver of a run does with them."""

    def __init__(self, engines: dict[int, Harness]) -> None:
        self.engines = engines
        self.workers = engines[0].strategy.options.tensor_parallel
        self.sender = SenderProcess()
        self.store = rendezvous_store(HOST)
        self.epoch = 0

    async def connect(self, transport: str) -> TransferPlan:
        self.epoch += 1
        plan = plan_transfers(export_plan(random_state("qwen2", True, 0)), dict.fromkeys(self.engines, self.workers))
        membership = plan.membership(self.epoch, transport, HOST, self.store.port, TIMEOUT_S)
        joining = [one.strategy.connect_weights(plan.first_member(number), membership) for number, one in self.engines.items()]
        await asyncio.gather(self.sender.call("join", membership, 0), *joining)
        return plan

    async def send(self, plan: TransferPlan, bucket: int, seed: int) -> None:
        await self.sender.call("send", by_bucket(plan.routes)[bucket], ("qwen2", True, seed, torch.float32, None, {}))

    async def take(self, engine: Harness, plan: TransferPlan, bucket: int) -> None:
        await engine.strategy.receive_bucket(by_bucket(plan.routes)[bucket])

    async def push(self, plan: TransferPlan, seed: int) -> None:
        engines = list(self.engines.values())
        for engine in engines:
            engine.plan = plan
            await engine.strategy.begin_weight_update(engine.tensors)
        for bucket in range(len(by_bucket(plan.routes))):
            await asyncio.gather(self.send(plan, bucket, seed), *(self.take(engine, plan, bucket) for engine in engines))
        for engine in engines:
            await engine.finish(seed)


async def holds(engine: Harness, seed: int) -> None:
    expected = {name: checksum(tensor) for name, tensor in random_state("qwen2", True, seed).items()}
    assert await engine.strategy.weight_checksums() == expected
    assert list((await engine.one(24)).token_ids) == engine.hf_greedy(24)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "workers", "transport", "half_way"),
    [
        pytest.param("vllm", 1, "auto", True, id="vllm-both have begun"),
        pytest.param("vllm", 1, "gloo", False, id="vllm-the other has not begun", marks=NIGHTLY),
        pytest.param("vllm", 2, "auto", True, id="vllm-both have begun with two workers each", marks=NIGHTLY),
        pytest.param("vllm", 2, "gloo", False, id="vllm-the other with two workers has not begun", marks=NIGHTLY),
        pytest.param("sglang", 1, "gloo", True, id="sglang-both have begun", marks=NIGHTLY),
        pytest.param("sglang", 1, "auto", False, id="sglang-the other has not begun", marks=NIGHTLY),
    ],
)
async def test_the_other_has_the_old_or_the_new_weights(make: Make, workers: int, transport: str, half_way: bool, tmp_path: Path) -> None:
    require(make)
    engines = [await Harness.start(tmp_path / name, make=make, tensor_parallel=workers) for name in ("a", "b")]
    pair = Pair(dict(enumerate(engines)))
    lost, other = engines
    try:
        await pair.push(plan := await pair.connect(transport), seed=51)
        for engine in engines:
            await holds(engine, 51)
            await engine.strategy.begin_weight_update(engine.tensors)
        sending = asyncio.create_task(pair.send(plan, 0, seed=52))
        taking = asyncio.create_task(pair.take(other, plan, 0)) if half_way else None
        await pair.take(lost, plan, 0)
        if taking is not None:
            await taking
        lost.processes()[0].kill()
        with pytest.raises(EngineDead, match="process died"):
            await pair.take(lost, plan, 1)
        waiting = asyncio.create_task(other.one(24))
        interrupt(rendezvous_client(HOST, pair.store.port), pair.epoch + 1)  # what the driver does as soon as it knows
        with pytest.raises(StaleEpoch, match="engines have left or joined since; connect again"):
            await pair.take(other, plan, 1 if half_way else 0)
        with contextlib.suppress(RuntimeError):
            await sending
        health = await other.strategy.health()
        assert health.alive and other.strategy.life.version == other.version
        if half_way:
            assert other.strategy.life.state == "half updated" and not waiting.done(), "a mixture is known to be one, and serves nothing"
            with pytest.raises(RuntimeError, match="broke off half-way"):
                await other.strategy.weight_checksums()
        else:
            assert list((await waiting).token_ids) == other.hf_greedy(24)
            await holds(other, 51)
        del pair.engines[0]
        pair.epoch += 1
        await pair.push(await pair.connect(transport), seed=53)
        if half_way:
            assert list((await asyncio.wait_for(waiting, TIMEOUT_S)).token_ids) == other.hf_greedy(24)
        await holds(other, 53)
    finally:
        pair.sender.stop()
        for engine in engines:
            await engine.stop()


@NIGHTLY
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["vllm", "sglang"])
async def test_one_worker_that_fails_alone_keeps_its_sibling_waiting_for_nothing(make: Make, tmp_path: Path) -> None:
    """Only the first makes memory for a bucket, in which the second would read it; the system refuses files of that size to all of the
    engine. The time-out is longer than any wait here."""
    require(make)
    engine = await Harness.start(tmp_path / "model", make=make, tensor_parallel=2)
    pair = Pair({0: engine})
    try:
        await pair.push(await pair.connect("gloo"), seed=61)
        plan = await pair.connect("gloo")
        for process in engine.processes():
            process.rlimit(psutil.RLIMIT_FSIZE, (1 << 14, psutil.RLIM_INFINITY))
        await engine.strategy.begin_weight_update(engine.tensors)
        sending = asyncio.create_task(pair.send(plan, 0, seed=62))
        with pytest.raises(TransferError, match="no shared memory for a bucket") as caught:
            await asyncio.wait_for(pair.take(engine, plan, 0), TIMEOUT_S / 2)
        assert caught.type is TransferError, "the sibling's answer, which follows from it, is none of the cause"
        for process in engine.processes():
            process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        await holds(engine, 61)
        pair.epoch += 1
        interrupt(rendezvous_client(HOST, pair.store.port), pair.epoch)
        with contextlib.suppress(RuntimeError):
            await sending
        await pair.push(await pair.connect("gloo"), seed=63)
        await holds(engine, 63)
    finally:
        pair.sender.stop()
        await engine.stop()
