"""Engines in the test's own process, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from roll_lite.data.proto import DataProto
from roll_lite.data.samples import GenerationRequest, TokenRow, Turn
from roll_lite.distributed.strategy.base import InferenceStrategy
from roll_lite.scheduler.engines import Asked, BatchedEngine, Collected, EngineClient
from roll_lite.workers.completions import CompletionPump
from roll_lite.workers.token_blocks import joined_block


async def fetch_block(block: DataProto) -> DataProto:
    """Without Ray blocks are their own references."""
    return block


async def collect(pump: CompletionPump, max_wait_s: float) -> Collected:
    collected, blocks = await pump.collect(max_wait_s, most_blocks=2)
    return collected.with_blocks(blocks)


class Told(Asked):
    """Passes progress on."""

    def __init__(self, request: GenerationRequest, tell: Callable[[int], None]) -> None:
        super().__init__(request)
        self._tell = tell

    def generated(self, tokens: int) -> None:
        self._tell(tokens)


def ask(engine: EngineClient, request: GenerationRequest, tell: Callable[[int], None] = lambda tokens: None) -> asyncio.Future[Turn]:
    asked = Told(request, tell)
    engine.send(asked)
    return cast("asyncio.Future[Turn]", asked.answer)


class LocalEngine(BatchedEngine):
    """The client of an engine in this process."""

    def __init__(self, name: str, strategy: InferenceStrategy, frozen_admission: bool = False, linger_s: float = 0.0) -> None:
        super().__init__(name, frozen_admission)
        self._strategy = strategy
        self._pump = CompletionPump(strategy, fetch_block, linger_s)

    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        await self._pump.submit(requests, frozen)

    async def _collect(self) -> Collected:
        return await collect(self._pump, 60.0)

    async def _joined(self, request: GenerationRequest, parts: Sequence[TokenRow]) -> TokenRow:
        block = await joined_block(request, parts, fetch_block)
        return TokenRow(block, 0, len(block.ragged("input_ids").values))

    async def _abort(self, request_ids: list[str]) -> None:
        await self._pump.abort(request_ids)
