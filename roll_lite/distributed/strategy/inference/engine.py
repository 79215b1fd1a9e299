"""An inference engine in processes of its own: bookkeeping of requests, refusals, the order of a weight update, and its death.

What a make of engine adds is how a request is run, how it is aborted and paused, and how its workers are called.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import Any, ClassVar

from roll_lite.config.keep_mask import keep_mask_available
from roll_lite.config.schema import ModelConfig, SglangStrategyConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import (
    EngineHealth,
    EngineMemory,
    ExportedTensor,
    InferenceStrategy,
    PauseMode,
    TransferEndpoint,
)
from roll_lite.distributed.strategy.inference.checkpoint import check_tensors
from roll_lite.distributed.strategy.inference.processes import EngineProcesses
from roll_lite.distributed.strategy.inference.scratch import Scratch
from roll_lite.distributed.strategy.inference.update import WeightUpdate
from roll_lite.distributed.weight_sync.receivers import RECEIVERS
from roll_lite.distributed.weight_sync.transport import TransferError


class EngineDead(RuntimeError):
    """The engine cannot serve any more; a new one has to be started."""


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
        self._failure: str | None = "not started"
        self._in_flight: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()
        self._paused = False
        self._away: set[EngineMemory] = set()
        """Offloaded. While anything is, the engine itself is paused, whatever callers have asked for."""
        self._version = 0
        self._vocabulary = 0
        self._update: WeightUpdate | None = None
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    # ------------------------------------------------------------ what an engine adds

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
    async def _connect(self, endpoint: TransferEndpoint) -> None: ...

    @abstractmethod
    async def _load_bucket(self, bucket: dict[str, Any], first: bool) -> None:
        """Receive and load. TransferError where that fails. `first`: of this update."""

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

    # ------------------------------------------------------------ requests

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        finished: asyncio.Queue[Completion] = asyncio.Queue()
        tasks = [asyncio.create_task(self._complete(request, finished)) for request in requests]
        self._running.update(tasks)
        try:
            for _ in tasks:
                yield await finished.get()
        finally:
            self._running.difference_update(tasks)
            for task in tasks:
                task.cancel()  # which aborts what the engine still runs

    async def _complete(self, request: GenerationRequest, finished: asyncio.Queue[Completion]) -> None:
        self._in_flight[request.request_id] += 1
        try:
            refusal = self._check() or self._refusal(request)
            completion = await self._run(request) if refusal is None else Completion(request.request_id, error=refusal)
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            completion = Completion(request.request_id, error=self._failure)
        except Exception as error:  # an edge of the process: whatever it was, this one request failed of it
            cause = self._check() or f"{type(error).__name__}: {error.__cause__ or error}"
            completion = Completion(request.request_id, error=cause)
        finally:
            self._in_flight -= Counter([request.request_id])
        finished.put_nowait(completion)

    def _refusal(self, request: GenerationRequest) -> str | None:
        length = len(request.prompt_ids)
        if length == 0:
            return "the prompt is empty"
        if length >= self._max_model_len:
            return f"the prompt has {length} tokens, which leaves no room for a response within max_model_len {self._max_model_len}"
        sampling = request.sampling
        for tokens, what in ((request.prompt_ids, "the prompt holds"), (sampling.stop_token_ids, "stop_token_ids holds")):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                return f"{what} a token outside the vocabulary of {self._vocabulary}"
        return keep_mask_available(sampling, self._vocabulary) if sampling.keep_mask and sampling.temperature > 0 else None

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await asyncio.sleep(0)  # requests whose tasks were made a moment ago enter the engine now
        wanted = self._in_flight if request_ids is None else self._in_flight.keys() & set(request_ids)
        if wanted and self._check() is None:
            await self._abort(list(wanted))

    async def pause(self, mode: PauseMode) -> None:
        self._require_alive()
        if not self._away:
            await self._pause(mode)
        elif mode is PauseMode.ABORT:
            await self.abort()
        self._paused = True

    async def resume(self) -> None:
        self._require_alive()
        if not self._away:
            await self._resume()
        self._paused = False

    async def health(self) -> EngineHealth:
        failure = self._check()
        count = self._in_flight.total()
        running = 0 if self._paused or self._away else min(count, self._options.max_running_requests)
        details: dict[str, Any] = {"failure": failure} if failure else {}
        if self._away:
            details["offloaded"] = sorted(self._away)
        return EngineHealth(failure is None, self._version, running, count - running, details)

    # ------------------------------------------------------------ memory

    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        self._require_alive()
        coming = self._away & set(parts)
        if not coming:
            return
        await self._load(coming)
        self._away -= coming
        if not self._away and not self._paused:
            await self._resume()

    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        self._require_alive()
        leaving = set(parts) - self._away
        if not leaving:
            return
        if self._update is not None and self._update.arrived:
            raise RuntimeError("a weight update is under way: finish it before anything is offloaded")
        if not self._away:
            await self._pause(PauseMode.ABORT)
        await self._offload(leaving)
        self._away |= leaving

    # ------------------------------------------------------------ weights

    async def connect_weights(self, endpoint: TransferEndpoint) -> None:
        if endpoint.transport not in RECEIVERS:
            raise ValueError(f"transport {endpoint.transport!r} is unknown here; there are {', '.join(RECEIVERS)}")
        self._require_alive()
        await self._connect(endpoint)

    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        """Until the first bucket has arrived the old weights stay in place, and beginning again starts over."""
        self._require_weights()
        if self._update is not None and self._update.arrived:
            raise RuntimeError("a weight update is under way: finish it first")
        check_tensors(tensors, self._shapes)
        self._update = WeightUpdate(tensors, resume_after=self._update.resume_after if self._update else False)

    async def receive_bucket(self, tensors: Sequence[ExportedTensor]) -> None:
        """An engine that is not paused is paused (`keep`) until the update is finished."""
        update = self._require_update()
        bucket = update.bucket(tensors)
        if not self._paused:
            await self.pause(PauseMode.KEEP)
            update.resume_after = True
        first, update.opened = not update.opened, True
        try:
            await self._load_bucket(bucket, first)
        except TransferError as error:
            update.opened = False
            if await self._weights_touched():
                self._fail(f"a weight update broke off half-way, the engine holds neither the old nor the new weights: {error}")
            elif update.resume_after:
                update.resume_after = False
                await self.resume()
            raise
        update.arrived.update(tensor.name for tensor in tensors)

    async def finish_weight_update(self, version: int) -> None:
        update = self._require_update()
        missing = update.missing()
        if missing:
            raise RuntimeError(f"weight update: {len(missing)} tensors have not arrived, among them {', '.join(missing[:5])}")
        try:
            await self._put_in_place(version)
        except TransferError as error:
            self._fail(f"new weights could not be put in place: {error}")
            raise
        self._version, self._dtypes, self._update = version, update.dtypes(), None
        if update.resume_after:
            await self.resume()

    async def weight_checksums(self) -> dict[str, str]:
        """Of what the workers hold and compute with: fused and sharded parameters are taken apart and put together again (see
        `held_weights`).

        In the dtype of the last update's tensors (before the first one, in the engine's): where the engine keeps fewer bits than it
        was sent, the checksums differ.
        """
        self._require_weights()
        if self._update is not None and self._update.arrived:
            raise RuntimeError("a weight update is under way: the engine holds parts of two sets of weights")
        sums = await self._checksums(self._dtypes)
        assert sums.keys() == self._shapes.keys(), f"held and checkpoint differ: {sorted(sums.keys() ^ self._shapes.keys())[:5]}"
        return sums

    # ------------------------------------------------------------ liveness

    def _check(self) -> str | None:
        """Why the engine cannot serve, or None."""
        if self._failure is None and (self._is_dead() or not self._processes.running()):
            self._failure = "the engine's process died"
        return self._failure

    def _require_alive(self) -> None:
        failure = self._check()
        if failure is not None:
            raise EngineDead(f"{self.make} engine: {failure}")

    def _require_weights(self) -> None:
        self._require_alive()
        if EngineMemory.WEIGHTS in self._away:
            raise RuntimeError("the engine's weights are offloaded: load them first")

    def _require_update(self) -> WeightUpdate:
        self._require_weights()
        if self._update is None:
            raise RuntimeError("no weight update has begun: begin_weight_update comes first")
        return self._update

    def _give_up(self, why: str) -> None:
        """From now on nothing is served; what runs comes back as failed."""
        self._failure = why
        for task in self._running:
            task.cancel()

    def _fail(self, why: str) -> None:
        """Give up an engine that must not serve any more, and end it."""
        self._give_up(why)
        self._processes.kill()
