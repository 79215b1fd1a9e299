"""Engines as the router sees them: futures on one side, batches of requests and of completions on the other.

A call that crosses a process boundary costs about as much as generating a short sample on a small model. So what is asked for
within one turn of the event loop travels in one call, and one call returns everything that finished since the last one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import InferenceStrategy, PauseMode
from roll_lite.scheduler.clients import EngineDead


@dataclass(frozen=True)
class Collected:
    completions: list[Completion]
    dead: str | None = None
    """Why the engine cannot go on; its unanswered requests are lost."""


class CompletionPump:
    """The engine's side: drives a strategy, keeps what finishes until it is fetched."""

    def __init__(self, strategy: InferenceStrategy, linger_s: float = 0.05) -> None:
        self._strategy = strategy
        self._linger_s = linger_s
        self._finished: list[Completion] = []
        self._outstanding = 0
        self._changed = asyncio.Event()
        self._dead: str | None = None
        self._consumers: set[asyncio.Task[None]] = set()

    async def submit(self, requests: Sequence[GenerationRequest], frozen: bool) -> None:
        """`frozen`: let the engine see all requests before it starts on the first, so that its batches come out the same every time."""
        if frozen:
            await self._strategy.pause(PauseMode.KEEP)
        self._outstanding += len(requests)
        consumer = asyncio.get_running_loop().create_task(self._consume(requests))
        self._consumers.add(consumer)
        consumer.add_done_callback(self._consumers.discard)
        if frozen:
            await self._until_admitted(len(requests), consumer)
            await self._strategy.resume()

    async def _until_admitted(self, requests: int, consumer: asyncio.Task[None]) -> None:
        while not consumer.done():
            health = await self._strategy.health()
            if not health.alive or health.running + health.waiting >= min(requests, self._outstanding):
                return
            await asyncio.sleep(0.001)

    async def _consume(self, requests: Sequence[GenerationRequest]) -> None:
        unanswered = {request.request_id for request in requests}
        error = "the engine ended without an answer"
        try:
            async for completion in self._strategy.generate(requests):
                unanswered.discard(completion.request_id)
                if completion.error is not None:
                    await self._look_after_engine(completion.error)
                self._push(completion)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            await self._look_after_engine(error)
        for request_id in unanswered:
            self._push(Completion(request_id, error=error))

    def _push(self, completion: Completion) -> None:
        self._outstanding -= 1
        self._finished.append(completion)
        self._changed.set()

    async def _look_after_engine(self, error: str) -> None:
        """A request failed: is it the request, or the engine?"""
        if self._dead is None and not (await self._strategy.health()).alive:
            self._dead = error
            self._changed.set()

    async def collect(self, max_wait_s: float) -> Collected:
        """Everything that finished since the last call; waits for the first, and a moment longer for its neighbours."""
        if not self._finished and self._dead is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return Collected([])
        if self._outstanding and self._dead is None:
            await asyncio.sleep(self._linger_s)
        finished, self._finished = self._finished, []
        return Collected(finished, self._dead)


class BatchedEngine(ABC):
    """The caller's side (an EngineClient): turns futures into batches and completions into results of futures."""

    def __init__(self, name: str, frozen_admission: bool = False) -> None:
        self.name = name
        self._frozen_admission = frozen_admission
        self._outbox: list[GenerationRequest] = []
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        self._collector: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._dead: str | None = None

    @abstractmethod
    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None: ...

    @abstractmethod
    async def _collect(self) -> Collected: ...

    @abstractmethod
    async def _abort(self, request_ids: list[str]) -> None: ...

    async def generate(self, request: GenerationRequest) -> Completion:
        if self._dead is not None:
            raise EngineDead(self.name, self._dead)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        self._answers[request.request_id] = answer
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(request)
        try:
            return await answer
        finally:
            self._answers.pop(request.request_id, None)

    def abort(self, request_ids: Sequence[str]) -> None:
        if self._dead is None:
            self._in_background(lambda: self._abort(list(request_ids)))

    def _flush(self) -> None:
        requests, self._outbox = self._outbox, []
        if self._frozen_admission:
            requests.sort(key=lambda request: request.request_id)
        self._in_background(lambda: self._submit(requests, self._frozen_admission))
        if self._collector is None or self._collector.done():
            self._collector = asyncio.get_running_loop().create_task(self._collect_all())

    def _in_background(self, call: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await call()
            except Exception as failure:
                self._die(f"{type(failure).__name__}: {failure}")

        task = asyncio.get_running_loop().create_task(guarded())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _collect_all(self) -> None:
        try:
            while self._answers:
                collected = await self._collect()
                for completion in collected.completions:
                    if collected.dead is not None and completion.error is not None:
                        continue  # failed because the engine died: has another chance elsewhere
                    answer = self._answers.pop(completion.request_id, None)
                    if answer is not None and not answer.done():
                        answer.set_result(completion)
                if collected.dead is not None:
                    self._die(collected.dead)
                    return
        except Exception as failure:
            self._die(f"{type(failure).__name__}: {failure}")

    def _die(self, cause: str) -> None:
        self._dead = self._dead or cause
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDead(self.name, self._dead))


class LocalEngine(BatchedEngine):
    """An engine in this process: for simulations, tests and programs without Ray."""

    def __init__(self, name: str, strategy: InferenceStrategy, frozen_admission: bool = False, linger_s: float = 0.0) -> None:
        super().__init__(name, frozen_admission)
        self._strategy = strategy
        self._pump = CompletionPump(strategy, linger_s)

    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        await self._pump.submit(requests, frozen)

    async def _collect(self) -> Collected:
        return await self._pump.collect(max_wait_s=60.0)

    async def _abort(self, request_ids: list[str]) -> None:
        await self._strategy.abort(request_ids)
