"""An inference engine in a process of its own, and the rollout service's view of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_lite.config.problems import first_line
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import GenerationRequest
from roll_lite.data.stable_hash import derived_seed
from roll_lite.distributed.fleet import MemberLost
from roll_lite.distributed.strategy.base import EngineMemory, EngineSpec
from roll_lite.distributed.strategy.engines import build_engine
from roll_lite.distributed.weight_sync.plan import Membership, Route
from roll_lite.distributed.worker import AsyncWorker
from roll_lite.scheduler.engines import BatchedEngine, Collected
from roll_lite.workers.completions import CompletionPump

WATCH_SECONDS = 0.5
POLL_SECONDS = 10.0
"""A call that asks for completions comes back after this time also without any."""


async def fetch_block(reference: Any) -> DataProto:
    columns: DataProto = await reference
    return columns


class InferWorker(AsyncWorker):
    """One engine replica: every method runs in the process's event loop, beside the engine's own work."""

    lives_alone: ClassVar[bool] = True
    _watching: asyncio.Task[None] | None = None

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        # Replicas with one seed would draw the same numbers, and samples of one prompt on two replicas could come out alike.
        self._strategy = build_engine(replace(spec, seed=derived_seed(spec.seed, "actor_infer", self.rank)))
        self._pump = CompletionPump(self._strategy, fetch_block)

    async def initialize(self) -> None:
        await self._strategy.initialize()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """The engine's own processes may die while this one lives."""
        while (health := await self._strategy.health()).alive:  # noqa: ASYNC110 (processes make no events)
            await asyncio.sleep(WATCH_SECONDS)
        self.tell_end(MemberLost(str(health.details.get("failure", "the engine is dead"))))

    async def notes(self) -> list[str]:
        return list(self._strategy.notes)

    # ------------------------------------------------------------ rollouts

    async def submit(self, requests: list[GenerationRequest], frozen: bool = False, kept_ids: bool = False) -> None:
        """`frozen`: the engine starts on the first once it has all of them. `kept_ids`: token blocks have that column."""
        await self._pump.submit(requests, frozen, kept_ids)

    @ray.method(num_returns=2)
    async def collect(self, max_wait_s: float = POLL_SECONDS) -> tuple[Collected, DataProto | None]:
        """Everything that finished since the last call, and its tokens. Ray gives what is returned to the caller, who may leave it where
        it is: the tokens outlive this process, which they would not if it put them into the object store itself."""
        return await self._pump.collect(max_wait_s)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._pump.abort(request_ids)

    # ------------------------------------------------------------ weights

    async def connect_weights(self, first_member: int, membership: Membership) -> None:
        await self._strategy.connect_weights(first_member, membership)

    async def update_weights(self, routes: Sequence[Route], version: int) -> None:
        await self._strategy.update_weights(routes, version)

    async def weight_checksums(self) -> dict[str, str]:
        return await self._strategy.weight_checksums()

    # ------------------------------------------------------------ life

    async def load(self, parts: Sequence[EngineMemory]) -> None:
        await self._strategy.load(parts)

    async def offload(self, parts: Sequence[EngineMemory]) -> None:
        await self._strategy.offload(parts)

    async def shutdown(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._strategy.shutdown()


class RemoteEngine(BatchedEngine):
    """An engine behind an InferWorker, as a member of a fleet. When the worker's process dies, the call that waits for completions
    fails at once."""

    def __init__(self, name: str, worker: Any, frozen_admission: bool = False, kept_ids: bool = False) -> None:
        super().__init__(name, frozen_admission)
        self._worker = worker
        self._kept_ids = kept_ids

    async def start(self) -> None:
        """The driver has started it."""

    async def until_lost(self) -> str:
        try:
            await self._worker.until_death.remote()
        except RayTaskError as error:
            return str(error.cause)
        except RayActorError as error:
            return f"its process is gone: {first_line(error)}"
        raise AssertionError(f"{self.name}: until_death returned")

    def kill(self) -> None:
        """The driver ends it, with the run."""

    def lost(self, cause: str) -> None:
        """Whoever waits for it hears of it."""
        self._die(cause)

    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        await self._call(self._worker.submit.remote(requests, frozen, self._kept_ids))

    async def _collect(self) -> Collected:
        collected, block = self._worker.collect.remote()
        return (await self._call(collected)).lying_in(block)

    async def _abort(self, request_ids: list[str]) -> None:
        await self._call(self._worker.abort.remote(request_ids))

    async def _call(self, reference: Any) -> Any:
        try:
            return await reference
        except RayActorError as error:
            raise ConnectionError(f"its process is gone: {first_line(error)}") from error
