"""Clients of engines. Calls are batched: a remote call costs as much as a short sample."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, Protocol

from roll_lite.data.samples import FinishReason, GenerationRequest, TokenRow, Turn, joined


class EngineLost(Exception):
    """Loss of a request's engine. Another engine can continue from `partial`, the response so far."""

    def __init__(self, engine: str, cause: str, partial: Turn | None = None) -> None:
        super().__init__(f"engine {engine} is lost: {cause}")
        self.engine = engine
        self.cause = cause
        self.partial = partial


class Asked:
    __slots__ = ("answer", "parts", "request")

    def __init__(self, request: GenerationRequest) -> None:
        self.ask(request)

    def ask(self, request: GenerationRequest) -> None:
        self.request = request
        self.answer: asyncio.Future[Turn | None] = asyncio.get_running_loop().create_future()
        """Response, with `error` if the request failed; None if the engine did not answer an abort. Raises EngineLost."""
        self.parts: list[Turn] = []
        """Pieces of the response, from which another engine can continue."""

    def generated(self, tokens: int) -> None:
        """Receive the number of response tokens so far: when the engine starts the request, then every few seconds."""


class EngineClient(Protocol):
    name: str

    def send(self, asked: Asked) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without waiting. Their responses keep the tokens generated so far."""
        ...


@dataclass(frozen=True)
class Collected:
    turns: list[Turn]
    generated: Mapping[str, int] = field(default_factory=dict)
    """{request id: number of response tokens so far}."""
    dead: str | None = None
    """Cause of the engine's death; unanswered requests are lost."""
    blocks_waiting: int = 0
    parts: list[Turn] = field(default_factory=list)
    """New tokens of unfinished responses, in rows that start with PART_PREFIX."""

    def with_blocks(self, blocks: Sequence[Any]) -> Collected:
        turns, parts = (
            [one if one.tokens is None else one._replace(tokens=one.tokens._replace(block=blocks[one.tokens.block])) for one in found]
            for found in (self.turns, self.parts)
        )
        return replace(self, turns=turns, parts=parts)


class BatchedEngine(ABC):
    """Engine client that sends requests and fetches responses in batches. `frozen_admission`: the engine pauses until it has each call's
    requests."""

    def __init__(self, name: str, frozen_admission: bool = False) -> None:
        self.name = name
        self._frozen_admission = frozen_admission
        self._outbox: list[GenerationRequest] = []
        self._asked: dict[str, Asked] = {}
        self._collector: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._dead: str | None = None

    @abstractmethod
    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None: ...

    @abstractmethod
    async def _collect(self) -> Collected: ...

    @abstractmethod
    async def _joined(self, request: GenerationRequest, parts: Sequence[TokenRow]) -> TokenRow:
        """Concatenate a request's tokens: earlier turns, prompt, response pieces (`parts`). ConnectionError if some are gone with their
        process."""

    @abstractmethod
    async def _abort(self, request_ids: list[str]) -> None: ...

    def send(self, asked: Asked) -> None:
        if self._dead is not None:
            asked.answer.set_exception(EngineLost(self.name, self._dead))
            return
        self._asked[asked.request.request_id] = asked
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(asked.request)

    def abort(self, request_ids: Sequence[str]) -> None:
        asked = set(request_ids)
        here = [request for request in self._outbox if request.request_id in asked]
        self._outbox = [request for request in self._outbox if request.request_id not in asked]
        for request_id in asked:
            if (one := self._asked.get(request_id)) is not None and one.answer.done():
                del self._asked[request_id]  # abandoned by its caller
        for request in here:  # otherwise it would reach the engine after its abort
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
                self.fail(f"{type(failure).__name__}: {failure}")

        task = asyncio.get_running_loop().create_task(guarded())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _collect_all(self) -> None:
        try:
            while self._asked:
                collected = await self._collect()
                for request_id, tokens in collected.generated.items():
                    if (asked := self._asked.get(request_id)) is not None:
                        asked.generated(tokens)
                for part in collected.parts:
                    if part.request_id in self._asked:
                        self._asked[part.request_id].parts.append(part)
                for turn in collected.turns:
                    if collected.dead is not None and turn.error is not None:
                        continue  # it failed because the engine died, and is retried elsewhere
                    self._answer(turn)
                if collected.dead is not None:
                    self.fail(collected.dead)
                    return
        except Exception as failure:
            self.fail(f"{type(failure).__name__}: {failure}")

    def _answer(self, turn: Turn) -> None:
        asked = self._asked.pop(turn.request_id, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(turn)

    def fail(self, cause: str) -> None:
        self._dead = self._dead or cause
        lost, self._asked = self._asked, {}
        for asked in lost.values():
            if asked.parts:
                self._in_background(partial(self._lose, asked, self._dead))
            elif not asked.answer.done():
                asked.answer.set_exception(EngineLost(self.name, self._dead))

    async def _lose(self, asked: Asked, cause: str) -> None:
        lost: Exception
        try:
            parts, turn = asked.parts, None  # kept: the request's list is replaced if it ends meanwhile
            rows = [part.tokens for part in parts if part.tokens is not None]
            if rows:
                tokens = await self._joined(asked.request, rows)
                turn = reduce(joined, parts)._replace(finish_reason=FinishReason.ABORT, tokens=tokens)
            lost = EngineLost(self.name, cause, turn)
        except ConnectionError as error:  # the request starts again
            lost = EngineLost(self.name, f"{cause}; the tokens handed out so far are lost too: {error}")
        except Exception as error:  # a bug: raised at the caller
            lost = error
        if not asked.answer.done():
            asked.answer.set_exception(lost)


def leaving(nodes: Mapping[int, Set[str]], draining: Set[str]) -> Sequence[int]:
    """Return the engines on draining nodes; if all engines drain, omit the first. `nodes`: {serving engine's number: its nodes}."""
    doomed = [engine for engine, own in nodes.items() if own & draining]
    return doomed if len(doomed) < len(nodes) else doomed[1:]
