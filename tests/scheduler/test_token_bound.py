"""rollout.max_tokens_per_engine: what is in flight to an engine, as far as it is known, and what waits for it."""

from __future__ import annotations

import asyncio

import pytest
from scheduler_support import Prompts, by_tokens, make_domain, make_service
from support_scripted import Response, Script

from roll_lite.data.samples import GenerationRequest, Sampling
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.supply import Asynchronous
from roll_lite.simulator.clock import run_virtual

MOST = 500
PROMPT, TOKENS = 4, 64
FIT = MOST // (PROMPT + TOKENS) + 1
"""Requests of the longest responses that an engine takes: the last one may go beyond its bound."""


async def watch(router: Router, domain: str, seen: list[tuple[int, float]]) -> None:
    """How many requests wait, and the most tokens in flight to an engine."""
    while True:
        seen.append((sum(len(queue) for queue in router._queues.values()), max(engine.tokens for engine in router.engines)))
        assert sum(engine.tokens for engine in router.engines) == pytest.approx(router._choice._tokens)
        await asyncio.sleep(0.5)


def house(script: Script, seen: list[tuple[int, float]], steps: int, validate: bool = False) -> None:
    async def main() -> None:
        domain = make_domain("a", samples=8, max_tokens=TOKENS, validation=Prompts("a", 0, 60))
        service, router, _ = make_service([domain], [script] * 2, engine_slots=64, engine_tokens=MOST, supply=Asynchronous(4))
        watching = asyncio.create_task(watch(router, "a", seen))
        if validate:
            await service.evaluate(2, {"a": Sampling(1.0, TOKENS)})
        for _ in range(steps):
            await service.next_batch(32)
            await asyncio.sleep(10.0)
        service.close()
        watching.cancel()

    run_virtual(main())


def test_what_engines_have_no_room_for_is_not_started() -> None:
    """A group's age runs from its admission, so little waits: a quarter of what runs, and the rest of a group."""
    seen: list[tuple[int, float]] = []
    house(by_tokens(TOKENS, 1.0), seen, steps=3)
    assert max(waiting for waiting, _ in seen) <= FIT * 2 // 4 + 8
    assert MOST - PROMPT - TOKENS <= max(tokens for _, tokens in seen) <= MOST + PROMPT + TOKENS, "and engines have enough to do"


def test_a_validation_does_not_ask_for_more_either() -> None:
    seen: list[tuple[int, float]] = []
    house(by_tokens(TOKENS, 1.0), seen, steps=0, validate=True)
    assert max(waiting for waiting, _ in seen) <= 2


def test_responses_that_become_longer_than_expected_count_as_long_as_they_are() -> None:
    """The first ones have 5 tokens, the later ones 64: what the router takes them for follows what engines report."""
    asked: list[GenerationRequest] = []

    def script(request: GenerationRequest) -> Response:
        asked.append(request)
        return Response(5 if len(asked) < 400 else TOKENS, 1.0)

    async def main() -> list[tuple[float, float]]:
        service, router, engines = make_service(
            [make_domain("a", samples=8, max_tokens=TOKENS)], [script], engine_slots=64, engine_tokens=MOST, supply=Asynchronous(4)
        )
        batches = asyncio.create_task(service.next_batch(32))
        while len(asked) < 400:
            await asyncio.sleep(0.5)
            if batches.done():
                batches = asyncio.create_task(service.next_batch(32))
        pairs = []
        for _ in range(60):
            await asyncio.sleep(1.0)
            now = asyncio.get_running_loop().time()
            pairs.append((router.engines[0].tokens, float(sum(run.produced(now) for run in engines[0]._running.values()))))
        service.close()
        batches.cancel()
        return pairs

    for expected, generated in run_virtual(main())[20:]:
        assert expected >= 0.8 * generated
