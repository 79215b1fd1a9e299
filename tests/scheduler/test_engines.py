from __future__ import annotations

import asyncio

import pytest

from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, Sampling
from roll_lite.distributed.strategy.scripted import Response, ScriptedEngine
from roll_lite.scheduler.clients import EngineDead
from roll_lite.scheduler.engines import BatchedEngine, Collected, CompletionPump, LocalEngine
from roll_lite.scheduler.simulate import run_virtual


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), Sampling(temperature=1.0, max_tokens=100))


class Watched(BatchedEngine):
    """Answers each submission with one batch of completions."""

    def __init__(self) -> None:
        super().__init__("watched")
        self.submitted: list[list[str]] = []
        self.collected = 0
        self._ready: asyncio.Queue[Collected] = asyncio.Queue()

    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        self.submitted.append([request.request_id for request in requests])
        self._ready.put_nowait(Collected([Completion(request.request_id, (1,), (0.0,)) for request in requests]))

    async def _collect(self) -> Collected:
        self.collected += 1
        return await self._ready.get()

    async def _abort(self, request_ids: list[str]) -> None: ...


async def test_what_is_asked_in_one_turn_travels_in_one_call() -> None:
    engine = Watched()
    names = [f"r{i}" for i in range(256)]
    completions = await asyncio.gather(*(engine.generate(request(name)) for name in names))
    assert [completion.request_id for completion in completions] == names
    assert engine.submitted == [names]
    assert engine.collected == 1
    await asyncio.gather(*(engine.generate(request(name)) for name in names))
    assert len(engine.submitted) == 2


class Unreachable(Watched):
    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        raise ConnectionError("its process is gone")


async def test_a_call_that_fails_is_the_engines_death() -> None:
    engine = Unreachable()
    answers = await asyncio.gather(*(engine.generate(request(f"r{i}")) for i in range(3)), return_exceptions=True)
    assert all(isinstance(answer, EngineDead) and "its process is gone" in answer.cause for answer in answers)
    with pytest.raises(EngineDead):
        await engine.generate(request("later"))


def test_completions_that_finish_close_together_are_fetched_together() -> None:
    async def main() -> tuple[list[int], float]:
        pump = CompletionPump(ScriptedEngine(lambda r: Response(1, 0.001 * int(r.request_id))), linger_s=0.03)
        await pump.submit([request(str(i)) for i in range(1, 101)], frozen=False)
        sizes = []
        while sum(sizes) < 100:
            sizes.append(len((await pump.collect(10.0)).completions))
        return sizes, asyncio.get_running_loop().time()

    sizes, now = run_virtual(main())
    assert len(sizes) <= 5
    # The last completion is not made to wait for neighbours that cannot come.
    assert now == pytest.approx(0.1, abs=0.031)


def test_collect_comes_back_empty_after_its_time() -> None:
    async def main() -> tuple[Collected, float]:
        pump = CompletionPump(ScriptedEngine(lambda r: Response(1, 100.0)))
        await pump.submit([request("slow")], frozen=False)
        return await pump.collect(5.0), asyncio.get_running_loop().time()

    assert run_virtual(main()) == (Collected([]), 5.0)


def test_a_failed_request_of_a_living_engine_is_only_that() -> None:
    async def main() -> list[Completion]:
        engine = LocalEngine("e", ScriptedEngine(lambda r: Response(3, 0.1, error="too long" if r.request_id == "bad" else None)))
        return await asyncio.gather(engine.generate(request("bad")), engine.generate(request("good")))

    bad, good = run_virtual(main())
    assert bad.error == "too long"
    assert (good.error, good.finish_reason) == (None, FinishReason.STOP)


def test_completions_that_were_ready_survive_the_engines_death() -> None:
    async def main() -> list[Completion | BaseException]:
        def script(r: GenerationRequest) -> Response:
            return Response(1, 1.0) if r.request_id == "quick" else Response(2, 1.0, error="lightning", fatal=r.request_id == "fatal")

        engine = LocalEngine("e", ScriptedEngine(script), linger_s=5.0)
        return await asyncio.gather(*(engine.generate(request(name)) for name in ("quick", "fatal", "other")), return_exceptions=True)

    quick, fatal, other = run_virtual(main())
    assert isinstance(quick, Completion)
    assert all(isinstance(answer, EngineDead) and answer.cause == "lightning" for answer in (fatal, other))


class Exploding(ScriptedEngine):
    async def generate(self, requests):  # type: ignore[no-untyped-def, override]
        yield Completion(requests[0].request_id, (1,), (0.0,), finish_reason=FinishReason.STOP)
        raise RuntimeError("broken inside")


def test_an_engine_that_raises_answers_for_every_request() -> None:
    async def main() -> list[Completion]:
        engine = LocalEngine("e", Exploding())
        return await asyncio.gather(*(engine.generate(request(f"r{i}")) for i in range(3)))

    first, *others = run_virtual(main())
    assert first.error is None
    assert [completion.error for completion in others] == ["RuntimeError: broken inside"] * 2


def test_frozen_admission_shows_the_engine_everything_before_it_starts() -> None:
    async def main() -> tuple[list[str], list[str]]:
        strategy = ScriptedEngine(lambda r: Response(1, 1.0), slots=1)
        log: list[str] = []
        pause, resume, generate = strategy.pause, strategy.resume, strategy.generate
        strategy.pause = lambda mode: (log.append(f"pause {mode}"), pause(mode))[1]  # type: ignore[method-assign]
        strategy.resume = lambda: (log.append(f"resume with {len(strategy._waiting)} waiting"), resume())[1]  # type: ignore[method-assign]
        strategy.generate = lambda rs: (log.append(" ".join(r.request_id for r in rs)), generate(rs))[1]  # type: ignore[method-assign]
        engine = LocalEngine("e", strategy, frozen_admission=True)
        order: list[str] = []

        async def one(name: str) -> None:
            await engine.generate(request(name))
            order.append(name)

        await asyncio.gather(*map(one, ["c", "a", "b"]))
        return log, order

    log, order = run_virtual(main())
    assert log == ["pause keep", "a b c", "resume with 3 waiting"]
    assert order == ["a", "b", "c"]
