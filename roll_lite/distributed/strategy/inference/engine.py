"""An inference engine in processes of its own: bookkeeping of requests, refusals, the order of a weight update, and its death.

What a make of engine adds is how a request is run, how it is aborted and paused, and how its workers are called.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roll_lite.config.hf_config import HfConfig, read_hf_config
from roll_lite.config.keep_mask import keep_mask_available
from roll_lite.config.schema import GREATEST_TEMPERATURE, LEAST_TEMPERATURE, ModelConfig, SglangStrategyConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest
from roll_lite.distributed.strategy.base import (
    EngineHealth,
    EngineMemory,
    InferenceStrategy,
    PauseMode,
)
from roll_lite.distributed.strategy.inference.processes import EngineProcesses
from roll_lite.distributed.strategy.inference.scratch import Scratch
from roll_lite.distributed.weight_sync.endpoints import TRANSPORTS
from roll_lite.distributed.weight_sync.group import TransferError
from roll_lite.distributed.weight_sync.plan import ExportedTensor, Membership, Route, tensors_of
from roll_lite.distributed.weight_sync.update import WeightUpdate, check_tensors, checkpoint_shapes

_NOT_STARTED = "not started"
DIED = "the engine's process died"


class EngineDead(RuntimeError):
    """The engine cannot serve any more; a new one has to be started."""


@dataclass
class _InFlight:
    request: GenerationRequest
    entered: bool = False
    """The engine has it."""
    aborted: bool = False


class EngineStrategy(InferenceStrategy):
    """`devices`: the GPUs of this engine, all visible ones where None. `threads`: CPU threads of the engine's process."""

    make: ClassVar[str]
    """The engine's name in messages."""

    def __init__(
        self,
        model: ModelConfig,
        strategy: VllmStrategyConfig | SglangStrategyConfig,
        max_model_len: int,
        seed: int = 1,
        devices: Sequence[int] | None = None,
        threads: int = 1,
    ) -> None:
        self._model = model
        self._options = strategy
        self._max_model_len = max_model_len
        self._seed = seed
        self._devices = devices
        self._threads = threads
        self._processes = EngineProcesses()
        self._scratch: Scratch | None = None
        self._failure: str | None = _NOT_STARTED
        self._in_flight: dict[asyncio.Task[Completion], _InFlight] = {}
        self._order = asyncio.Lock()
        """Calls that change what the engine does are carried out one after the other."""
        self._halted: bool | None = False
        """The engine itself is paused: by its callers, by an update, or because parts of it are offloaded. None: on the way, or nobody
        knows, because a call was cancelled."""
        self._paused = False
        """By its callers."""
        self._away: set[EngineMemory] = set()
        """Offloaded."""
        self._version = 0
        self._vocabulary = 0
        self._update: WeightUpdate | None = None
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    # ------------------------------------------------------------ what an engine adds

    @abstractmethod
    def _check_version(self) -> None:
        """RuntimeError where the engine is not installed, or in a version that is not supported."""

    @abstractmethod
    async def _launch(self) -> list[int]:
        """Start the engine. Process ids of what has been started."""

    @abstractmethod
    async def _open(self, config: HfConfig) -> None:
        """The engine runs and is watched: what is left to do before it serves."""

    @abstractmethod
    async def _run(self, request: GenerationRequest) -> Completion:
        """A request that nothing speaks against. Cancelled, it is aborted in the engine."""

    @abstractmethod
    async def _abort(self, request_ids: Sequence[str]) -> None: ...

    @abstractmethod
    async def _pause(self, mode: PauseMode) -> None: ...

    @abstractmethod
    async def _resume(self) -> None: ...

    @abstractmethod
    async def _connect(self, first_member: int, membership: dict[str, Any]) -> None: ...

    @abstractmethod
    async def _load_bucket(self, routes: list[dict[str, Any]]) -> None:
        """Receive and load. TransferError where that fails."""

    @abstractmethod
    async def _weights_touched(self) -> bool:
        """Whether a worker has begun to overwrite its weights."""

    @abstractmethod
    async def _put_in_place(self, version: int) -> None:
        """After the last bucket: new weights, no keys and values of old ones. TransferError where the first fails."""

    @abstractmethod
    async def _checksums(self, dtypes: dict[str, str]) -> dict[str, str]: ...

    @abstractmethod
    async def _offload(self, parts: Collection[EngineMemory]) -> None:
        """Parts that are there. The engine is paused and runs nothing."""

    @abstractmethod
    async def _load(self, parts: Collection[EngineMemory]) -> None:
        """Parts that are away."""

    @abstractmethod
    def _is_dead(self) -> bool: ...

    # ------------------------------------------------------------ life

    async def initialize(self) -> None:
        if self._failure != _NOT_STARTED:
            raise RuntimeError(f"{self.make} engine: a strategy starts its engine once; make a new strategy for another")
        self._check_version()
        config = read_hf_config(self._model.path)
        self._vocabulary = config.vocab_size
        self._shapes = checkpoint_shapes(self._model.path, config.tied_embeddings)
        try:
            self._processes.watch(await self._launch())
            self._failure = None
            await self._open(config)
        except BaseException:
            await self.shutdown()
            raise

    # ------------------------------------------------------------ requests

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        self._check()
        finished: asyncio.Queue[Completion] = asyncio.Queue()
        tasks = [self._start(request, finished) for request in requests]
        try:
            for _ in tasks:
                yield await finished.get()
        finally:
            for task in tasks:
                task.cancel()  # which aborts what the engine still runs

    def _start(self, request: GenerationRequest, finished: asyncio.Queue[Completion]) -> asyncio.Task[Completion]:
        one = _InFlight(request)
        task = asyncio.create_task(self._complete(one))
        self._in_flight[task] = one

        def ended(task: asyncio.Task[Completion]) -> None:
            """Also of a task that was cancelled before its first step."""
            del self._in_flight[task]
            gone = task.cancelled()
            finished.put_nowait(Completion(request.request_id, error=self._failure or "cancelled") if gone else task.result())

        task.add_done_callback(ended)
        return task

    async def _complete(self, one: _InFlight) -> Completion:
        request = one.request
        try:
            refusal = self._failure or self._refusal(request)
            if refusal is not None:
                return Completion(request.request_id, error=refusal)
            if one.aborted:
                return Completion(request.request_id, finish_reason=FinishReason.ABORT)
            one.entered = True
            return await self._run(request)
        except Exception as error:  # an edge of the process: whatever it was, this one request failed of it
            return Completion(request.request_id, error=self._check() or f"{type(error).__name__}: {error.__cause__ or error}")

    def _refusal(self, request: GenerationRequest) -> str | None:
        length = len(request.prompt_ids)
        if length == 0:
            return "the prompt is empty"
        if length >= self._max_model_len:
            return f"the prompt has {length} tokens, which leaves no room for a response within max_model_len {self._max_model_len}"
        sampling = request.sampling
        if sampling.max_tokens < 1:
            return f"max_tokens is {sampling.max_tokens}: a response has at least one token"
        if sampling.temperature != 0 and not LEAST_TEMPERATURE <= sampling.temperature <= GREATEST_TEMPERATURE:
            reason = f"engines sample between {LEAST_TEMPERATURE:g} and {GREATEST_TEMPERATURE:g}, and greedily at 0"
            return f"the temperature is {sampling.temperature:g}: {reason}"
        if "" in sampling.stop:
            return "a stop text is empty"
        for tokens, what in ((request.prompt_ids, "the prompt holds"), (sampling.stop_token_ids, "stop_token_ids holds")):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                return f"{what} a token outside the vocabulary of {self._vocabulary}"
        return keep_mask_available(sampling, self._vocabulary) if sampling.keep_mask and sampling.temperature > 0 else None

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        asked = None if request_ids is None else set(request_ids)
        wanted = [one for one in self._in_flight.values() if asked is None or one.request.request_id in asked]
        for one in wanted:
            one.aborted = True
        known = [one.request.request_id for one in wanted if one.entered]
        if known and self._check() is None:
            await self._abort(known)

    async def pause(self, mode: PauseMode) -> None:
        """An engine that an update or missing memory holds up has nothing to wait for: there WAIT freezes, as KEEP does."""
        self._require_alive()
        if mode is PauseMode.ABORT:
            await self.abort()  # which also ends an earlier WAIT
        async with self._order:
            self._require_alive()
            if self._held_up():
                if mode is PauseMode.ABORT:
                    await self.abort()
            elif mode is not PauseMode.KEEP or not self._halted:
                await self._halt(mode)
            self._paused = True

    async def resume(self) -> None:
        """Takes back what callers have paused: an engine that an update or missing memory holds up goes on after that."""
        self._require_alive()
        async with self._order:
            self._paused = False
            await self._settle()

    def _held_up(self) -> bool:
        return bool(self._away) or (self._update is not None and self._update.opened)

    async def _settle(self) -> None:
        """Let the engine do what is asked of it."""
        self._require_alive()
        halt = self._paused or self._held_up()
        if halt and not self._halted:
            await self._halt(PauseMode.KEEP)
        elif not halt and self._halted is not False:
            self._halted = None
            await self._resume()
            self._halted = False

    async def _halt(self, mode: PauseMode) -> None:
        self._halted = None
        await self._pause(mode)
        self._halted = True

    async def health(self) -> EngineHealth:
        failure = self._check()
        count = sum(one.entered for one in self._in_flight.values())
        running = 0 if self._halted else min(count, self._options.max_running_requests)
        details: dict[str, Any] = {"failure": failure} if failure else {}
        if self._away:
            details["offloaded"] = sorted(self._away)
        return EngineHealth(failure is None, self._version, running, count - running, details)

    # ------------------------------------------------------------ memory

    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        self._require_alive()
        async with self._order:
            coming = self._away & set(parts)
            if coming:
                await self._load(coming)
                self._away -= coming
                await self._settle()

    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        self._require_no_update("finish it before anything is offloaded")
        leaving = set(parts)
        if leaving and not self._away:
            await self.abort()  # which also ends a WAIT
        async with self._order:
            self._require_no_update("finish it before anything is offloaded")
            leaving -= self._away
            if not leaving:
                return
            if not self._away:
                await self._halt(PauseMode.ABORT)
            await self._offload(leaving)
            self._away |= leaving

    # ------------------------------------------------------------ weights

    async def connect_weights(self, first_member: int, membership: Membership) -> None:
        if membership.transport not in TRANSPORTS:
            raise ValueError(f"transport {membership.transport!r} is unknown here; there are {', '.join(TRANSPORTS)}")
        self._require_alive()
        async with self._order:
            await self._connect(first_member, membership.plain())

    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        """Until the first bucket has arrived the old weights stay in place, and beginning again starts over."""
        self._require_weights()
        self._require_no_update("finish it first")
        check_tensors(tensors, self._shapes)
        self._update = WeightUpdate(tensors)

    async def receive_bucket(self, routes: Sequence[Route]) -> None:
        """From the first bucket on the engine is frozen, until the update is finished."""
        self._require_update()
        async with self._order:
            update = self._require_update()
            tensors = tensors_of(routes)
            update.check(tensors)
            update.opened = True
            try:
                await self._settle()
                await self._load_bucket([route.plain() for route in routes])
            except TransferError as error:
                await self._broke_off(update, error)
                raise
            except asyncio.CancelledError:
                self._fail("a weight update was cancelled, the engine may hold neither the old nor the new weights")
                raise
            update.arrived.update(tensor.name for tensor in tensors)

    async def _broke_off(self, update: WeightUpdate, error: TransferError) -> None:
        try:
            touched = await self._weights_touched()
        except Exception as unknown:  # an engine that cannot say so must not go on
            self._fail(f"a weight update broke off, and the engine does not say whether its weights are whole: {unknown}")
            return
        if touched:
            self._fail(f"a weight update broke off half-way, the engine holds neither the old nor the new weights: {error}")
        else:
            update.opened = False
            await self._settle()

    async def finish_weight_update(self, version: int) -> None:
        self._require_update()
        async with self._order:
            update = self._require_update()
            update.require_complete()
            try:
                await self._put_in_place(version)
            except BaseException as error:  # a cancelled one as well: what the engine holds now is unknown
                self._fail(self._failure or f"new weights could not be put in place: {error}")
                raise
            self._version, self._dtypes, self._update = version, update.dtypes(), None
            await self._settle()

    async def weight_checksums(self) -> dict[str, str]:
        """Of what the workers hold and compute with: fused and sharded parameters are taken apart and put together again (see
        `held_weights`).

        In the dtype of the last update's tensors (before the first one, in the engine's): where the engine keeps fewer bits than it
        was sent, the checksums differ.
        """
        self._require_weights()
        self._require_no_update("the engine holds parts of two sets of weights")
        async with self._order:
            sums = await self._checksums(self._dtypes)
        assert sums.keys() == self._shapes.keys(), f"held and checkpoint differ: {sorted(sums.keys() ^ self._shapes.keys())[:5]}"
        return sums

    # ------------------------------------------------------------ liveness

    def _check(self) -> str | None:
        """Why the engine cannot serve, or None."""
        if self._failure is None and (self._is_dead() or not self._processes.running()):
            self._failure = DIED
        return self._failure

    def _require_alive(self) -> None:
        failure = self._check()
        if failure is not None:
            raise EngineDead(f"{self.make} engine: {failure}")

    def _require_weights(self) -> None:
        self._require_alive()
        if EngineMemory.WEIGHTS in self._away:
            raise RuntimeError("the engine's weights are offloaded: load them first")

    def _require_no_update(self, remedy: str) -> None:
        self._require_alive()
        if self._update is not None and self._update.opened:
            raise RuntimeError(f"a weight update is under way: {remedy}")

    def _require_update(self) -> WeightUpdate:
        self._require_weights()
        if self._update is None:
            raise RuntimeError("no weight update has begun: begin_weight_update comes first")
        return self._update

    def _give_up(self, why: str) -> None:
        """From now on nothing is served; what runs comes back as failed."""
        self._failure = why
        for task in self._in_flight:
            task.cancel()

    def _fail(self, why: str) -> None:
        """Give up an engine that must not serve any more, and end it."""
        self._give_up(why)
        self._processes.kill()
