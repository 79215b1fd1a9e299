"""Calls to an engine in odd orders and at the same time, on an engine that only says what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import support_completions
import torch

from roll_lite.config.arithmetic import EngineOffload
from roll_lite.config.schema.models import ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, Sampling
from roll_lite.distributed.strategy.base import EngineHealth, EngineSpec, PauseMode, RequestProgress
from roll_lite.distributed.strategy.inference.life import EngineDead, EngineMemory
from roll_lite.distributed.strategy.inference.processes import EngineProcesses
from roll_lite.distributed.strategy.inference.requests import InFlight
from roll_lite.distributed.strategy.inference.strategy import EngineStrategy
from roll_lite.distributed.weight_sync.group import TransferError
from roll_lite.distributed.weight_sync.plan import ExportedTensor, Route
from roll_lite.models.hf_config import HfConfig

A, B = (ExportedTensor(name, (2,), torch.float32, owner=0, bucket=number) for number, name in enumerate("ab"))
ALL = frozenset(EngineMemory)


def way(tensor: ExportedTensor) -> Route:
    return Route(tensor.bucket, 0, (1,), (tensor,))


class Recorder:
    """A make that runs, is paused, is told; a request that runs on an offloaded engine or on half its weights is a failure of the test."""

    name = "recorded"
    notes = ()
    cuda = False

    def __init__(self) -> None:
        self.runs, self.half_loaded, self.gone = True, False, False
        self.resident: set[EngineMemory] = set(ALL)
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        """While it is not set, engine calls and buckets are on their way."""
        self.gate.set()
        self.broken: Exception | None = None
        self.requests: dict[str, asyncio.Future[Completion]] = {}
        self.peaks: list[dict[str, int]] = []
        """Of each worker."""

    def check(self) -> None:
        if self.runs:
            assert self.resident == ALL, "runs without its memory"
            assert not self.half_loaded, "runs on half-loaded weights"

    def check_version(self) -> None: ...

    async def start(self) -> list[int]:
        return []

    async def prepare(self, config: HfConfig) -> None: ...

    def is_dead(self) -> bool:
        return self.gone

    async def answered(self) -> None:
        """Its loop carries out calls as well."""
        await self.gate.wait()

    async def stop(self, processes: EngineProcesses) -> None: ...

    async def run(self, flight: InFlight) -> Completion:
        future = self.requests[flight.request.request_id] = asyncio.get_running_loop().create_future()
        return await future

    async def progress(self, flights: Sequence[InFlight], parts: bool) -> list[RequestProgress | None]:
        return [None] * len(flights)

    async def abort(self, flights: Sequence[InFlight]) -> None:
        self.end(flight.request.request_id for flight in flights)

    def end(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if not self.requests[request_id].done():
                self.requests[request_id].set_result(Completion(request_id, (1,), finish_reason=FinishReason.ABORT))

    async def pause(self, mode: PauseMode) -> None:
        await self.gate.wait()
        if mode is PauseMode.ABORT:
            self.end(self.requests)
        self.runs = False
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        await self.gate.wait()
        self.runs = True
        self.calls.append("resume")
        self.check()

    async def offload(self, parts: Collection[EngineMemory], cache_stays: bool) -> None:
        assert not self.runs and self.resident.issuperset(parts)
        assert cache_stays == (EngineMemory.KV_CACHE in self.resident - set(parts))
        await self.gate.wait()
        self.resident -= set(parts)
        self.calls.append(f"offload {'+'.join(sorted(parts))}")
        self.check()

    async def load(self, parts: Collection[EngineMemory]) -> None:
        assert not self.resident & set(parts), "loaded twice"
        await self.gate.wait()
        self.resident |= set(parts)
        self.calls.append(f"load {'+'.join(sorted(parts))}")

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        match method:
            case "roll_lite_load_bucket":
                assert not self.runs
                await self.gate.wait()
                self._break()
                self.half_loaded = True
                self.calls.append("bucket")
            case "roll_lite_weights_touched":
                return [self.half_loaded]
            case "roll_lite_put_in_place":
                self._break()
                self.half_loaded = False
            case "roll_lite_memory":
                self.calls.append("memory")
                return self.peaks
            case "roll_lite_checksums":
                return [dict.fromkeys("ab", "")]
        return []

    def _break(self) -> None:
        if self.broken is not None:
            raise self.broken

    async def renew(self, version: int) -> None: ...


class Engine(EngineStrategy):
    make: Recorder

    def __init__(self, step_s: float | None = None, sleep: EngineOffload = "with_copy") -> None:
        spec = EngineSpec(ModelConfig(path=Path("model")), VllmStrategyConfig(), max_model_len=100, step_s=step_s, sleep=sleep)
        super().__init__(Recorder(), spec)
        self._vocabulary, self._shapes = 10, {"a": (2,), "b": (2,)}
        self.life.start()


@pytest.fixture
async def engine() -> Engine:
    return Engine()


def request(name: str, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), Sampling(**{"temperature": 1.0, "max_tokens": 8} | sampling))


async def completions(engine: Engine, *names: str) -> dict[str, Completion]:
    found = [completion async for completion in support_completions.completions(engine, [request(name) for name in names])]
    return {completion.request_id: completion for completion in found}


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def update(engine: Engine, version: int = 1) -> None:
    await engine.begin_weight_update([A, B])
    for tensor in (A, B):
        await engine.receive_bucket([way(tensor)])
    await engine.finish_weight_update(version)


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("steps", range(4))
async def test_an_engine_that_dies_while_requests_are_submitted_answers_them_all(engine: Engine, steps: int) -> None:
    task = asyncio.create_task(completions(engine, "a", "b", "c"))
    await turns(steps)
    engine._give_up("died")
    found = await asyncio.wait_for(task, 1)
    assert {name: completion.error for name, completion in found.items()} == dict.fromkeys("abc", "died")


@pytest.mark.parametrize("steps", range(1, 4))
async def test_an_abort_finds_requests_that_are_on_their_way(engine: Engine, steps: int) -> None:
    task = asyncio.create_task(completions(engine, "a", "b"))
    await turns(steps)
    await engine.abort(["a"])
    await turns()
    await engine.abort()
    found = await asyncio.wait_for(task, 1)
    assert [completion.finish_reason for completion in found.values()] == [FinishReason.ABORT] * 2
    assert (await engine.health()).waiting == (await engine.health()).running == 0


@pytest.mark.parametrize(("sampling", "message"), [({"max_tokens": 0}, "max_tokens is 0"), ({"stop": ("x", "")}, "stop text is empty")])
async def test_what_no_engine_can_do_is_refused_alike(engine: Engine, sampling: dict[str, Any], message: str) -> None:
    completion = await engine.generate(request("a", **sampling))
    assert message in (completion.error or "")


# ---------------------------------------------------------------- pause and memory


async def test_a_resume_beside_an_offload_starts_nothing(engine: Engine) -> None:
    await asyncio.gather(engine.offload(), engine.resume())
    assert not engine.make.runs and engine.make.resident == set()
    await engine.load()
    assert engine.make.runs


async def test_weights_that_were_dropped_serve_only_after_a_whole_update() -> None:
    engine = Engine(sleep="without_copy")
    await engine.offload([EngineMemory.KV_CACHE])
    await engine.load()
    await engine.offload()
    with pytest.raises(RuntimeError, match="weights were dropped in an offload: update them before the KV cache is loaded"):
        await engine.load()
    await engine.load([EngineMemory.WEIGHTS])
    await engine.begin_weight_update([A, B])
    engine.make.broken = TransferError("no bucket came")
    with pytest.raises(TransferError):
        await engine.receive_bucket([way(A)])
    engine.make.broken = None
    with pytest.raises(RuntimeError, match="dropped"):
        await engine.load([EngineMemory.KV_CACHE])
    assert engine.make.resident == {EngineMemory.WEIGHTS} and not engine.make.runs
    await update(engine)
    await engine.load([EngineMemory.KV_CACHE])
    assert engine.make.runs
    await engine.offload()
    with pytest.raises(RuntimeError, match="dropped"):
        await engine.load()


def used(*device: int) -> list[dict[str, int]]:
    return [{"allocated": 10 * size, "reserved": 20 * size, "device": size} for size in device]


async def test_memory_is_told_by_phase(engine: Engine) -> None:
    """Where something is offloaded, only what all processes use, since torch counts what has left."""
    make = engine.make
    make.cuda, make.peaks = True, used(1, 3)
    await engine.offload([EngineMemory.KV_CACHE])
    make.peaks = used(2, 2)
    await engine.offload([EngineMemory.WEIGHTS])
    make.peaks = used(4, 5)
    await engine.load([EngineMemory.WEIGHTS])
    make.peaks = used(6)
    await update(engine)
    make.peaks = used(7)
    await engine.load()
    make.peaks = used(8)
    generating = {"allocated": 80, "reserved": 160, "device": 8}
    expected = {"generate": generating, "offload": {"device": 2}, "load": {"device": 7}, "sync_weights": {"device": 6}}
    assert await engine.take_memory() == expected
    await update(engine, version=2)
    make.peaks = used(1)
    assert await engine.take_memory() == {"generate": generating, "sync_weights": generating}
    await engine.offload()
    make.calls.clear()
    assert await engine.take_memory() == {"generate": {"allocated": 10, "reserved": 20, "device": 1}, "offload": {"device": 1}}
    assert make.calls == [], "who has the GPU now is measured instead"


async def test_without_a_gpu_workers_are_not_asked_for_memory(engine: Engine) -> None:
    await engine.offload()
    await engine.load()
    await update(engine)
    assert await engine.take_memory() == {} and "memory" not in engine.make.calls
    engine.fail("died")
    assert await engine.take_memory() == {}


async def test_loading_twice_at_once_loads_once(engine: Engine) -> None:
    await engine.offload()
    await asyncio.gather(engine.load(), engine.load(), engine.load([EngineMemory.WEIGHTS]))
    assert engine.make.calls == ["pause abort", "offload kv_cache+weights", "load kv_cache+weights", "resume"]


async def test_a_resume_comes_after_the_pause_before_it(engine: Engine) -> None:
    engine.make.gate.clear()
    pausing = asyncio.create_task(engine.pause(PauseMode.KEEP))
    await turns()
    resuming = asyncio.create_task(engine.resume())
    await turns()
    assert not resuming.done()
    engine.make.gate.set()
    await asyncio.gather(pausing, resuming)
    assert engine.make.calls == ["pause keep", "resume"] and engine.make.runs


async def test_a_request_that_ends_in_the_moment_of_a_pause_does_not_count_any_more(engine: Engine) -> None:
    """An engine's messages of both may come together."""

    async def paused() -> EngineHealth:
        await engine.pause(PauseMode.KEEP)
        return await engine.health()

    running = asyncio.create_task(completions(engine, "a"))
    await turns()
    answer = asyncio.get_running_loop().create_future()
    engine.make.pause = lambda mode: answer  # type: ignore[method-assign]
    pausing = asyncio.create_task(paused())
    await turns()
    engine.make.requests["a"].set_result(Completion("a", (1,), finish_reason=FinishReason.STOP))
    answer.set_result(None)
    health = await pausing
    assert (health.running, health.waiting) == (0, 0)
    await running


@pytest.mark.parametrize("asked", [PauseMode.KEEP, PauseMode.ABORT])
async def test_a_pause_that_was_cancelled_is_asked_for_again(engine: Engine, asked: PauseMode) -> None:
    engine.make.gate.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.pause(PauseMode.KEEP), 0.01)
    engine.make.gate.set()
    await engine.pause(asked)
    assert not engine.make.runs
    await engine.resume()
    assert engine.make.runs


# ---------------------------------------------------------------- updates


async def test_nothing_starts_an_engine_in_the_middle_of_an_update(engine: Engine) -> None:
    await engine.begin_weight_update([A, B])
    await engine.receive_bucket([way(A)])
    await engine.resume()
    await engine.pause(PauseMode.KEEP)
    await engine.resume()
    with pytest.raises(RuntimeError, match="under way: finish it before anything is offloaded"):
        await engine.offload()
    await engine.load()
    assert not engine.make.runs
    await engine.receive_bucket([way(B)])
    await engine.finish_weight_update(1)
    assert engine.make.runs


async def test_nothing_overtakes_the_first_bucket(engine: Engine) -> None:
    """It is on its way: what is asked of the engine meanwhile is refused, or waits."""
    await engine.begin_weight_update([A, B])
    engine.make.gate.clear()
    receiving = asyncio.create_task(engine.receive_bucket([way(A)]))
    await turns()
    for refused in (engine.begin_weight_update([A, B]), engine.offload(), engine.weight_checksums()):
        with pytest.raises(RuntimeError, match="a weight update is under way"):
            await refused
    resuming = asyncio.create_task(engine.resume())
    await turns()
    assert not resuming.done()
    engine.make.gate.set()
    await asyncio.gather(receiving, resuming)
    assert not engine.make.runs and engine.make.half_loaded


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_caller_that_pauses_decides_when_to_resume(engine: Engine, when: str) -> None:
    if when == "before":
        await engine.pause(PauseMode.KEEP)
    await engine.begin_weight_update([A, B])
    await engine.receive_bucket([way(A)])
    if when == "during":
        await engine.pause(PauseMode.KEEP)
    await engine.receive_bucket([way(B)])
    await engine.finish_weight_update(1)
    assert not engine.make.runs
    await engine.resume()
    assert engine.make.runs


async def test_an_update_that_is_cancelled_ends_the_engine(engine: Engine) -> None:
    await engine.begin_weight_update([A, B])
    engine.make.gate.clear()
    receiving = asyncio.create_task(engine.receive_bucket([way(A)]))
    await turns()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert "cancelled" in str(engine.life.failure)
    with pytest.raises(EngineDead):
        await engine.resume()


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("broken", [TransferError("no trainer"), RuntimeError("no memory")], ids=["not come", "not loaded"])
async def test_a_bucket_that_does_not_come(engine: Engine, broken: Exception, touched: bool) -> None:
    await engine.begin_weight_update([A, B])
    if touched:
        await engine.receive_bucket([way(A)])
    engine.make.broken = broken
    with pytest.raises(RuntimeError, match=str(broken)):
        await engine.receive_bucket([way(B if touched else A)])
    engine.make.broken = None
    assert (await engine.health()).alive
    assert engine.make.runs is not touched, "half-way it waits for another update"
    await engine.resume()
    assert engine.make.runs is not touched
    await update(engine)
    assert engine.make.runs


async def test_weights_that_cannot_be_put_in_place_end_the_engine(engine: Engine) -> None:
    await engine.begin_weight_update([A, B])
    for tensor in (A, B):
        await engine.receive_bucket([way(tensor)])
    engine.make.broken = RuntimeError("the cache cannot be cleared")
    with pytest.raises(RuntimeError, match="cannot be cleared"):
        await engine.finish_weight_update(1)
    assert "could not be put in place" in str(engine.life.failure)


async def test_an_engine_is_started_once(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="starts its engine once"):
        await engine.initialize()
