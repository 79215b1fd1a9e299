"""The engine's side of rollouts: drives a strategy and returns turns, with their tokens as blocks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from roll_lite.data.proto import DataProto
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, TokenRow, Turn
from roll_lite.distributed.strategy.base import InferenceStrategy, PauseMode
from roll_lite.scheduler.engines import Collected
from roll_lite.workers.token_blocks import BLOCK_TOKENS, TokenRecord, token_block

STARTED_POLL_S = 1.0
"""Poll interval for "request started"."""
HAND_OUT_S = 5.0
"""Interval at which tokens of unfinished responses are handed out; a dying process loses those after the last time."""


PART_PREFIX = TokenRecord.given((0,))
"""Dummy first token, so that a part's first log-prob is kept."""


class _Ready(NamedTuple):
    """A completion, or part of one, to be fetched."""

    completion: Completion
    before: list[TokenRecord]
    """Tokens before it in its row."""
    is_part: bool = False

    @property
    def tokens(self) -> int:
        return len(self.completion.token_ids) + sum(map(len, self.before))


class CompletionPump:
    """Collects completions of a strategy until they are fetched."""

    def __init__(
        self, strategy: InferenceStrategy, fetch: Callable[[Any], Awaitable[DataProto]], linger_s: float = 0.05, experts: bool = False
    ) -> None:
        """`fetch` gets a block by its reference. `experts`: completions report experts, and blocks have this column."""
        self._strategy = strategy
        self._fetch = fetch
        self._linger_s = linger_s
        self._experts = experts
        self._ready: deque[_Ready] = deque()
        self._tokens_waiting = 0
        self._left_over = False
        """True if the last call left completions behind because its blocks were full."""
        self._before: dict[str, list[TokenRecord]] = {}
        """Context and prompt of each outstanding request."""
        self._handed_out: dict[str, int] = {}
        """Number of tokens handed out for each outstanding request; the caller keeps them if this process dies."""
        self._handing_out: asyncio.Task[None] | None = None
        self._entering: set[str] = set()
        """Outstanding requests that are not in the engine yet."""
        self._not_begun: set[str] = set()
        self._generated: dict[str, int] = {}
        """Progress of outstanding requests since the last answer, in tokens."""
        self._looking: asyncio.Task[None] | None = None
        self._kept_ids = False
        self._changed = asyncio.Event()
        self._dead: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, requests: Sequence[GenerationRequest], frozen: bool, kept_ids: bool = False) -> None:
        """Give requests to the engine. `frozen`: it starts when it has all of them, so that its batches repeat. `kept_ids`: blocks have
        this column."""
        self._kept_ids = kept_ids
        self._before |= {request.request_id: [TokenRecord.given(request.prompt_ids)] for request in requests}
        self._entering.update(request.request_id for request in requests)
        prompts = [prompt for request in requests if (prompt := await self._whole_prompt(request)) is not None]
        if not prompts:
            return
        if frozen:
            await self._strategy.pause(PauseMode.KEEP)
        consumer = self._run(self._consume(prompts))
        if frozen:
            await self._until_admitted(len(prompts), consumer)
            await self._strategy.resume()

    async def _whole_prompt(self, request: GenerationRequest) -> GenerationRequest | None:
        """The request with its context fetched. None if the context is lost with its process; then the request fails."""
        if request.context is None:
            return request
        try:
            earlier = TokenRecord.read(await self._fetch(request.context.block), request.context.row)
        except Exception as error:
            self._push(Completion(request.request_id, error=f"the tokens of its earlier turns are lost: {type(error).__name__}: {error}"))
            return None
        if request.request_id in self._before:  # not aborted meanwhile
            self._before[request.request_id].insert(0, earlier)
        return replace(request, prompt_ids=(*earlier.ids.tolist(), *request.prompt_ids), context=None)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _until_admitted(self, requests: int, consumer: asyncio.Task[None]) -> None:
        while not consumer.done():
            health = await self._strategy.health()
            if not health.alive or health.running + health.waiting >= min(requests, len(self._before)):
                return
            await asyncio.sleep(0.001)

    async def _consume(self, requests: Sequence[GenerationRequest]) -> None:
        requests = [request for request in requests if request.request_id in self._before]  # others were aborted meanwhile
        unanswered = {request.request_id for request in requests}
        self._entering -= unanswered
        self._not_begun |= unanswered
        if self._looking is None or self._looking.done():
            self._looking = self._run(self._poll_started())
        if self._handing_out is None or self._handing_out.done():
            self._handing_out = self._run(self._hand_out_parts())
        error = "the engine ended without an answer"
        try:
            async for completion in self._strategy.generate(requests):
                unanswered.discard(completion.request_id)
                if completion.error is not None:
                    await self._check_engine(completion.error)
                self._push(completion)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            await self._check_engine(error)
        for request_id in unanswered:
            self._push(Completion(request_id, error=error))

    async def _poll_started(self) -> None:
        """Poll for started requests while there are requests that have not started."""
        while self._not_begun and self._dead is None:
            begun = self._strategy.generated(self._not_begun)
            if begun:
                self._generated |= begun
                self._changed.set()
                self._not_begun.difference_update(begun)
            await asyncio.sleep(STARTED_POLL_S)

    async def _hand_out_parts(self) -> None:
        """Hand out tokens and progress of unfinished responses while there are any."""
        await asyncio.sleep(HAND_OUT_S)
        while self._before and self._dead is None:
            begun = self._before.keys() - self._not_begun
            self._generated |= self._strategy.generated(begun)
            since = {request_id: self._handed_out.get(request_id, 0) for request_id in begun}
            for part in await self._grown(since):
                if part.request_id in self._before:
                    self._handed_out[part.request_id] = since[part.request_id] + len(part.token_ids)
                    self._make_ready(_Ready(part, [PART_PREFIX], is_part=True))
            await asyncio.sleep(HAND_OUT_S)

    async def _grown(self, since: Mapping[str, int]) -> list[Completion]:
        try:
            return await self._strategy.grown(since) if since else []
        except Exception:  # a process edge: the engine failed, and its requests report that
            return []

    def _push(self, completion: Completion) -> None:
        before = self._before.pop(completion.request_id, None)
        if before is not None:  # not answered before, by an abort
            self._entering.discard(completion.request_id)
            self._not_begun.discard(completion.request_id)
            self._handed_out.pop(completion.request_id, None)
            self._make_ready(_Ready(completion, before))

    def _make_ready(self, ready: _Ready) -> None:
        self._ready.append(ready)
        self._tokens_waiting += ready.tokens
        self._changed.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests. Those in the engine end with the tokens they have."""
        for request_id in list(self._entering if request_ids is None else self._entering.intersection(request_ids)):
            self._push(Completion(request_id, finish_reason=FinishReason.ABORT))
        await self._strategy.abort(request_ids)

    async def _check_engine(self, error: str) -> None:
        """Note the engine's death if it is the cause of a failed request."""
        if self._dead is None and not (await self._strategy.health()).alive:
            self._dead = error
            self._changed.set()

    async def collect(self, max_wait_s: float, most_blocks: int = 1) -> tuple[Collected, list[DataProto]]:
        """Completions and progress since the last call, with tokens as blocks. Waits for the first completion, and `linger_s` for more.

        Completions beyond `most_blocks` full blocks come with the next call.
        """
        if not self._ready and not self._generated and self._dead is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return Collected([]), []
        if self._before and self._ready and not self._left_over and self._dead is None:
            await asyncio.sleep(self._linger_s)
        turns, parts, blocks = self._next_blocks(most_blocks)
        generated, self._generated = self._generated, {}
        self._left_over = bool(self._ready)
        waiting = -(-self._tokens_waiting // BLOCK_TOKENS)
        return Collected(turns, generated, None if self._left_over else self._dead, waiting, parts), blocks

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
            (parts if ready.is_part else turns).append(turn_of(completion, row))
        return turns, parts, [token_block(records, self._kept_ids, self._experts) for records in blocks if records]


def turn_of(completion: Completion, tokens: TokenRow | None) -> Turn:
    return Turn(
        completion.request_id,
        len(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.versions,
        completion.error,
        completion.cached_tokens,
        tokens,
    )
