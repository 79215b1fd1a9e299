"""Token proof through the router: engines are held, aborted and updated while they write, so a response may have several pieces, written by
several engines, and several weight versions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support_local_engine import LocalEngine
from support_scripted import Response, ScriptedEngine, _Running

from roll_lite.data.samples import Branch, Completion, FinishReason, GenerationRequest, Sampling, Turn
from roll_lite.distributed.strategy.base import RequestProgress
from roll_lite.scheduler.router import Router
from tests.environments.test_rendering import FAMILIES
from tests.environments.test_token_proof import ROOM, Engine, Limits, check, played, renderers_of

SECONDS_PER_TOKEN = 2e-4


class Speaking(ScriptedEngine):
    """Writes the voice's texts token by token."""

    def __init__(self, voice: Engine) -> None:
        super().__init__(self.draw)
        self.voice = voice
        self.texts: dict[str, list[int]] = {}
        self.resumed = 0

    def draw(self, request: GenerationRequest) -> Response:
        self.resumed += request.resumed_tokens > 0
        text = self.texts[request.request_id] = self.voice.response()
        return Response(request.resumed_tokens + len(text), SECONDS_PER_TOKEN)

    def _end(self, run: _Running, tokens: int, reason: FinishReason, error: str | None = None) -> None:
        request, ids = run.request, self.texts.pop(run.request.request_id)[:tokens]
        self._running.pop(request.request_id, None)
        spans = [span for span in run.versions if span.start < max(1, tokens)]
        versions = [max(span for span in spans if span.start <= place).version for place in range(tokens)]
        log_probs = self.voice.say(list(request.prompt_ids), ids, versions) if ids else ()
        run.answer.set_result(Completion(request.request_id, tuple(ids), log_probs, finish_reason=reason, versions=tuple(spans)))

    def _progress_of(self, *given: Any) -> RequestProgress | None:
        return None

    async def update(self, version: int) -> None:
        await self.begin_weight_update([])
        await self.receive_bucket([])
        await asyncio.sleep(SECONDS_PER_TOKEN)
        await self.finish_weight_update(version)


@pytest.mark.parametrize("family", FAMILIES)
async def test_interrupted_responses_train_once(family: str, tokenizer_of: Callable[[str], Any]) -> None:
    tokenizer, renderers = tokenizer_of(family), renderers_of(tokenizer_of(family))
    encode = cache(lambda text: tokenizer.encode(text, add_special_tokens=False))
    chance = random.Random(family)
    voice = Engine(chance, tokenizer.eos_token_id, encode, family)
    engines = [Speaking(voice) for _ in range(2)]
    router = Router([LocalEngine(f"engine {number}", engine) for number, engine in enumerate(engines)], 1e6)

    async def ask(request: GenerationRequest, so_far: Turn | None) -> Turn:
        return await router.generate("proof", request, so_far)

    async def play(number: int) -> list[Branch]:
        own = random.Random(f"{number} {family}")
        limits = Limits(own.choice((4, 20)), 60.0, 1000)
        return list((await played(own, family, ask, renderers, Sampling(1.0, ROOM), limits, f"proof/{number}"))[2].rows)

    async def disturb() -> None:
        version = 0
        while True:
            await asyncio.sleep(chance.random() * 5 * SECONDS_PER_TOKEN)
            version += 1
            if holds := chance.random() < 0.5:
                await router.hold(interrupt=True)
            await asyncio.gather(*(engine.update(version) for engine in engines))
            if holds:
                router.release()

    disturbing = asyncio.create_task(disturb())
    rows = [row for rows in await asyncio.gather(*map(play, range(60))) for row in rows]
    assert disturbing.cancel(), "it ran to the end"
    check(voice, rows)
    updated, resumed = sum(len(set(sampled.versions)) > 1 for sampled in voice.sampled), sum(engine.resumed for engine in engines)
    assert min(updated, resumed) > 10, (updated, resumed)
