from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from roll_lite.data.proto import DataProto
from roll_lite.data.samples import GenerationRequest, TokenRow
from roll_lite.data.stable_hash import derived_seed
from roll_lite.distributed.failures import MemberLost, cause_of
from roll_lite.distributed.liveness import Heartbeat, first_of
from roll_lite.distributed.place import Place, kill_actors
from roll_lite.distributed.strategy.base import EngineSpec
from roll_lite.distributed.strategy.build import build_engine, share_of_device
from roll_lite.distributed.strategy.inference.life import EngineMemory, EngineState
from roll_lite.distributed.weight_sync.group import TransferError, Transferred
from roll_lite.distributed.weight_sync.plan import Membership, Route
from roll_lite.distributed.worker import AsyncWorker, freeze_heap
from roll_lite.scheduler.engines import BatchedEngine, Collected
from roll_lite.workers.completions import CompletionPump
from roll_lite.workers.engine_parts import EngineParts
from roll_lite.workers.phases import PhaseWork, RankWork
from roll_lite.workers.token_blocks import joined_block

T = TypeVar("T")

WATCH_SECONDS = 0.5
LAST_SECONDS = 2.0
"""Seconds for a dead engine's clean-up before its loss is reported."""
PULSE_SECONDS = 2.0
"""Seconds between a heartbeat's answer and the next heartbeat."""
FAILED_SECONDS = 10.0
"""Seconds for a worker's own report after a failed call."""
MOST_BLOCKS = 32
POLL_SECONDS = 10.0


async def fetch_block(reference: Any) -> DataProto:
    columns: DataProto = await reference
    return columns


class InferWorker(AsyncWorker):
    """Worker of an engine replica; its methods share the event loop with the engine."""

    lives_alone: ClassVar[bool] = True
    build = staticmethod(build_engine)
    _watching: asyncio.Task[None] | None = None
    _watching_parts: asyncio.Task[None] | None = None

    def __init__(self, spec: EngineSpec, parts: Sequence[Sequence[Mapping[str, Any]]] = ()) -> None:
        """`parts[replica]`: Ray options of the replica's actors on further nodes."""
        super().__init__()
        # Replicas with equal seeds would draw the same numbers, so that samples of one prompt could be equal.
        strategy = share_of_device(spec.strategy, self.rank % spec.sharers, spec.sharers)
        spec = replace(spec, strategy=strategy, seed=derived_seed(spec.seed, "actor_infer", self.rank))
        further = parts[self.rank] if self.rank < len(parts) else ()  # an engine that joins later is on one node
        self._parts = EngineParts(spec, further) if further else None
        self._strategy = self.build(spec if self._parts is None else self._parts.spec)
        self._ready = asyncio.Event()
        self._pump = CompletionPump(self._strategy, fetch_block, columns=spec.columns, engine=self.rank)
        self._version = 0
        self._is_first = True

    async def preload(self) -> None:
        await self._strategy.preload()

    async def initialize(self, turn: int = 0, turns: int = 1, is_first: bool = True) -> Place:
        """Start the engine if `turn` equals rank % turns. `is_first`: False if it replaces an engine or joins the run."""
        if self.rank % turns != turn:
            return await self.place()
        self._is_first = is_first
        if self._parts is None:
            await self._strategy.initialize()
        else:
            await self._parts.start(self._strategy.initialize)
            self._watching_parts = asyncio.create_task(self._watch_parts(self._parts))
        freeze_heap()
        self._watching = asyncio.create_task(self._watch())
        self._ready.set()
        return await self.place()

    async def until_placed(self) -> Place:
        """Wait until the engine's actors on further nodes run, if any, and import the engine's package meanwhile."""
        if self._parts is not None:
            await asyncio.gather(self._parts.place(), self._strategy.preload())
        return await self.place()

    async def place(self) -> Place:  # type: ignore[override]
        return (await super().place())._replace(further=() if self._parts is None else self._parts.places)

    async def until_ready(self) -> None:
        """Wait until the engine has started. Before that, this process may be too busy to answer heartbeats."""
        await self._ready.wait()

    async def _watch(self) -> None:
        cause = await self._strategy.life.until_dead()
        if self._parts is not None and self._watching_parts is not None:
            # Workers on different nodes fail together; either may be noticed first.
            await asyncio.wait((self._watching_parts,), timeout=WATCH_SECONDS)
            cause = "; ".join(dict.fromkeys(text for text in (cause, self._parts.lost) if text is not None))
        # Clean up before reporting the end: the listener kills this process.
        with suppress(Exception):
            await asyncio.wait_for(self._end_engine(), LAST_SECONDS)
        self.tell_end(MemberLost(cause))

    async def _watch_parts(self, parts: EngineParts) -> None:
        self._strategy.fail(await parts.until_lost())

    async def notes(self) -> list[str]:
        return list(self._strategy.notes)

    # ------------------------------------------------------------ rollouts

    async def submit(self, requests: list[GenerationRequest], frozen: bool = False) -> None:
        await self._pump.submit(requests, frozen)

    async def collect(self, most_blocks: int = 1, max_wait_s: float = POLL_SECONDS) -> tuple[Collected | DataProto | None, ...]:
        """Return new completions, then `most_blocks` token blocks, padded with None. The caller owns the blocks, which outlive this
        process."""
        collected, blocks = await self._pump.collect(max_wait_s, most_blocks)
        return collected, *blocks, *[None] * (most_blocks - len(blocks))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._pump.abort(request_ids)

    async def forget_requests(self) -> None:
        """Abort and drop all requests: their rollout service is gone."""
        with suppress(Exception):  # a dead engine has none
            await self._pump.forget()

    # ------------------------------------------------------------ weights

    async def connect_weights(self, first_member: int, membership: Membership) -> Transferred:
        return await self._transferred(self._strategy.connect_weights(first_member, membership))

    async def update_weights(self, routes: Sequence[Route], version: int) -> Transferred:
        self._version = version
        return await self._transferred(self._strategy.update_weights(routes, version))

    async def weight_checksums(self, names: Collection[str]) -> dict[str, str]:
        return await self._of_engine(self._strategy.weight_checksums(names))

    # ------------------------------------------------------------ life

    async def trace(self, folder: Path | None) -> list[str]:
        return await self._of_engine(self._strategy.trace(None if folder is None else f"{folder}/{self.role}-{self.rank}"))

    async def take_work(self) -> RankWork:
        """Return the engine's GPU memory by phase."""
        memory = await self._of_engine(self._strategy.take_memory())
        return {phase: PhaseWork(None, memory=peaks) for phase, peaks in memory.items()}

    async def load(self, parts: Sequence[EngineMemory]) -> None:
        await self._of_engine(self._strategy.load(parts))

    async def offload(self, parts: Sequence[EngineMemory]) -> None:
        await self._of_engine(self._strategy.offload(parts))

    async def leave_device(self, parts: Sequence[EngineMemory] = tuple(EngineMemory)) -> None:
        """Offload, except during a weight update or after an interrupted one, which must be repeated first."""
        if self._strategy.life.state not in (EngineState.UPDATING, EngineState.HALF_UPDATED):
            await self.offload(parts)

    async def shutdown(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._end_engine()

    async def _end_engine(self) -> None:
        if self._watching_parts is not None:
            self._watching_parts.cancel()
        await asyncio.gather(self._strategy.shutdown(), *([self._parts.shutdown()] if self._parts is not None else []))

    async def _transferred(self, transfer: Awaitable[Any]) -> Transferred:
        try:
            seconds = await self._of_engine(transfer)
        except TransferError as error:
            return Transferred.broke_off(error)
        return Transferred(seconds=seconds or {})

    async def give_up(self, cause: str) -> None:
        self._strategy.fail(cause)

    async def _of_engine(self, work: Awaitable[T]) -> T:
        """Await work of the engine. If it fails, give up the engine and raise MemberLost.

        A living engine's TransferError is raised unchanged, as are first engines' errors before their first weight update, which all would
        raise.
        """
        try:
            return await work
        except Exception as error:  # a process edge: it becomes the cause
            if (await self._strategy.health()).alive:
                if isinstance(error, TransferError) or (self._is_first and self._version == 0):
                    raise
                await self.give_up(cause_of(error))
            raise MemberLost(self._strategy.life.failure or str(error)) from error


class EngineSeat:
    """Fleet member for one engine number. `engine`: the current engine, after a loss its replacement."""

    def __init__(self, engine: RemoteEngine, is_absent: bool = False) -> None:
        self.name = engine.name
        self.engine = engine
        self.successors: asyncio.Queue[RemoteEngine | MemberLost] = asyncio.Queue()
        """Replacements that have started; MemberLost if none will come."""
        self._is_first = not is_absent

    async def start(self) -> None:
        """Wait until the engine or, after a loss, a replacement has started; MemberLost if none will come."""
        if self._is_first:
            self._is_first = False
            await self.engine.start()
            return
        successor = await self.successors.get()
        if isinstance(successor, MemberLost):
            self.successors.put_nowait(successor)  # for further attempts
            raise successor
        self.engine = successor  # if it is dead already, `until_lost` reports it and another replacement comes

    async def until_lost(self) -> str:
        return await self.engine.until_lost()

    def kill(self) -> None:
        self.engine.kill()


class RemoteEngine(BatchedEngine):
    """Client of an InferWorker. If its process dies, the pending `collect` fails at once. `silence_s`: seconds without an answer after
    which it counts as lost; None: unlimited."""

    def __init__(self, name: str, worker: Any, frozen_admission: bool = False, silence_s: float | None = None) -> None:
        super().__init__(name, frozen_admission)
        self._worker = worker
        self._heartbeat = Heartbeat(self._ask_place, silence_s, PULSE_SECONDS)
        self._failed = asyncio.Event()
        self._place: Place | None = None
        self._blocks = 1

    def serves(self, worker: Any) -> bool:
        return bool(self._worker == worker)

    async def start(self) -> None:
        await self._worker.until_ready.remote()

    async def until_lost(self) -> str:
        try:
            return await first_of(self._worker.until_death.remote(), self._until_silent(), self._until_failed())
        except RayError as error:
            return cause_of(error)

    async def _until_failed(self) -> str:
        """Wait for a failed call, and for the worker's own report."""
        await self._failed.wait()
        await asyncio.sleep(FAILED_SECONDS)
        assert self._dead is not None
        return self._dead

    async def _until_silent(self) -> str:
        """Wait for an unanswered heartbeat; return the cause of loss. Living workers answer even during long prefills."""
        limit_s = await self._heartbeat.until_silent()
        return f"nothing was heard of its process for {self.silent_s:.1f} s (limits.engine_silence: {limit_s:g} s)"

    async def _ask_place(self) -> None:
        self._place = await self._worker.place.remote()

    @property
    def silent_s(self) -> float:
        """Seconds from the worker's last answer until the worker counted as lost."""
        return self._heartbeat.silent_s

    def fail(self, cause: str) -> None:
        if self._dead is None:
            self._heartbeat.listen(PULSE_SECONDS)
        super().fail(cause)
        self._failed.set()

    def kill(self) -> None:
        """Kill the worker, even if stopped by SIGSTOP: resumed later, it would serve old weights."""
        kill_actors([self._worker], [self._place])

    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        await self._call(self._worker.submit.remote(requests, frozen))

    async def _collect(self) -> Collected:
        answer, *blocks = self._worker.collect.options(num_returns=1 + self._blocks).remote(self._blocks)
        collected: Collected = await self._call(answer)
        self._blocks = min(max(1, collected.blocks_waiting), MOST_BLOCKS)
        # Copy the blocks to this node: those of the engine's node are lost with it.
        ray.wait(blocks, num_returns=len(blocks), timeout=0, fetch_local=True)
        return collected.with_blocks(blocks)

    async def _joined(self, request: GenerationRequest, parts: Sequence[TokenRow]) -> TokenRow:
        try:
            block = await joined_block(request, parts, fetch_block)
            return TokenRow(ray.put(block), 0, len(block.ragged("input_ids").values))
        except RayError as error:
            raise ConnectionError(cause_of(error)) from error

    async def _abort(self, request_ids: list[str]) -> None:
        await self._call(self._worker.abort.remote(request_ids))

    async def _call(self, reference: Any) -> Any:
        try:
            return await reference
        except RayActorError as error:
            raise ConnectionError(cause_of(error)) from error
