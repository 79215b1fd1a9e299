from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from scheduler_support import by_tokens, make_domain, make_service, prompt_of
from support_local_engine import LocalEngine

from roll_lite.data.samples import FinishReason, GenerationRequest, Sampling, Turn
from roll_lite.distributed.strategy.scripted import Response, ScriptedEngine
from roll_lite.scheduler.choice import EngineLoad
from roll_lite.scheduler.engines import EngineLost
from roll_lite.scheduler.router import NoEngineLeft, RequestFailed, Router, _Asked
from roll_lite.simulator.clock import run_virtual


def request(name: str, prompt_tokens: int = 4, max_tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(name, tuple(range(prompt_tokens)), Sampling(temperature=1.0, max_tokens=max_tokens))


class HeldEngine:
    """Answers when told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[str, asyncio.Future[Turn]] = {}
        self.aborted: list[str] = []

    async def generate(self, request: GenerationRequest, began: asyncio.Future[None] | None = None) -> Turn:
        self.held[request.request_id] = asyncio.get_running_loop().create_future()
        if began is not None:
            began.set_result(None)
        return await self.held[request.request_id]

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self.held and not self.held[request_id].done():
                self.held.pop(request_id).set_result(Turn(request_id, finish_reason=FinishReason.ABORT))

    def answer(self, request_id: str, tokens: int = 10, error: str | None = None) -> None:
        self.held.pop(request_id).set_result(Turn(request_id, tokens, finish_reason=FinishReason.STOP, error=error))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_long_request_weighs_as_much_as_many_short_ones() -> None:
    a, b = HeldEngine("a"), HeldEngine("b")
    router = Router([a, b], timeout_s=60)
    tasks = [asyncio.create_task(router.generate("long", request("long", prompt_tokens=400, max_tokens=600)))]
    await settle()
    tasks += [asyncio.create_task(router.generate("short", request(f"short {i}", prompt_tokens=40, max_tokens=60))) for i in range(11)]
    await settle()
    # 10 short ones weigh 1000 tokens as the long one does; the tie goes to the first engine.
    assert list(a.held) == ["long", "short 10"]
    assert list(b.held) == [f"short {i}" for i in range(10)]
    for engine in (a, b):
        for name in list(engine.held):
            engine.answer(name)
    await asyncio.gather(*tasks)
    assert [(load.tokens, load.requests) for load in router.engines] == [(0, 0), (0, 0)]
    assert [load.served for load in router.engines] == [2, 10]


async def test_expected_lengths_are_learned_per_domain() -> None:
    a, b = HeldEngine("a"), HeldEngine("b")
    router = Router([a, b], timeout_s=60)
    for domain, tokens in (("long", 1000), ("short", 10)):
        for i in range(2000):
            task = asyncio.create_task(router.generate(domain, request(f"{domain} {i}", prompt_tokens=10, max_tokens=1000)))
            await settle()
            (a if a.held else b).answer(f"{domain} {i}", tokens)
            await task
    task = asyncio.create_task(router.generate("long", request("L", prompt_tokens=10, max_tokens=1000)))
    await settle()
    loaded = next(load for load in router.engines if load.requests)
    assert loaded.tokens == pytest.approx(1010, rel=0.01)
    task.cancel()
    task = asyncio.create_task(router.generate("short", request("S", prompt_tokens=10, max_tokens=1000)))
    await settle()
    loaded = next(load for load in router.engines if load.requests)
    assert loaded.tokens == pytest.approx(20, rel=0.15)
    task.cancel()


async def test_load_is_released_on_failure_cancellation_and_time_out() -> None:
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=0.05)
    failing = asyncio.create_task(router.generate("d", request("failing")))
    cancelled = asyncio.create_task(router.generate("d", request("cancelled")))
    late = asyncio.create_task(router.generate("d", request("late")))
    await settle()
    assert router.engines[0].tokens == 3 * 104
    engine.answer("failing", error="out of cache")
    with pytest.raises(RequestFailed, match="out of cache"):
        await failing
    cancelled.cancel()
    with pytest.raises(RequestFailed, match=r"time-out: no response within 0\.05 s"):
        await late
    await settle()
    assert (router.engines[0].tokens, router.engines[0].requests) == (0, 0)
    assert engine.aborted == ["cancelled", "late"]


async def test_an_aborted_completion_is_a_failure_not_a_short_sample() -> None:
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=60)
    task = asyncio.create_task(router.generate("d", request("r")))
    await settle()
    engine.held["r"].set_result(Turn("r", 2, "half", FinishReason.ABORT))
    with pytest.raises(RequestFailed, match="aborted"):
        await task


async def test_requests_of_a_dead_engine_go_elsewhere() -> None:
    dying, sound = HeldEngine("dying"), HeldEngine("sound")
    router = Router([dying, sound], timeout_s=60)
    tasks = [asyncio.create_task(router.generate("d", request(f"r{i}"))) for i in range(4)]
    await settle()
    moved = list(dying.held)
    assert len(moved) == 2
    for name in moved:
        dying.held[name].set_exception(EngineLost("dying", "CUDA error"))
    await settle()
    assert sorted(sound.held) == ["r0", "r1", "r2", "r3"]
    assert dying.aborted == []
    for name in list(sound.held):
        sound.answer(name)
    await asyncio.gather(*tasks)
    later = asyncio.create_task(router.generate("d", request("later")))
    await settle()
    assert list(sound.held) == ["later"]
    sound.held["later"].set_exception(EngineLost("sound", "process killed"))
    with pytest.raises(NoEngineLeft, match="dying: CUDA error; sound: process killed"):
        await later


class RoundRobin(Router):
    """The baseline: as many requests for each engine."""

    _turn: itertools.count[int]

    def _choose(self, asked: _Asked) -> tuple[EngineLoad, float]:
        self._turn = getattr(self, "_turn", itertools.count())
        return self.engines[next(self._turn) % len(self.engines)], 0.0


def makespan(router_class: type[Router]) -> float:
    """Time for four engines to serve two domains, lengths 20 and 400, that take turns in a pattern of four."""

    async def main() -> float:
        def script(request: GenerationRequest) -> Response:
            return Response(400 if request.sampling.max_tokens == 500 else 20, 0.01)

        engines = [ScriptedEngine(script, slots=2) for _ in range(4)]
        router = router_class([LocalEngine(f"e{i}", engine) for i, engine in enumerate(engines)], timeout_s=1e9)
        calls = []
        for i in range(80):
            domain, limit = ("long", 500) if i % 4 == 0 else ("short", 50)
            calls.append(router.generate(domain, request(f"r{i}", max_tokens=limit)))
        await asyncio.gather(*calls)
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_tokens_in_flight_beat_round_robin_by_a_third_at_least() -> None:
    # In turns, one engine gets every long request: 20 * 400 tokens in 2 slots are 40 s. Spread evenly, an engine has
    # (20 * 400 + 60 * 20) / 4 tokens in 2 slots, 11.5 s, plus at most one long request that starts last.
    assert makespan(RoundRobin) == pytest.approx(40.0, rel=0.01)
    assert makespan(Router) < 40.0 * 2 / 3
    assert makespan(Router) <= 11.5 + 4.0


async def test_deterministic_routing_depends_on_the_id_only() -> None:
    async def chosen(names: list[str]) -> dict[str, str]:
        engines = [HeldEngine(f"e{i}") for i in range(3)]
        router = Router(engines, timeout_s=60, deterministic=True)
        tasks = [asyncio.create_task(router.generate("d", request(name))) for name in names]
        await settle()
        found = {name: engine.name for engine in engines for name in engine.held}
        for task in tasks:
            task.cancel()
        return found

    names = [f"r{i}" for i in range(60)]
    assert await chosen(names) == await chosen(names[::-1])
    assert set((await chosen(names)).values()) == {"e0", "e1", "e2"}


def test_domains_share_one_view_of_the_engines() -> None:
    async def main() -> list[float]:
        domains = [make_domain("long", 0, share=1, max_tokens=500), make_domain("short", 1, share=3, max_tokens=50)]

        def script(request: GenerationRequest) -> Response:
            return Response(400 if prompt_of(request)[0] == 0 else 40, 0.01)

        service, _, _ = make_service(domains, [script, script], slots=4)
        tokens = []
        for _ in range(3):
            result = await service.next_batch(16)
            tokens.append(result.stats.wall_s)
        return tokens

    # 4 long groups of 4 * 400 and 12 short ones of 4 * 40 tokens: 8320 tokens over 8 slots are 10.4 s at best.
    walls = run_virtual(main())
    assert all(10.4 - 1e-6 <= wall <= 14.5 for wall in walls), walls


async def test_by_tokens_helper_ends_with_stop() -> None:
    engine = LocalEngine("e", ScriptedEngine(by_tokens(3, 0.0)))
    turn = await engine.generate(request("r"))
    assert (turn.length, turn.finish_reason) == (3, FinishReason.STOP)
