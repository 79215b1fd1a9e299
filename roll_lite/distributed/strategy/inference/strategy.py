from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from roll_lite.config.keep_mask import keep_mask_available
from roll_lite.config.schema.domains import GREATEST_TEMPERATURE, LEAST_TEMPERATURE
from roll_lite.config.schema.models import EngineStrategyConfig
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest
from roll_lite.distributed.liveness import StoppedTime, describe, first_of, is_stopped
from roll_lite.distributed.strategy.base import EngineHealth, EngineSpec, InferenceStrategy, PauseMode, Report, RequestProgress
from roll_lite.distributed.strategy.inference.life import EngineDead, EngineEvent, EngineLife, EngineMemory, EngineState
from roll_lite.distributed.strategy.inference.make import EngineMake
from roll_lite.distributed.strategy.inference.processes import EngineProcesses
from roll_lite.distributed.strategy.inference.requests import InFlight, ProgressReports
from roll_lite.distributed.strategy.inference.settings import with_fused
from roll_lite.distributed.strategy.inference.step_watch import StepWatch, step_limit
from roll_lite.distributed.weight_sync.endpoints import AUTO, TRANSPORTS
from roll_lite.distributed.weight_sync.group import largest
from roll_lite.distributed.weight_sync.plan import ExportedTensor, Membership, Route, tensors_of
from roll_lite.distributed.weight_sync.update import WeightUpdate, check_tensors, checkpoint_shapes
from roll_lite.models.adapter_files import adapter_shapes
from roll_lite.models.hf_config import read_hf_config
from roll_lite.observability.device_memory import MemoryPeaks, PeaksByPhase

T = TypeVar("T")

LIVENESS_POLL_S = 0.25
DIED = "the engine's process died"


class EngineStrategy(InferenceStrategy):
    def __init__(self, make: EngineMake, spec: EngineSpec) -> None:
        assert isinstance(spec.strategy, EngineStrategyConfig)
        self.make = make
        self.notes = make.notes
        self.options: EngineStrategyConfig = spec.strategy
        self.max_model_len = spec.max_model_len
        self.processes = EngineProcesses()
        self._model = spec.model
        self._lora = spec.lora
        self._drops_weights = spec.sleep == "without_copy"
        self._silence_s = spec.silence_s
        self.life = EngineLife(make.name)
        self._reports = ProgressReports(self._progress)
        self._order = asyncio.Lock()
        self._watching: list[asyncio.Task[None]] = []
        self._steps = StepWatch(make.answered, step_limit(spec.step_s), self.processes.are_compiling)
        self._memory = MemoryPeaks()
        self._vocabulary = 0
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        """{name: shape} of the tensors in weight updates: all of the checkpoint, or adapters."""

    # ------------------------------------------------------------ life

    async def preload(self) -> None:
        self.make.check_version()
        await self.make.preload()

    async def initialize(self) -> None:
        self.life.require(EngineEvent.START)
        self.make.check_version()
        config = read_hf_config(self._model.path)
        self._vocabulary = config.vocab_size
        stored = checkpoint_shapes(self._model.path, config.tied_embeddings)
        self._shapes = stored if self._lora is None else adapter_shapes(stored, self._lora.targets, self._lora.rank)
        try:
            self.processes.watch(await self.make.start())
            self.life.start()
            self._watching.append(asyncio.create_task(self._watch()))
            await self._answer(self.make.prepare(config))
            if self._lora is not None:
                shapes = adapter_shapes(stored, with_fused(self._lora.targets), self._lora.rank)
                plain = {name: list(shape) for name, shape in shapes.items()}
                await self._call_workers("roll_lite_take_adapters", shapes=plain, rank=self._lora.rank)
            await self._measure("start")
            self._watching.append(asyncio.create_task(self._watch_steps()))
        except BaseException:
            await self.shutdown()
            raise

    async def shutdown(self) -> None:
        for watch in self._watching:
            watch.cancel()
        if self.life.state is EngineState.DEAD:  # kill at once, without a clean shutdown
            self.processes.kill()
        self._give_up("shut down")
        await self.make.stop(self.processes)

    # ------------------------------------------------------------ requests

    def generate(self, request: GenerationRequest, report: Report = lambda progress: None) -> asyncio.Future[Completion]:
        flight = InFlight(request, report)
        task = asyncio.get_running_loop().create_task(self._complete(flight))
        self._reports.add(flight, task)
        return task

    async def _complete(self, flight: InFlight) -> Completion:
        request = flight.request
        try:
            refusal = self.life.failure or self._refusal(request)
            if refusal is not None:
                return Completion(request.request_id, error=refusal)
            if flight.aborted:
                return Completion(request.request_id, finish_reason=FinishReason.ABORT)
            flight.entered, flight.version = True, self.life.version
            with self._steps.in_flight(kernels := request.sampling.kernels):
                completion = await self.make.run(flight)
            if completion.token_ids:
                self._steps.responded(kernels)
            return completion
        except asyncio.CancelledError:
            if self.life.failure is None:  # cancelled by the caller
                raise
            return Completion(request.request_id, error=self.life.failure)
        except Exception as error:  # only this request fails, whatever the error
            return Completion(request.request_id, error=self._check() or f"{type(error).__name__}: {error.__cause__ or error}")

    def _refusal(self, request: GenerationRequest) -> str | None:
        length = len(request.prompt_ids)
        if length == 0:
            return "the prompt is empty"
        if length >= self.max_model_len:
            return f"the prompt has {length} tokens, which leaves no room for a response within max_model_len {self.max_model_len}"
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

    async def _progress(self, flights: Sequence[InFlight], parts: bool) -> Sequence[RequestProgress | None]:
        return await self._answer(self.make.progress(flights, parts)) if self._check() is None else [None] * len(flights)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        asked = None if request_ids is None else set(request_ids)
        wanted = [flight for flight in self._reports.flights if asked is None or flight.request.request_id in asked]
        for flight in wanted:
            flight.aborted = True
        known = [flight for flight in wanted if flight.entered]
        if known and self._check() is None:
            await self.make.abort(known)

    async def pause(self, mode: PauseMode) -> None:
        async with self._turn(EngineEvent.PAUSE):
            if mode is PauseMode.ABORT:
                await self.abort()
            is_held_up = self.life.state not in (EngineState.SERVING, EngineState.PAUSED)
            if not is_held_up and (mode is PauseMode.ABORT or not self.life.halted):
                await self._halt(mode)
            self.life.pause()

    async def resume(self) -> None:
        """Undo `pause`. Weight updates and offloads still block generation."""
        async with self._turn(EngineEvent.RESUME):
            self.life.resume()
            await self._settle()

    async def _settle(self) -> None:
        self._require(EngineEvent.RESUME)  # forbidden only before the start and after the engine's death
        halt = self.life.state is not EngineState.SERVING
        if halt and not self.life.halted:
            await self._halt(PauseMode.KEEP)
        elif not halt and self.life.halted is not False:
            self.life.halted = None
            await self._answer(self.make.resume())
            self.life.halted = False

    async def _halt(self, mode: PauseMode) -> None:
        self.life.halted = None
        await self._answer(self.make.pause(mode))
        self.life.halted = True

    async def health(self) -> EngineHealth:
        alive = self._check() is None
        count = sum(flight.entered and not task.done() for flight, task in self._reports.flights.items())
        running = 0 if self.life.halted else min(count, self.options.max_running_requests)
        return EngineHealth(alive, running, count - running)

    # ------------------------------------------------------------ memory

    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        async with self._turn(EngineEvent.LOAD):
            coming = self.life.away & set(parts)
            if coming:
                if self.life.blank and EngineMemory.KV_CACHE in coming:
                    raise RuntimeError("the engine's weights were dropped in an offload: update them before the KV cache is loaded")
                await self._at_length(self.make.load(coming))
                await self._measure("load")
                self.life.load(coming)
                await self._settle()

    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        async with self._turn(EngineEvent.OFFLOAD):
            leaving = set(parts) - self.life.away
            if not leaving:
                return
            if not self.life.away:
                await self._measure(self._phase)
                await self.abort()
                await self._halt(PauseMode.ABORT)
            cache_stays = EngineMemory.KV_CACHE not in self.life.away | leaving
            await self._at_length(self.make.offload(leaving, cache_stays))
            self.life.offload(leaving)
            self.life.blank |= self._drops_weights and EngineMemory.WEIGHTS in leaving
            if self.life.away == set(EngineMemory):
                await self._measure("offload")

    async def take_memory(self) -> PeaksByPhase:
        async with self._order:
            if self._check() is None and not self.life.away:
                await self._measure(self._phase)
            return self._memory.take()

    async def _measure(self, phase: str) -> None:
        """End a phase whose memory the workers measure. While memory is offloaded, record only the device's use: torch still counts it."""
        if self.make.cuda:
            for peaks in await self._call_workers("roll_lite_memory"):
                self._memory.add(phase, {"device": peaks["device"]} if self.life.away else peaks)

    @property
    def _phase(self) -> str:
        if self.life.state in (EngineState.UPDATING, EngineState.HALF_UPDATED):
            return "sync_weights"
        return "load" if self.life.away else "generate"

    # ------------------------------------------------------------ weights

    async def connect_weights(self, first_member: int, membership: Membership) -> None:
        if membership.transport not in (AUTO, *TRANSPORTS):
            raise ValueError(f"transport {membership.transport!r} is unknown here; there are {', '.join((AUTO, *TRANSPORTS))}")
        async with self._turn(EngineEvent.CONNECT):
            await self._call_workers("roll_lite_connect", first_member=first_member, membership=membership.plain())

    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        self._require(EngineEvent.BEGIN_UPDATE)
        check_tensors(tensors, self._shapes)
        self.life.begin_update(WeightUpdate(tensors))

    async def receive_bucket(self, routes: Sequence[Route], following: Sequence[Route] = ()) -> None:
        """Receive and load a bucket. The first one freezes the engine until the update is complete."""
        self._require_update()
        async with self._order:
            tensors = tensors_of(routes)
            self._require_update().check(tensors)
            if not self._require_update().arrived:
                await self._measure(self._phase)
            update = self.life.receive()
            try:
                await self._settle()
                now, then = ([route.plain() for route in bucket] for bucket in (routes, following))
                await self._call_workers("roll_lite_load_bucket", routes=now, following=then)
            except EngineDead:
                raise
            except Exception:  # whatever the error, half-loaded weights must not be used
                await self._broke_off()
                raise
            except asyncio.CancelledError:
                self.fail("a weight update was cancelled, the engine may hold neither the old nor the new weights")
                raise
            update.arrived.update(tensor.name for tensor in tensors)

    async def _broke_off(self) -> None:
        try:
            touched = any(await self._call_workers("roll_lite_weights_touched"))
        except Exception as unknown:  # an engine in an unknown state must not continue
            self.fail(f"a weight update broke off, and the engine does not say whether its weights are whole: {unknown}")
            return
        self.life.break_off(half_way=touched)
        await self._settle()

    async def finish_weight_update(self, version: int) -> dict[str, float]:
        self._require_update()
        async with self._order:
            update = self._require_update()
            update.require_complete()
            try:
                answers = await self._call_workers("roll_lite_put_in_place")
                await self._at_length(self.make.renew(version))
                await self._measure("sync_weights")
            except BaseException as error:  # also if cancelled: the engine's weights are unknown now
                self.fail(self.life.failure or f"new weights could not be put in place: {error}")
                raise
            self._dtypes = {tensor.name: str(tensor.dtype).removeprefix("torch.") for tensor in update.tensors}
            self.life.finish_update(version)
            await self._settle()
        return largest(answers)

    async def weight_checksums(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Return checksums of weights in the last update's dtypes, equal to the sender's."""
        async with self._turn(EngineEvent.READ_WEIGHTS):
            shapes = {name: list(shape) for name, shape in self._shapes.items()}
            asked = None if names is None else sorted(names)
            answers = await self._call_workers("roll_lite_checksums", dtypes=self._dtypes, shapes=shapes, names=asked)
        expected = shapes.keys() if names is None else set(names)
        sums: dict[str, str] = {}
        for worker, told in enumerate(answers):  # all workers hold copies of unsharded tensors
            assert told.keys() == expected, f"held and expected differ: {sorted(told.keys() ^ expected)[:5]}"
            sums |= {name: f"{digest} in worker {worker}" for name, digest in told.items() if digest != answers[0][name]}
        return {**answers[0], **sums}

    async def trace(self, prefix: str | None) -> list[str]:
        async with self._order:
            return await self._call_workers("roll_lite_trace", prefix=prefix)

    async def _call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return await self._at_length(self.make.call_workers(method, **arguments))

    async def _at_length(self, call: Awaitable[T]) -> T:
        with self._steps.suspended():
            return await self._answer(call)

    async def _answer(self, call: Awaitable[T]) -> T:
        return await first_of(call, self.life.until_refused())

    # ------------------------------------------------------------ liveness

    def _check(self) -> str | None:
        if self.life.failure is None and (self.make.is_dead() or not self.processes.running()):
            self.life.die(DIED)
        return self.life.failure

    async def _watch(self) -> None:
        stopped = StoppedTime(LIVENESS_POLL_S)
        failure: str | None = None
        while failure is None:
            await asyncio.sleep(LIVENESS_POLL_S)
            failure = self._check() or stopped.look(self.processes.all, self._silence_s, "limits.engine_silence")
        self.fail(failure)

    async def _watch_steps(self) -> None:
        why = await first_of(self._steps.until_stuck(), self.life.until_dead())
        stopped = next((process for process in self.processes.all if is_stopped(process)), None)
        self.fail(why if stopped is None else f"{why}: {describe(stopped)} is stopped")

    def _require(self, event: EngineEvent) -> None:
        self._check()
        self.life.require(event)

    @asynccontextmanager
    async def _turn(self, event: EngineEvent) -> AsyncIterator[None]:
        self._require(event)
        async with self._order:
            self._require(event)
            yield

    def _require_update(self) -> WeightUpdate:
        self._check()
        return self.life.require_update()

    def _give_up(self, why: str) -> None:
        self.life.die(why)
        for flight, task in self._reports.flights.items():
            if flight.entered:  # requests not yet given to the engine see the failure themselves
                task.cancel()

    def fail(self, why: str) -> None:
        self._give_up(why)
        self.processes.kill()
