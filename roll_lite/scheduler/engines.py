"""Engines as the router sees them: futures on one side, batches of requests and of turns on the other.

A call that crosses a process boundary costs about as much as generating a short sample on a small model. So what is asked for
within one turn of the event loop travels in one call, and one call returns everything that finished since the last one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from roll_lite.data.samples import FinishReason, GenerationRequest, TokenRow, Turn, VersionSpan, merged


class EngineLost(Exception):
    """An engine is gone, and with it the request; another engine can take it, or go on from `partial`: what the engine had handed out of
    the response by then, as if it had been aborted there, but without its text."""

    def __init__(self, engine: str, cause: str, partial: Turn | None = None) -> None:
        super().__init__(f"engine {engine} is lost: {cause}")
        self.engine = engine
        self.cause = cause
        self.partial = partial


Generated = Callable[[int], None]
"""Called when an engine has begun with a request, and every few seconds: so many tokens it has generated of it."""


class EngineClient(Protocol):
    """An engine as the router knows it."""

    name: str

    def generate(self, request: GenerationRequest, generated: Generated | None = None) -> Awaitable[Turn]:
        """The finished response. A failure of the request is in its `error`; raises EngineLost when the engine is gone."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with what they have; does not wait for it."""
        ...


@dataclass(frozen=True)
class Collected:
    turns: list[Turn]
    generated: Mapping[str, int] = field(default_factory=dict)
    """Tokens of unfinished responses, by request id, as the engine has reported them since: when it had begun with a request, and every few
    seconds."""
    dead: str | None = None
    """Why the engine cannot go on; its unanswered requests are lost."""
    blocks_waiting: int = 0
    """So many blocks of tokens are ready beyond those that were asked for."""
    parts: list[Turn] = field(default_factory=list)
    """What has been generated of unfinished responses since the last part of each: only that, behind a token that stands for all before."""

    def lying_in(self, blocks: Sequence[Any]) -> Collected:
        """With the blocks that the tokens lie in, instead of their numbers."""
        return replace(self, turns=_lying_in(self.turns, blocks), parts=_lying_in(self.parts, blocks))


def _lying_in(turns: Sequence[Turn], blocks: Sequence[Any]) -> list[Turn]:
    return [turn if turn.tokens is None else replace(turn, tokens=replace(turn.tokens, block=blocks[turn.tokens.block])) for turn in turns]


class _Asked(NamedTuple):
    request: GenerationRequest
    generated: Generated | None
    answer: asyncio.Future[Turn]
    parts: list[Turn]
    """In case that the rest never comes."""


class BatchedEngine(ABC):
    """The caller's side (an EngineClient): makes batches of futures, and results of futures of what comes back."""

    def __init__(self, name: str, frozen_admission: bool = False) -> None:
        self.name = name
        self._frozen_admission = frozen_admission
        self._outbox: list[GenerationRequest] = []
        self._asked: dict[str, _Asked] = {}
        self._collector: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._dead: str | None = None

    @abstractmethod
    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None: ...

    @abstractmethod
    async def _collect(self) -> Collected: ...

    @abstractmethod
    async def _joined(self, request: GenerationRequest, parts: Sequence[TokenRow]) -> TokenRow:
        """One row: what the request begins with, then the parts. Raises ConnectionError where any of it is gone."""

    @abstractmethod
    async def _abort(self, request_ids: list[str]) -> None: ...

    def generate(self, request: GenerationRequest, generated: Generated | None = None) -> asyncio.Future[Turn]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Turn] = loop.create_future()
        if self._dead is not None:
            answer.set_exception(EngineLost(self.name, self._dead))
            return answer
        self._asked[request.request_id] = _Asked(request, generated, answer, [])
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(request)
        return answer

    def abort(self, request_ids: Sequence[str]) -> None:
        asked = set(request_ids)
        here = [request for request in self._outbox if request.request_id in asked]
        self._outbox = [request for request in self._outbox if request.request_id not in asked]
        for request_id in asked:
            if (one := self._asked.get(request_id)) is not None and one.answer.done():
                del self._asked[request_id]  # nobody waits any more
        for request in here:  # it would come to the engine after its abort
            self._answer(Turn(request.request_id, finish_reason=FinishReason.ABORT))
        there = asked.difference(request.request_id for request in here)
        if there and self._dead is None:
            self._in_background(lambda: self._abort(sorted(there)))

    def _flush(self) -> None:
        requests, self._outbox = [request for request in self._outbox if request.request_id in self._asked], []
        if not requests:
            return
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
            while self._asked:
                collected = await self._collect()
                for request_id, tokens in collected.generated.items():
                    if (asked := self._asked.get(request_id)) is not None and asked.generated is not None:
                        asked.generated(tokens)
                for part in collected.parts:
                    if part.request_id in self._asked:
                        self._asked[part.request_id].parts.append(part)
                for turn in collected.turns:
                    if collected.dead is not None and turn.error is not None:
                        continue  # failed because the engine died: has another chance elsewhere
                    self._answer(turn)
                if collected.dead is not None:
                    self._die(collected.dead)
                    return
        except Exception as failure:
            self._die(f"{type(failure).__name__}: {failure}")

    def _answer(self, turn: Turn) -> None:
        asked = self._asked.pop(turn.request_id, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(turn)

    def _die(self, cause: str) -> None:
        self._dead = self._dead or cause
        lost, self._asked = self._asked, {}
        for asked in lost.values():
            if asked.parts:
                task = asyncio.get_running_loop().create_task(self._lose(asked, self._dead))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)
            elif not asked.answer.done():
                asked.answer.set_exception(EngineLost(self.name, self._dead))

    async def _lose(self, asked: _Asked, cause: str) -> None:
        """With what there is of the response."""
        lost: Exception
        try:
            lost = EngineLost(self.name, cause, await self._partial(asked))
        except ConnectionError as error:  # the request begins anew
            lost = EngineLost(self.name, f"{cause}; what it had handed out of the response is gone as well: {error}")
        except Exception as error:  # a mistake of ours: whoever waits for the response hears of it
            lost = error
        if not asked.answer.done():
            asked.answer.set_exception(lost)

    async def _partial(self, asked: _Asked) -> Turn | None:
        rows = [part.tokens for part in asked.parts if part.tokens is not None]
        if not rows:
            return None
        tokens = await self._joined(asked.request, rows)
        versions: tuple[VersionSpan, ...] = ()
        length = 0
        for part in asked.parts:
            shifted = (VersionSpan(length + span.start, span.version) for span in part.versions)
            versions = merged(*versions, *shifted)
            length += part.length
        return Turn(asked.request.request_id, length, finish_reason=FinishReason.ABORT, versions=versions, tokens=tokens)
