"""Which engine gets a request. One router for all domains, because the domains share the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from roll_lite.data.samples import Completion, FinishReason, GenerationRequest
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.clients import EngineClient, EngineDead, NoEngineLeft, RequestFailed
from roll_lite.scheduler.waves import WaveGate

# The first responses to finish are the short ones: the initial guess (max_tokens) counts as this many responses,
# and old responses fade, because the policy's lengths drift during training.
PRIOR_RESPONSES = 8
RESPONSES_REMEMBERED = 512


class ExpectedLength:
    """Running mean of a domain's response lengths."""

    def __init__(self, initial: float) -> None:
        self.tokens = initial
        self._seen = PRIOR_RESPONSES

    def observe(self, tokens: int) -> None:
        self._seen = min(self._seen + 1, RESPONSES_REMEMBERED)
        self.tokens += (tokens - self.tokens) / self._seen


@dataclass
class EngineLoad:
    client: EngineClient
    tokens: float = 0.0
    """Prompt tokens plus expected response tokens of the requests in flight."""
    requests: int = 0
    served: int = 0
    dead: str | None = None
    """Cause."""


class Router:
    """Sends each request to the engine with the fewest tokens in flight. `deterministic`: by a hash of the request's id, in waves."""

    def __init__(self, engines: Sequence[EngineClient], timeout_s: float, deterministic: bool = False) -> None:
        self.engines = [EngineLoad(client) for client in engines]
        self.gate = WaveGate() if deterministic else None
        self._alive = list(self.engines)
        self._timeout_s = timeout_s
        self._expected: dict[str, ExpectedLength] = {}

    async def generate(self, domain: str, request: GenerationRequest) -> Completion:
        """A completion that can be used. Raises RequestFailed (try again) or NoEngineLeft (give up)."""
        expected = self._expected.setdefault(domain, ExpectedLength(request.sampling.max_tokens))
        while True:
            if self.gate is not None:
                await self.gate.enter()
            engine = self._choose(request)
            try:
                completion = await self._ask(engine, request, len(request.prompt_ids) + expected.tokens)
            except EngineDead as death:
                self._take_out(engine, death)
                continue
            if completion.error is not None:
                raise RequestFailed(completion.error)
            if completion.finish_reason is FinishReason.ABORT:
                raise RequestFailed("aborted by the engine")
            engine.served += 1
            expected.observe(len(completion.token_ids))
            return completion

    def _choose(self, request: GenerationRequest) -> EngineLoad:
        if not self._alive:
            causes = "; ".join(f"{engine.client.name}: {engine.dead}" for engine in self.engines)
            raise NoEngineLeft(f"no engine is left to generate ({causes})")
        if self.gate is not None:
            return self._alive[stable_hash(request.request_id) % len(self._alive)]
        return min(self._alive, key=lambda engine: engine.tokens)

    async def _ask(self, engine: EngineLoad, request: GenerationRequest, tokens: float) -> Completion:
        engine.tokens += tokens
        engine.requests += 1
        answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                completion = await engine.client.generate(request)
            answered = True
            return completion
        except TimeoutError as error:
            raise RequestFailed(f"time-out: no response within {self._timeout_s:g} s") from error
        except EngineDead:
            answered = True
            raise
        finally:
            engine.tokens -= tokens
            engine.requests -= 1
            if not answered:
                engine.client.abort([request.request_id])

    def _take_out(self, engine: EngineLoad, death: EngineDead) -> None:
        if engine in self._alive:
            self._alive.remove(engine)
            engine.dead = death.cause
