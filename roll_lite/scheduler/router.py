"""Which engine gets a request, and when. One router for all domains, because the domains share the engines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from roll_lite.data.samples import FinishReason, GenerationRequest, Turn
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.engines import EngineClient, EngineLost

# The first responses to finish are the short ones: the initial guess (max_tokens) counts as this many responses,
# and old responses fade, because the policy's lengths drift during training.
PRIOR_RESPONSES = 8
RESPONSES_REMEMBERED = 512

READY_SHARE = 0.25
"""So many requests more than an engine can run, as a share of those, are sent to it: when one ends, the next is there."""
ABORT_PATIENCE_S = 10.0
"""For an engine to answer an abort with the tokens that it has."""


class RequestFailed(Exception):
    """One generation request failed; another attempt may succeed."""

    def __init__(self, cause: str, partial: Turn | None = None, timed_out: bool = False, began: bool = False) -> None:
        """`partial`: what was generated before, if anything and if it is known. `began`: something was, or may have been."""
        super().__init__(cause)
        self.cause = cause
        self.partial = partial
        self.timed_out = timed_out
        self.began = began or partial is not None


class NoEngineLeft(RuntimeError):
    """The last engine died."""


class ExpectedLength:
    """Running mean of a domain's response lengths."""

    def __init__(self, initial: float) -> None:
        self.tokens = initial
        self._seen = PRIOR_RESPONSES

    def observe(self, tokens: int) -> None:
        self._seen = min(self._seen + 1, RESPONSES_REMEMBERED)
        self.tokens += (tokens - self.tokens) / self._seen


class WaveGate:
    """Waves: in a deterministic run an engine must get the same requests at the same moment every time. The gate holds requests back
    until every live sample is either at the gate or done, then lets all of them through in one event-loop turn.

    What is in a wave then depends on what happened, never on when: retries of a wave form the next one.
    """

    def __init__(self) -> None:
        self._members = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def join(self) -> None:
        """A sample starts."""
        self._members += 1

    def leave(self) -> None:
        """A sample is done."""
        self._members -= 1
        self._open_if_complete()

    async def enter(self, request_id: str) -> None:
        """A sample wants to send a request. They leave in the order of their ids, in which an engine will get them."""
        loop = asyncio.get_running_loop()
        place = self._waiting[request_id] = loop.create_future()
        loop.call_soon(self._open_if_complete)  # not at once: the last to come would not wait, and leave before all others
        try:
            await place
        finally:
            self._waiting.pop(request_id, None)

    def _open_if_complete(self) -> None:
        if len(self._waiting) < self._members:
            return
        wave, self._waiting = self._waiting, {}
        for _, place in sorted(wave.items()):
            if not place.done():
                place.set_result(None)


@dataclass
class EngineLoad:
    client: EngineClient
    tokens: float = 0.0
    """Prompt tokens plus expected response tokens of the requests in flight."""
    requests: int = 0
    """Number of requests in flight, or given to it and about to be."""
    generating: int = 0
    """Requests that it is known to have begun and not to have ended."""
    last_sign: float = 0.0
    """When it was last heard to have begun or ended one."""
    served: int = 0
    dead: str | None = None
    """Why it cannot serve any more."""


@dataclass
class _Waiting:
    request: GenerationRequest
    engine: asyncio.Future[EngineLoad]


class Router:
    """Sends each request to the engine with the fewest tokens in flight. `deterministic`: by a hash of the request's id, in waves.

    `engine_slots`: how many requests an engine runs at a time at most. What is in flight to an engine is limited by it, the rest waits
    here. A request's time, `timeout_s`, runs from when the engine is known to have begun with it: waiting costs a sample nothing, here
    or there. Only where an engine generates nothing at all for as long does what waits there fail.
    """

    def __init__(
        self, engines: Sequence[EngineClient], timeout_s: float, deterministic: bool = False, engine_slots: int | None = None
    ) -> None:
        self.engines = [EngineLoad(client) for client in engines]
        self.gate = WaveGate() if deterministic else None
        self._alive = list(self.engines)
        self._timeout_s = timeout_s
        self._most_in_flight = None if engine_slots is None else engine_slots + max(1, int(engine_slots * READY_SHARE))
        self._waiting: deque[_Waiting] = deque()
        self._expected: dict[str, ExpectedLength] = {}

    async def generate(self, domain: str, request: GenerationRequest) -> Turn:
        """A turn that can be used. Raises RequestFailed (try again) or NoEngineLeft (give up)."""
        expected = self._expected.setdefault(domain, ExpectedLength(request.sampling.max_tokens))
        while True:
            if self.gate is not None:
                await self.gate.enter(request.request_id)
            engine = await self._engine_for(request)
            try:
                turn = await self._ask(engine, request, _prompt_length(request) + expected.tokens)
            except EngineLost:
                continue
            if turn.error is not None:
                raise RequestFailed(turn.error)
            if turn.finish_reason is FinishReason.ABORT:
                raise RequestFailed("aborted by the engine", turn if turn.length else None)
            engine.served += 1
            expected.observe(turn.length)
            return turn

    # ------------------------------------------------------------ where to

    async def _engine_for(self, request: GenerationRequest) -> EngineLoad:
        """The engine, with a place in flight taken."""
        if not self._waiting and (engine := self._choose(request)) is not None:
            engine.requests += 1
            return engine
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            return await waiting.engine
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._send_waiting()
            elif not waiting.engine.cancelled() and waiting.engine.exception() is None:
                self._free(waiting.engine.result())
            raise

    def _free(self, engine: EngineLoad) -> None:
        engine.requests -= 1
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            waiting = self._waiting[0]
            if waiting.engine.done():  # cancelled, and on its way out
                self._waiting.popleft()
                continue
            try:
                engine = self._choose(waiting.request)
            except NoEngineLeft as error:
                waiting.engine.set_exception(error)
            else:
                if engine is None:
                    return
                engine.requests += 1
                waiting.engine.set_result(engine)
            self._waiting.popleft()

    def _choose(self, request: GenerationRequest) -> EngineLoad | None:
        """None: all of them have enough to do. In waves they get everything at once."""
        if not self._alive:
            causes = "; ".join(f"{engine.client.name}: {engine.dead}" for engine in self.engines)
            raise NoEngineLeft(f"no engine is left to generate ({causes})")
        if self.gate is not None:
            return self._alive[stable_hash(request.request_id) % len(self._alive)]
        most = self._most_in_flight
        with_room = self._alive if most is None else [engine for engine in self._alive if engine.requests < most]
        return min(with_room, key=lambda engine: engine.tokens, default=None)

    def _take_out(self, engine: EngineLoad, loss: EngineLost) -> None:
        if engine in self._alive:
            self._alive.remove(engine)
            engine.dead = loss.cause
            self._send_waiting()

    # ------------------------------------------------------------ there and back

    async def _ask(self, engine: EngineLoad, request: GenerationRequest, tokens: float) -> Turn:
        engine.tokens += tokens
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer = asyncio.ensure_future(engine.client.generate(request, began))
        try:
            await self._until_begun(engine, began, answer)
            if began.done():
                await self._until_ended(engine, answer)
            return answer.result() if answer.done() else await self._cut_off(engine, request, began, answer)
        except EngineLost as loss:
            self._take_out(engine, loss)
            raise
        finally:
            engine.tokens -= tokens
            if not answer.done():
                answer.cancel()
                engine.client.abort([request.request_id])
            self._free(engine)

    async def _until_begun(self, engine: EngineLoad, began: asyncio.Future[None], answer: asyncio.Future[Turn]) -> None:
        """Or answered, or the engine has stood still for as long as a request may take."""
        clock = asyncio.get_running_loop().time
        sent, still = clock(), 0.0
        while still < self._timeout_s and not (began.done() or answer.done()):
            await asyncio.wait((began, answer), timeout=self._timeout_s - still, return_when=asyncio.FIRST_COMPLETED)
            still = 0.0 if engine.generating else clock() - max(sent, engine.last_sign)
        engine.last_sign = clock() if began.done() or answer.done() else engine.last_sign

    async def _until_ended(self, engine: EngineLoad, answer: asyncio.Future[Turn]) -> None:
        """Until the engine has answered, or the request's time is up."""
        engine.generating += 1
        try:
            await asyncio.wait((answer,), timeout=self._timeout_s)
        finally:
            engine.generating -= 1
            engine.last_sign = asyncio.get_running_loop().time()

    async def _cut_off(
        self, engine: EngineLoad, request: GenerationRequest, began: asyncio.Future[None], answer: asyncio.Future[Turn]
    ) -> Turn:
        """The time is up. What there is of the response by now goes with the failure; one that just ended is no failure."""
        engine.client.abort([request.request_id])
        await asyncio.wait((answer,), timeout=ABORT_PATIENCE_S)
        turn = answer.result() if answer.done() else None
        if turn is not None and turn.error is None and turn.finish_reason is not FinishReason.ABORT:
            return turn
        partial = turn if turn is not None and turn.length else None
        what = "no response" if began.done() else "the engine began with nothing"
        # One that has begun and does not say how far it has come may have come far.
        raise RequestFailed(f"time-out: {what} within {self._timeout_s:g} s", partial, timed_out=True, began=began.done() and turn is None)


def _prompt_length(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + (request.context.length if request.context is not None else 0)
