"""An engine that stands still is told from one that works for long, on the virtual clock."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from support_local_engine import LocalEngine
from support_scripted import Response, ScriptedEngine

from roll_lite.config.schema.models import ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest, Sampling, Turn
from roll_lite.distributed.strategy.base import EngineSpec, PauseMode, RequestProgress
from roll_lite.distributed.strategy.inference import step_watch
from roll_lite.distributed.strategy.inference.processes import EngineProcesses
from roll_lite.distributed.strategy.inference.requests import InFlight
from roll_lite.distributed.strategy.inference.step_watch import StepWatch, step_limit
from roll_lite.distributed.strategy.inference.strategy import EngineStrategy
from roll_lite.scheduler.router import Router
from roll_lite.simulator.clock import run_virtual
from tests.distributed.strategy.inference.test_engine_order import A, B, Engine, way

Answers = Callable[[float], float | None]
"""Seconds that the rest of the step takes in which a question is asked, at a time; None: it never ends."""


def stuck_after(
    answers: Answers,
    limit_s: float | None = 7.0,
    watched_s: float = 1000.0,
    warm: float | None = 0.0,
    compiles: tuple[float, float] = (-1.0, -1.0),
    other: tuple[float, float] | None = None,
) -> tuple[float, str] | None:
    """`warm`: when the first response ends. `compiles`: from when to when a compiler runs. `other`: when the first request of another kind
    of sampling begins, and when its response ends."""

    async def main() -> tuple[float, str] | None:
        loop = asyncio.get_running_loop()

        async def ask() -> None:
            seconds = answers(loop.time())
            await (loop.create_future() if seconds is None else asyncio.sleep(seconds))

        watch = StepWatch(ask, limit_s, lambda: compiles[0] <= loop.time() <= compiles[1])
        if warm is not None:
            loop.call_later(warm, watch.responded, "plain")
        if other is not None:
            request = watch.in_flight("top_p")
            loop.call_later(other[0], request.__enter__)
            loop.call_later(other[1], watch.responded, "top_p")
            loop.call_later(other[1], request.__exit__, None, None, None)
        try:
            async with asyncio.timeout(watched_s):
                return await watch.until_stuck(), loop.time()
        except TimeoutError:
            return None

    found = run_virtual(main())
    return None if found is None else (found[1], found[0])


def test_an_engine_whose_steps_are_short_is_given_up_within_ten_seconds_of_its_last_one() -> None:
    """At worst it hangs just after it has answered."""
    found = stuck_after(lambda asked: 0.05 if asked < 50.0 else None)
    assert found is not None and found[0] - 50.0 < 10.0
    assert found[1] == "no step has ended for 7 s, the longest before took 0.1 s (limits.engine_step)"


def test_long_steps_are_no_hang_where_others_were_as_long() -> None:
    """Steps of 5 s have been seen: those of 19 s are within four times as much, those of 21 s are not."""
    assert stuck_after(lambda asked: 5.0 if asked < 100.0 else 19.0, watched_s=150.0) is None
    found = stuck_after(lambda asked: 5.0 if asked < 100.0 else None)
    assert found is not None and 20.0 < found[0] - 100.0 < 27.0
    assert found[1] == "no step has ended for 20 s, the longest before took 5.0 s (limits.engine_step)"


def test_a_prompt_that_takes_many_chunks_is_no_hang() -> None:
    """300 s of prefill in chunks of 6 s."""
    assert stuck_after(lambda asked: 6.0 - asked % 6.0 if 100.0 <= asked < 400.0 else 0.01) is None


def test_until_a_response_has_ended_kernels_may_be_compiled() -> None:
    assert stuck_after(lambda asked: 250.0 if asked < 1.0 else 0.01, warm=None) is None
    found = stuck_after(lambda asked: None, warm=None)
    assert found is not None and 280.0 < found[0] < 281.0 and "no response has ended yet" in found[1]


def test_what_is_compiled_before_the_first_response_makes_later_limits_no_wider() -> None:
    found = stuck_after(lambda asked: None if asked > 100.0 else 60.0 if asked < 1.0 else 0.01, warm=70.0)
    assert found is not None and found[0] - 100.0 < 10.0
    assert found[1] == "no step has ended for 7 s, the longest before took 0.0 s (limits.engine_step)"


def test_while_a_compiler_runs_for_it_a_step_may_take_longer() -> None:
    """A kernel that is used for the first time in the middle of a run. A hang behind it is found as soon as any other."""
    compiles = (103.0, 163.0)
    assert stuck_after(lambda asked: 65.0 if 99.0 < asked < 101.0 else 0.01, watched_s=300.0, compiles=compiles) is None
    found = stuck_after(lambda asked: 0.01 if asked < 100.0 else None, compiles=compiles)
    assert found is not None and found[0] - compiles[1] < 10.0
    assert stuck_after(lambda asked: 0.01 if asked < 100.0 else None, compiles=(120.0, 160.0))[0] < 110.0  # type: ignore[index]


def test_the_first_response_of_another_kind_of_sampling_may_compile_kernels_too() -> None:
    """As top_p in a validation: no compiler's process shows it. A later hang is found as soon as any other."""

    def steps(asked: float) -> float | None:
        return None if asked > 200.0 else 60.0 if 100.0 < asked < 102.0 else 0.01

    assert stuck_after(steps)[0] < 110.0  # type: ignore[index]
    found = stuck_after(steps, other=(100.0, 170.0))
    assert found is not None and found[0] - 200.0 < 10.0
    begun = stuck_after(lambda asked: 0.01 if asked < 100.0 else None, other=(90.0, 900.0))
    assert begun is not None and 280.0 < begun[0] - 100.0 < 282.0
    slow = stuck_after(lambda asked: 5.0 if asked < 200.0 else None, other=(100.0, 150.0))
    assert slow is not None and 20.0 < slow[0] - 200.0 < 27.0, "steps of 5 s were seen before"


@pytest.mark.parametrize("given", [(7, 8), (), None], ids=["tokens", "none", "cancelled"])
async def test_only_a_response_with_tokens_says_that_its_kernels_are_compiled(given: tuple[int, ...] | None) -> None:
    class Answers(Scripted):
        async def run(self, flight: InFlight) -> Completion:
            if given is None:
                raise asyncio.CancelledError
            return Completion(flight.request.request_id, token_ids=given)

    strategy = Strategy(Answers())
    request = GenerationRequest("r", (1, 2), Sampling(temperature=1.0, max_tokens=2, top_p=0.5))
    await asyncio.wait([strategy.generate(request)])
    assert (request.sampling.kernels in strategy._steps._responded) == bool(given) and not strategy._steps._may_compile


def test_compilers_are_known_among_the_processes_of_an_engine(tmp_path: Path) -> None:
    compiler = tmp_path / "ptxas"
    shutil.copy(shutil.which("sleep") or "", compiler)
    code = f"import subprocess; input(); subprocess.run([{str(compiler)!r}, '600']); input()"
    engines = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) for _ in range(2)]
    one, other = EngineProcesses(), EngineProcesses()
    try:
        for watched, process in zip((one, other), engines, strict=True):
            watched.watch([process.pid])
        assert not one.are_compiling()
        print(file=engines[0].stdin, flush=True)
        while not one.are_compiling():
            time.sleep(0.05)
        assert not other.are_compiling(), "it is not this one's"
        for compiling in psutil.Process(engines[0].pid).children():
            compiling.kill()
        while one.are_compiling():
            time.sleep(0.05)
    finally:
        for process in engines:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
            process.wait()


def test_without_a_limit_it_is_waited_for() -> None:
    assert stuck_after(lambda asked: None, limit_s=None) is None


def test_what_it_was_asked_to_do_beside_its_steps_takes_as_long_as_it_takes() -> None:
    async def main() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        watch = StepWatch(loop.create_future, 7.0)
        watch.responded("plain")
        watching = asyncio.create_task(watch.until_stuck())
        with watch.suspended():
            await asyncio.sleep(600.0)
            assert not watching.done()
        ended = loop.time()
        return await watching, loop.time() - ended

    cause, seconds = run_virtual(main())
    assert 7.0 <= seconds < 8.0 and "no step has ended for 7 s" in cause


@pytest.mark.parametrize("what", ["a bucket", "memory", "a pause"])
def test_of_the_calls_of_an_engine_only_a_pause_is_as_short_as_a_step(what: str) -> None:
    """Weights are waited for, memory is copied; what hangs when it is paused has hung before."""

    async def main() -> str | None:
        engine = Engine(step_s=7.0)
        engine._steps.responded("plain")
        watching = asyncio.create_task(engine._watch_steps())
        await engine.begin_weight_update([A, B])
        await asyncio.sleep(0.5)
        call: asyncio.Future[Any]
        if what == "a bucket":
            await engine.pause(PauseMode.KEEP)
            engine.make.gate.clear()
            call = asyncio.ensure_future(engine.receive_bucket([way(A)]))
        elif what == "memory":
            await engine.offload()
            engine.make.gate.clear()
            call = asyncio.ensure_future(engine.load())
        else:
            engine.make.gate.clear()
            call = asyncio.ensure_future(engine.pause(PauseMode.KEEP))
        await asyncio.sleep(100.0)
        engine.make.gate.set()
        await asyncio.wait((call,))
        watching.cancel()
        return engine.life.failure

    failure = run_virtual(main())
    assert (failure is None) == (what != "a pause")


def test_the_limit_is_wide_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch.torch.cuda, "is_available", lambda: False)
    assert (step_limit("auto"), step_limit(9.0), step_limit(0.0), step_limit(None)) == (300.0, 9.0, None, None)
    monkeypatch.setattr(step_watch.torch.cuda, "is_available", lambda: True)
    assert step_limit("auto") == 7.0


# ---------------------------------------------------------------- what becomes of its work


class Scripted:
    """A make whose processes live and answer; its loop is a script's, until it hangs."""

    name = "scripted"
    notes = ()

    def __init__(self) -> None:
        self.engine = ScriptedEngine(lambda request: Response(100, 1.0))
        self.going = asyncio.Event()
        self.going.set()

    async def hang(self) -> None:
        self.going.clear()
        await self.engine.pause(PauseMode.KEEP)

    async def answered(self) -> None:
        await self.going.wait()

    def is_dead(self) -> bool:
        return False

    async def run(self, flight: InFlight) -> Completion:
        return await self.engine.generate(flight.request)

    async def progress(self, flights: Sequence[InFlight], parts: bool) -> list[RequestProgress | None]:
        return await self.engine._progress(flights, parts)

    async def abort(self, flights: Sequence[InFlight]) -> None:
        await self.going.wait()
        await self.engine.abort([flight.request.request_id for flight in flights])


class Strategy(EngineStrategy):
    def __init__(self, make: Any) -> None:
        super().__init__(make, EngineSpec(ModelConfig(path=Path("model")), VllmStrategyConfig(), max_model_len=1000, step_s=7.0))
        self._vocabulary = 200
        self.life.start()
        self._steps.responded(Sampling(1.0, 1).kernels)


def test_what_a_hanging_engine_was_generating_goes_on_elsewhere_with_its_tokens() -> None:
    """100 tokens of a second each. It hangs after 30 s and is given up before 40; meanwhile all 30 tokens have been handed out, and the
    other one generates the 70 that are left."""

    async def main() -> tuple[list[Turn], float, str | None, int]:
        make = Scripted()
        strategy, other = Strategy(make), ScriptedEngine(lambda request: Response(100, 1.0))
        watching = asyncio.create_task(strategy._watch_steps())
        router = Router([LocalEngine("hangs", strategy), LocalEngine("works", other)], timeout_s=1e6)
        asyncio.get_running_loop().call_later(30.0, lambda: asyncio.ensure_future(make.hang()))
        sampling = Sampling(temperature=1.0, max_tokens=200)
        asked = [router.generate("d", GenerationRequest(f"r{number}", (1, 2), sampling)) for number in range(2)]
        turns = await asyncio.gather(*asked)
        watching.cancel()
        dead = [engine.dead for engine in router.engines]
        return turns, asyncio.get_running_loop().time(), dead[0], sum(turn.length for turn in turns)

    turns, seconds, cause, tokens = run_virtual(main())
    assert cause == "no step has ended for 7 s, the longest before took 0.0 s (limits.engine_step)"
    assert [turn.error for turn in turns] == [None, None] and tokens == 200
    assert 30.0 + 7.0 + 70.0 <= seconds < 40.0 + 70.0
    for turn in turns:
        assert turn.tokens is not None and turn.tokens.length == 2 + 100
