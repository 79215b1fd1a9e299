from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from math import inf
from statistics import fmean

from roll_lite.data.samples import FinishReason, GenerationRequest, Turn, joined
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.choice import EngineChoice, EngineLoad
from roll_lite.scheduler.engines import EngineClient, EngineLost
from roll_lite.scheduler.flight import EngineClock, ExpectedLength, Flight, RequestFailed

NEW_COST = 0.1
"""Weight of the newest request in a domain's mean load per request."""
READY_SHARE = 0.25
"""Requests sent beyond an engine's slots, as a fraction of them: a waiting request fills a free slot at once."""
MAX_ABORTS_WITHOUT_PROGRESS = 3


class NoEngineLeft(RuntimeError):
    """Error: no engine is left to generate."""


class Router:
    """Sends each request to the least loaded engine, or to one that has its prefix cached. Deterministic runs choose by request id and
    start requests in waves.

    `engine_slots`: requests that an engine runs at once. `engine_tokens`: maximum tokens in flight per engine. `timeout_s`: of generation
    (see flight.py).
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        timeout_s: float,
        deterministic: bool = False,
        engine_slots: int | None = None,
        engine_tokens: int | None = None,
        engines_restart: bool = False,
    ) -> None:
        """`engines_restart`: lost engines are replaced, so requests wait instead of failing if none is left."""
        self.engines = [EngineLoad(client) for client in engines]
        self.gate = WaveGate(self._all_serve) if deterministic else None
        self.clock = EngineClock()
        self.on_room: Callable[[], None] = lambda: None
        self.on_loss: Callable[[], None] = lambda: None
        self._engines_restart = engines_restart
        self._timeout_s = timeout_s
        self._slots = engine_slots
        self._most = None if engine_slots is None or deterministic else engine_slots + max(1, int(engine_slots * READY_SHARE))
        self._choice = EngineChoice(self.engines, self._most, None if deterministic else engine_tokens)
        self._choice.on_room = self._room_found
        self._queues: dict[str, deque[Flight]] = {}
        self._waiting = 0
        self._in_flight: dict[str, int] = {}
        self._at_engines: dict[str, EngineLoad] = {}
        self._flights: dict[str, Flight] = {}
        self._held = False
        self._idle = asyncio.Event()
        self._expected: dict[str, ExpectedLength] = {}
        self._costs: dict[str, float] = {}

    async def generate(self, domain: str, request: GenerationRequest, so_far: Turn | None = None) -> Turn:
        """Generate a response, or continue `so_far`. Raise RequestFailed (a retry may succeed) or NoEngineLeft."""
        expected = self._expected.get(domain)
        if expected is None or expected.most < request.sampling.max_tokens:  # a validation may use a smaller maximum
            expected = self._expected[domain] = ExpectedLength(request.sampling.max_tokens)
        flight = Flight(domain, request, expected, self._timeout_s, self._choice, self.clock, so_far)
        self._flights[request.request_id] = flight
        try:
            turn = await (self._generate(flight) if self.gate is None else self._generate_in_wave(flight, self.gate))
        finally:
            del self._flights[request.request_id]
        if hasattr(flight, "engine"):  # `so_far` may have all tokens already
            self._choice.remember(flight.sample, flight.engine)
        flight.expected.observe(turn.length)
        return turn

    def flight(self, request_id: str) -> Flight | None:
        return self._flights.get(request_id)

    async def _generate(self, flight: Flight) -> Turn:
        while True:
            if flight.so_far is not None and flight.so_far.length >= flight.first.sampling.max_tokens:
                return flight.so_far._replace(finish_reason=FinishReason.LENGTH)  # it was interrupted after its last token
            await self._place(flight)
            try:
                turn = await self._answer(flight)
            except EngineLost as loss:
                if loss.partial is not None:
                    flight.interrupted(loss.partial)
                flight.survive(loss)
                continue
            if turn.error is not None:
                raise RequestFailed(turn.error)
            if turn.finish_reason is not FinishReason.ABORT:
                return joined(flight.so_far, turn)
            # Continue the aborted request. Aborts without new tokens count, except during a hold.
            if turn.length and turn.tokens is not None:
                flight.interrupted(turn)
                flight.aborts_without_progress = 0
            elif not self._held:
                flight.aborts_without_progress += 1
                if flight.aborts_without_progress >= MAX_ABORTS_WITHOUT_PROGRESS or turn.length:
                    partial = joined(flight.so_far, turn) if turn.length else flight.so_far
                    raise RequestFailed("aborted by the engine", partial)

    async def _generate_in_wave(self, flight: Flight, gate: WaveGate) -> Turn:
        """Generate a response in a wave (deterministic runs). Interrupted requests start over: continued responses would differ."""
        async with gate.wave(flight.first.request_id) as wave:
            while True:
                await self._place(flight)
                failure: RequestFailed | EngineLost | None = None
                turn = None
                try:
                    turn = await self._answer(flight)
                except (RequestFailed, EngineLost) as error:
                    failure = error
                is_lost = isinstance(failure, EngineLost) or (turn is not None and turn.finish_reason is FinishReason.ABORT)
                if isinstance(failure, EngineLost):
                    flight.survive(failure)
                elif is_lost and not self._held:
                    flight.aborts_without_progress += 1
                if is_lost and flight.aborts_without_progress >= MAX_ABORTS_WITHOUT_PROGRESS:
                    raise RequestFailed("aborted by the engine")
                if await wave.starts_again(flight.first.request_id, flight.engine.client.name, is_lost):
                    flight.start_over()
                    continue
                if isinstance(failure, RequestFailed):
                    raise failure
                assert turn is not None, "a lost request starts again"
                if turn.error is not None:
                    raise RequestFailed(turn.error)
                return turn

    # ------------------------------------------------------------ load

    def has_room(self, announced: int = 0, tokens: float = 0.0) -> bool:
        """True if more prompts may start. `announced`: admitted requests not yet in the router; `tokens`: their expected tokens."""
        if self._held or self._slots is None or self.gate is not None:
            return not self._held
        each = tokens / announced if announced else fmean(self._costs.values()) if self._costs else 0.0
        free = min(self.takes(0.0) - sum(self._in_flight.values()), self._choice.free_tokens / max(1.0, each))
        will_wait = max(0.0, announced - max(0.0, free))
        running = min(self._slots * self._choice.serving, self.takes(each))
        return self._waiting + will_wait < max(1, int(running * READY_SHARE))

    def takes(self, tokens: float) -> float:
        return inf if self._most is None else self._choice.takes(tokens)

    def expected_tokens(self, domain: str, most: int) -> float:
        """Return the expected load of the domain's next request, in tokens; `most` before its first request."""
        return self._costs.get(domain, float(most))

    def under_way(self, domain: str) -> int:
        return self._in_flight.get(domain, 0) + len(self._queues.get(domain, ()))

    async def hold(self, interrupt: bool) -> None:
        """Stop sending until `release`; wait until nothing is in flight. `interrupt`: abort running requests, which continue later."""
        self._held = True
        if interrupt:
            at: dict[EngineLoad, list[str]] = {}
            for request_id, engine in self._at_engines.items():
                at.setdefault(engine, []).append(request_id)
            for engine, request_ids in at.items():
                engine.client.abort(request_ids)
        while self._at_engines:
            self._idle.clear()
            await self._idle.wait()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._send_waiting()
            self.on_room()

    def weights_changed(self) -> None:
        self._choice.forget()

    # ------------------------------------------------------------ engines come and go

    def add(self, client: EngineClient) -> None:
        engine = EngineLoad(client)
        lost = [place for place, other in enumerate(self.engines) if other.dead is not None and other.client.name == client.name]
        if lost:
            self.engines[lost[0]] = engine
        else:
            self.engines.append(engine)
        self._choice.add(engine)
        self._engines_changed()
        self.on_room()

    def give_up(self, name: str) -> None:
        """Forget a lost engine that will not return, unless it is the only one."""
        if len(self.engines) > 1:
            self.engines.remove(self._named(name))
        self._engines_changed()

    def _engines_changed(self) -> None:
        self._send_waiting()
        if self.gate is not None:
            self.gate.engines_changed()

    def _all_serve(self) -> bool:
        """False while a lost engine is being replaced."""
        return not self._engines_restart or all(engine.serves for engine in self.engines)

    @property
    def waits_for_engine(self) -> bool:
        """True if no engine serves, and a replacement will."""
        return self._engines_restart and not self._choice.serving

    async def drain(self, name: str, interrupt: bool = False) -> None:
        """Stop sending to an engine, and remove it when idle. `interrupt`: abort its requests, which continue elsewhere."""
        engine = self._choice.withdraw(self._named(name))
        if interrupt:
            engine.client.abort([request_id for request_id, at in self._at_engines.items() if at is engine])
        while engine.requests:
            self._idle.clear()
            await self._idle.wait()
        if engine in self.engines:
            self.engines.remove(engine)

    def remove(self, name: str) -> None:
        engine = self._choice.withdraw(self._named(name))
        engine.client.abort([request_id for request_id, at in self._at_engines.items() if at is engine])
        self.engines.remove(engine)

    def engine_lost(self, name: str, cause: str) -> None:
        for engine in self.engines:
            if engine.client.name == name:
                self._take_out(engine, cause)

    def _named(self, name: str) -> EngineLoad:
        return next(engine for engine in self.engines if engine.client.name == name)

    def _take_out(self, engine: EngineLoad, cause: str) -> None:
        if engine.dead is None:
            self._choice.withdraw(engine).dead = cause
            self._engines_changed()
            self.on_loss()

    # ------------------------------------------------------------ placing

    async def _place(self, flight: Flight) -> None:
        if self._waiting or self._held or not self._give(flight):
            await self._queue(flight, has_begun=bool(flight.continuations) or flight.first.context is not None)
            # Other tasks ran since `_give`: if the engine has left or requests are held meanwhile, give the place back.
            while self._held or not flight.engine.serves:
                self._free(flight)
                await self._queue(flight, has_begun=True)

    async def _queue(self, flight: Flight, has_begun: bool) -> None:
        flight.assigned = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(flight.domain, deque())
        if has_begun:
            queue.appendleft(flight)
        else:
            queue.append(flight)
        self._waiting += 1
        try:
            await flight.assigned
        except asyncio.CancelledError:
            if flight.assigned.cancelled():
                self._waiting -= 1  # dropped from the queue at its front
            elif flight.assigned.exception() is None:
                self._free(flight)
            raise

    def _give(self, flight: Flight) -> bool:
        if (found := self._choose(flight)) is None:
            return False
        flight.engine, flight.cost = found
        self._choice.give(flight.engine, flight.prefix, flight.cost)
        before = self._costs.get(flight.domain, flight.cost)
        self._costs[flight.domain] = flight.cost + (1 - NEW_COST) * (before - flight.cost)
        self._in_flight[flight.domain] = self._in_flight.get(flight.domain, 0) + 1
        return True

    def _free(self, flight: Flight) -> None:
        self._choice.take_back(flight.engine, flight.cost)
        self._in_flight[flight.domain] -= 1
        self._idle.set()
        self._room_found()

    def _room_found(self) -> None:
        self._send_waiting()
        if self._waiting == 0 or self.has_room():
            self.on_room()

    def _send_waiting(self) -> None:
        """Send waiting requests, first of the domain with fewest in flight: one domain's long responses do not delay others."""
        while not self._held and (waiting := [name for name, queue in self._queues.items() if queue]):
            queue = self._queues[min(waiting, key=lambda name: self._in_flight.get(name, 0))]
            flight = queue[0]
            if not flight.assigned.cancelled():
                try:
                    if not self._give(flight):
                        return
                    flight.assigned.set_result(None)
                except NoEngineLeft as error:
                    flight.assigned.set_exception(error)
                self._waiting -= 1
            queue.popleft()

    def _choose(self, flight: Flight) -> tuple[EngineLoad, float] | None:
        shared, own = flight.shared_tokens, flight.own_tokens + flight.left()
        if self.gate is None and (found := self._choice.choose(flight.prefix, shared, own)) is not None:
            return found
        if not self._choice.serving:
            if self._engines_restart:
                return None
            causes = "; ".join(f"{engine.client.name}: {engine.dead or 'drained'}" for engine in self.engines)
            raise NoEngineLeft(f"no engine is left to generate ({causes})")
        if self.gate is None:
            return None
        serving = [engine for engine in self.engines if engine.serves]
        return serving[stable_hash(flight.first.request_id) % len(serving)], shared + own

    async def _answer(self, flight: Flight) -> Turn:
        flight.depart()
        request_id, turn = flight.request.request_id, None
        self._at_engines[request_id] = flight.engine
        try:
            turn = await flight.answer
        except EngineLost as loss:
            self._take_out(flight.engine, loss.cause)
            raise
        finally:
            flight.arrive()
            del self._at_engines[request_id]
            if flight.answer.cancelled() or (flight.timed_out and turn is None):
                flight.engine.client.abort([request_id])
            self._free(flight)
        if turn is not None and not (flight.timed_out and (turn.error is not None or turn.finish_reason is FinishReason.ABORT)):
            return turn  # also a response that ended just at its timeout
        partial = joined(flight.so_far, turn) if turn is not None and turn.length else flight.so_far
        what = "no response" if flight.begun else "the engine began with nothing"
        began = flight.begun and turn is None
        raise RequestFailed(f"time-out: {what} within {self._timeout_s:g} s", partial, timed_out=True, began=began)


class Wave:
    """Requests of a deterministic run that start together. If an engine is lost, all its requests of the wave start again: the replacement
    gets the same batch."""

    def __init__(self, request_ids: Iterable[str], all_serve: Callable[[], bool]) -> None:
        self._running = set(request_ids)
        self._all_serve = all_serve
        self._answered: dict[str, tuple[str, asyncio.Future[bool]]] = {}
        """{request id: (engine, future that `starts_again` awaits)}."""
        self._lost: set[str] = set()

    async def starts_again(self, request_id: str, engine: str, is_lost: bool) -> bool:
        """Wait until the whole wave is answered. True if the request must start again. `is_lost`: its engine was lost."""
        place = asyncio.get_running_loop().create_future()
        self._answered[request_id] = (engine, place)
        self._running.discard(request_id)
        if is_lost:
            self._lost.add(engine)
        self.settle()
        return await place

    def leave(self, request_id: str) -> None:
        self._running.discard(request_id)
        self._answered.pop(request_id, None)
        self.settle()

    @property
    def is_over(self) -> bool:
        return not self._running and not self._answered

    def settle(self) -> None:
        """End the wave if all requests are answered; restart requests of lost engines when all engines serve."""
        if self._running or (self._lost and not self._all_serve()):
            return
        again = {request_id for request_id, (engine, _) in self._answered.items() if engine in self._lost}
        self._lost.clear()
        for request_id in sorted(again or self._answered):
            _, place = self._answered.pop(request_id)
            if not place.done():
                place.set_result(bool(again))
        self._running |= again


class WaveGate:
    """Barrier of deterministic runs: requests start together once every unfinished sample waits, so that engines get equal batches in every
    run."""

    def __init__(self, all_serve: Callable[[], bool]) -> None:
        self._all_serve = all_serve
        self._members = 0
        self._waiting: dict[str, asyncio.Future[Wave]] = {}
        self._waves: list[Wave] = []
        """Waves with unfinished requests. Usually one: the next starts once all samples wait."""

    def join(self) -> None:
        self._members += 1

    def leave(self) -> None:
        self._members -= 1
        self._open_if_complete()

    @asynccontextmanager
    async def wave(self, request_id: str) -> AsyncIterator[Wave]:
        """Wait for the barrier; leave the wave of requests on exit."""
        loop = asyncio.get_running_loop()
        place = self._waiting[request_id] = loop.create_future()
        loop.call_soon(self._open_if_complete)  # deferred: otherwise the last sample would leave before all others
        try:
            wave = await place
        finally:
            self._waiting.pop(request_id, None)
        try:
            yield wave
        finally:
            wave.leave(request_id)
            if wave.is_over and wave in self._waves:
                self._waves.remove(wave)

    def engines_changed(self) -> None:
        for wave in self._waves:
            wave.settle()
        self._open_if_complete()

    def _open_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < self._members or not self._all_serve():
            return
        waiting, self._waiting = self._waiting, {}
        wave = Wave([request_id for request_id, place in waiting.items() if not place.done()], self._all_serve)
        self._waves.append(wave)
        for _, place in sorted(waiting.items()):
            if not place.done():
                place.set_result(wave)
