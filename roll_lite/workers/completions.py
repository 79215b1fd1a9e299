"""Pass requests to an engine; return responses, with tokens in token blocks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from roll_lite.data.proto import DataProto
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, TokenRow, Turn
from roll_lite.distributed.strategy.base import InferenceStrategy, PauseMode, RequestProgress
from roll_lite.scheduler.engines import Collected
from roll_lite.workers.token_blocks import BLOCK_TOKENS, TokenRecord, context_record, token_block

PART_PREFIX = TokenRecord.given((0,))
"""Dummy first token of each piece of an unfinished response: token blocks store no log-prob for a row's first token."""


TURN_LINGER_S = 0.005
"""Maximum seconds that `collect` waits for more completions while environments wait: this delays each turn."""


class _Ready(NamedTuple):
    completion: Completion
    before: list[TokenRecord]
    is_part: bool = False

    @property
    def tokens(self) -> int:
        return len(self.completion.token_ids) + sum(map(len, self.before))


class CompletionPump:
    def __init__(
        self,
        strategy: InferenceStrategy,
        fetch: Callable[[Any], Awaitable[DataProto]],
        linger_s: float = 0.05,
        columns: Collection[str] = (),
        engine: int | None = None,
    ) -> None:
        self._strategy = strategy
        self._fetch = fetch
        self._linger_s = linger_s
        self._columns = columns
        self._engine = engine
        self._ready: deque[_Ready] = deque()
        self._tokens_waiting = 0
        self._left_over = False
        self._before: dict[str, list[TokenRecord]] = {}
        self._wanted: set[str] = set()
        self._entering: set[str] = set()
        self._generated: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._services = 1
        """Rollout services so far. A lost service's `collect` may still wait when the next one submits."""
        self._running: set[asyncio.Future[Completion]] = set()

    async def submit(self, requests: Sequence[GenerationRequest], frozen: bool) -> None:
        """Give requests to the engine. `frozen`: pause it until it has all, so that batches are reproducible."""
        self._before |= {request.request_id: [TokenRecord.given(request.prompt_ids)] for request in requests}
        self._entering.update(request.request_id for request in requests)
        self._wanted.update(request.request_id for request in requests if request.wants_ids)
        prompts = [prompt for request in requests if (prompt := await self._whole_prompt(request)) is not None]
        if frozen and prompts:
            await self._strategy.pause(PauseMode.KEEP)
        answers = []
        for prompt in prompts:
            if prompt.request_id in self._before:  # not aborted meanwhile
                self._entering.discard(prompt.request_id)
                answer = self._strategy.generate(prompt, partial(self._note_progress, prompt.request_id))
                answer.add_done_callback(partial(self._answered, prompt.request_id))
                self._running.add(answer)
                answer.add_done_callback(self._running.discard)
                answers.append(answer)
        if frozen and prompts:
            while not all(answer.done() for answer in answers):
                health = await self._strategy.health()
                if not health.alive or health.running + health.waiting >= min(len(answers), len(self._before)):
                    break
                await asyncio.sleep(0.001)
            await self._strategy.resume()

    async def _whole_prompt(self, request: GenerationRequest) -> GenerationRequest | None:
        """Prepend the tokens of earlier turns to the prompt. If they are lost, fail the request and return None."""
        if request.context is None:
            return request
        try:
            earlier = TokenRecord.read(await self._fetch(request.context.block), request.context.row)
        except Exception as error:
            self._push(Completion(request.request_id, error=f"the tokens of its earlier turns are lost: {type(error).__name__}: {error}"))
            return None
        if request.request_id in self._before:  # not aborted meanwhile
            self._before[request.request_id].insert(0, context_record(request, earlier))
        return replace(request, prompt_ids=(*earlier.ids.tolist(), *request.prompt_ids), context=None, masks_context=False)

    def _note_progress(self, request_id: str, progress: RequestProgress) -> None:
        if request_id in self._before:
            self._generated[request_id] = progress.generated
            if progress.part is not None:
                self._make_ready(_Ready(progress.part, [PART_PREFIX], is_part=True))
            self._changed.set()

    def _answered(self, request_id: str, answer: asyncio.Future[Completion]) -> None:
        failure = None if answer.cancelled() else answer.exception()
        if failure is not None or answer.cancelled():
            error = "the engine ended without an answer" if failure is None else f"{type(failure).__name__}: {failure}"
            self._push(Completion(request_id, error=error))
        else:
            self._push(answer.result())

    def _push(self, completion: Completion) -> None:
        before = self._before.pop(completion.request_id, None)
        if before is not None:  # otherwise an abort has answered the request
            self._entering.discard(completion.request_id)
            self._make_ready(_Ready(completion, before))

    def _make_ready(self, ready: _Ready) -> None:
        self._ready.append(ready)
        self._tokens_waiting += ready.tokens
        self._changed.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for request_id in list(self._entering if request_ids is None else self._entering.intersection(request_ids)):
            self._push(Completion(request_id, finish_reason=FinishReason.ABORT))
        await self._strategy.abort(request_ids)

    async def forget(self) -> None:
        self._services += 1
        self._changed.set()
        for kept in (self._before, self._entering, self._wanted, self._generated, self._ready):
            kept.clear()
        self._tokens_waiting = 0
        await self._strategy.abort(None)
        if self._running:  # a new request may have the same id
            await asyncio.wait(self._running)

    async def collect(self, max_wait_s: float, most_blocks: int = 1) -> tuple[Collected, list[DataProto]]:
        """Return completions, progress and up to `most_blocks` token blocks since the last call. Wait up to `max_wait_s` for a completion,
        then `linger_s` for more."""
        service = self._services
        if not self._ready and not self._generated and self._strategy.life.failure is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return Collected([]), []
        if self._before and self._ready and not self._left_over and self._strategy.life.failure is None:
            await asyncio.sleep(min(TURN_LINGER_S, self._linger_s) if self._wanted else self._linger_s)
        if service != self._services:
            return Collected([]), []
        turns, parts, blocks = self._next_blocks(most_blocks)
        generated, self._generated = self._generated, {}
        self._left_over = bool(self._ready)
        waiting = -(-self._tokens_waiting // BLOCK_TOKENS)
        return Collected(turns, generated, None if self._left_over else self._strategy.life.failure, waiting, parts), blocks

    def _next_blocks(self, most: int) -> tuple[list[Turn], list[Turn], list[DataProto]]:
        turns: list[Turn] = []
        parts: list[Turn] = []
        blocks: list[list[TokenRecord]] = [[]]
        tokens = 0
        while self._ready and (tokens < BLOCK_TOKENS or len(blocks) < most):
            if tokens >= BLOCK_TOKENS:
                blocks.append([])
                tokens = 0
            ready = self._ready.popleft()
            completion, row = ready.completion, None
            if completion.error is None and (completion.token_ids or completion.finish_reason is not FinishReason.ABORT):
                record = TokenRecord.joined([*ready.before, TokenRecord.chosen(completion)]).fill_experts(completion.experts)
                row = TokenRow(len(blocks) - 1, len(blocks[-1]), len(record))
                blocks[-1].append(record)
                tokens += len(record)
            self._tokens_waiting -= ready.tokens
            turn = Turn(
                completion.request_id,
                len(completion.token_ids),
                completion.text,
                completion.finish_reason,
                completion.versions,
                completion.error,
                completion.cached_tokens,
                row,
                () if self._engine is None else (self._engine,),
                np.array(completion.token_ids, np.int32).tobytes() if completion.request_id in self._wanted else b"",
                completion.drafted,
                completion.accepted,
            )
            (parts if ready.is_part else turns).append(turn)
            if not ready.is_part:
                self._wanted.discard(completion.request_id)
        return turns, parts, [token_block(records, self._columns) for records in blocks if records]
