"""Engines and token stores in the test's own process, without Ray."""

from __future__ import annotations

from roll_lite.data.proto import DataProto
from roll_lite.data.samples import GenerationRequest
from roll_lite.distributed.strategy.base import InferenceStrategy
from roll_lite.scheduler.engines import BatchedEngine, Collected
from roll_lite.workers.completions import CompletionPump


class TokensInProcess:
    """A token store without Ray: blocks are their own references."""

    def put(self, columns: DataProto) -> DataProto:
        return columns

    async def get(self, reference: DataProto) -> DataProto:
        return reference


class LocalEngine(BatchedEngine):
    """The client of an engine in this process."""

    def __init__(self, name: str, strategy: InferenceStrategy, frozen_admission: bool = False, linger_s: float = 0.0) -> None:
        super().__init__(name, frozen_admission)
        self._strategy = strategy
        self._pump = CompletionPump(strategy, TokensInProcess(), linger_s)

    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        await self._pump.submit(requests, frozen)

    async def _collect(self) -> Collected:
        return await self._pump.collect(max_wait_s=60.0)

    async def _abort(self, request_ids: list[str]) -> None:
        await self._pump.abort(request_ids)
