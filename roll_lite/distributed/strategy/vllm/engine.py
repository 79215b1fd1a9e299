"""One vLLM engine: requests in, completions out as they finish, weights replaced in between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from roll_lite.config.keep_mask import keep_mask_available, keep_mask_width
from roll_lite.config.schema import ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import (
    Capabilities,
    EngineHealth,
    ExportedTensor,
    InferenceStrategy,
    PauseMode,
    TransferEndpoint,
)
from roll_lite.distributed.strategy.vllm import compat
from roll_lite.distributed.strategy.vllm.checkpoint import check_tensors, checkpoint_shapes
from roll_lite.distributed.strategy.vllm.environment import apply_environment, on_cuda
from roll_lite.distributed.strategy.vllm.processes import EngineProcesses
from roll_lite.distributed.strategy.vllm.scratch import Scratch
from roll_lite.distributed.strategy.vllm.update import WeightUpdate
from roll_lite.distributed.weight_sync.receivers import RECEIVERS
from roll_lite.distributed.weight_sync.transport import TransferError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

LIVENESS_POLL_S = 0.25


class EngineDead(RuntimeError):
    """The engine cannot serve any more; a new one has to be started."""


class VllmStrategy(InferenceStrategy):
    """`devices`: the GPUs of this engine, all visible ones where None. `threads`: CPU threads of the engine's process."""

    def __init__(
        self,
        model: ModelConfig,
        strategy: VllmStrategyConfig,
        max_model_len: int,
        seed: int = 1,
        devices: Sequence[int] | None = None,
        threads: int = 1,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._max_model_len = max_model_len
        self._seed = seed
        self._devices = devices
        self._threads = threads
        self._cuda = on_cuda()
        self.capabilities = Capabilities(keep_mask=True, frees_memory=self._cuda, pause_modes=frozenset(PauseMode))
        self._engine: AsyncLLM | None = None
        self._processes = EngineProcesses()
        self._scratch: Scratch | None = None
        self._failure: str | None = "not started"
        self._in_flight: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()
        self._paused = False
        self._version = 0
        self._update: WeightUpdate | None = None
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    # ------------------------------------------------------------ life

    async def initialize(self) -> None:
        """Blocks the event loop while the engine starts: its processes belong to the thread that starts them."""
        compat.check_version()
        apply_environment(self._threads, self._devices)
        self._scratch = Scratch()
        try:
            with self._scratch.inherited():
                self._engine = compat.start_engine(self._model, self._strategy, self._max_model_len, self._seed, self._cuda)
        except BaseException:
            self._scratch.remove()
            raise
        self._processes.watch(compat.process_ids(self._engine))
        self._failure = None
        text_config = self._engine.model_config.hf_config.get_text_config()
        self._vocabulary = int(text_config.vocab_size)
        self._shapes = checkpoint_shapes(self._model.path, bool(text_config.tie_word_embeddings))
        self._tokenizer = self._engine.get_tokenizer()
        await self._alive(self._llm.get_supported_tasks())  # cached: from here on, requests enter in the order of their submission
        await self._alive(self._llm.update_weight_version(str(self._version)))

    async def shutdown(self) -> None:
        self._give_up(self._failure or "shut down")
        engine, self._engine = self._engine, None
        if engine is not None:
            compat.stop_listening(engine)
            await self._processes.end(lambda: engine.shutdown(timeout=3.0))
        if self._scratch is not None:
            self._scratch.remove()

    async def health(self) -> EngineHealth:
        failure = self._check()
        count = self._in_flight.total()
        running = 0 if self._paused else min(count, self._strategy.max_running_requests)
        details = {"failure": failure} if failure else {}
        return EngineHealth(failure is None, self._version, running, count - running, details)

    async def load(self) -> None:
        if self._cuda and await self._alive(self._llm.is_sleeping()):
            await self._alive(self._llm.wake_up())

    async def offload(self) -> None:
        """Weights go to host memory, the key/value cache is dropped; running requests end as aborted. Nothing on a CPU."""
        if self._cuda:
            await self._alive(self._llm.sleep(level=1, mode="abort"))

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
                task.cancel()  # vLLM aborts what a cancelled request still runs

    async def _complete(self, request: GenerationRequest, finished: asyncio.Queue[Completion]) -> None:
        self._in_flight[request.request_id] += 1
        try:
            completion = await self._run(request)
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

    async def _run(self, request: GenerationRequest) -> Completion:
        refusal = self._check() or self._refusal(request)
        if refusal is not None:
            return Completion(request.request_id, error=refusal)
        alternatives = self._alternatives(request)
        params = compat.sampling_params(request, alternatives or 0)
        async for output in self._llm.generate(compat.prompt_input(request.prompt_ids), params, request.request_id):
            if output.finished:
                return compat.completion(output, self._tokenizer, self._version, alternatives)
        return Completion(request.request_id, error="vLLM ended the request without an output")

    def _refusal(self, request: GenerationRequest) -> str | None:
        length = len(request.prompt_ids)
        if length == 0:
            return "the prompt is empty"
        if length >= self._max_model_len:
            return f"the prompt has {length} tokens, which leaves no room for a response within max_model_len {self._max_model_len}"
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
            return f"the prompt holds a token outside the vocabulary of {self._vocabulary}"
        return keep_mask_available(request.sampling, self._vocabulary) if self._alternatives(request) else None

    def _alternatives(self, request: GenerationRequest) -> int | None:
        """Tokens whose log-probs say which ones survived truncation; None where nobody asks. Greedy decoding knows no truncation."""
        sampling = request.sampling
        if not sampling.keep_mask:
            return None
        return keep_mask_width(sampling, self._vocabulary) if sampling.temperature > 0 else 0

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await asyncio.sleep(0)  # requests whose tasks were made a moment ago enter the engine now
        wanted = self._in_flight if request_ids is None else self._in_flight.keys() & set(request_ids)
        if wanted and self._check() is None:
            await self._llm.abort(list(wanted))

    async def pause(self, mode: PauseMode) -> None:
        await self._alive(self._llm.pause_generation(mode=mode.value, clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        await self._alive(self._llm.resume_generation())
        self._paused = False

    # ------------------------------------------------------------ weights

    async def connect_weights(self, endpoint: TransferEndpoint) -> None:
        if endpoint.transport not in RECEIVERS:
            raise ValueError(f"transport {endpoint.transport!r} is unknown here; there are {', '.join(RECEIVERS)}")
        await self._call_workers("init_weight_transfer_engine", asdict(endpoint))

    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        """Until the first bucket has arrived the old weights stay in place, and beginning again starts over."""
        self._require_alive()
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
        if not update.opened:
            await self._call_workers("start_weight_update")
            update.opened = True
        try:
            await self._call_workers("update_weights", bucket)
        except TransferError as error:
            update.opened = False  # vLLM closes an update whose bucket failed
            if any(await self._call_workers("roll_lite_weights_touched")):
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
            await self._call_workers("finish_weight_update")
        except TransferError as error:
            self._fail(f"new weights could not be put in place: {error}")
            raise
        # Running requests are recomputed from their tokens: none goes on with keys and values of the old weights.
        await self._alive(self._llm.reset_prefix_cache(reset_running_requests=True))
        await self._alive(self._llm.update_weight_version(str(version)))
        self._version, self._dtypes, self._update = version, update.dtypes(), None
        if update.resume_after:
            await self.resume()

    async def weight_checksums(self) -> dict[str, str]:
        """Of what the workers hold and compute with: fused and sharded parameters are taken apart and put together again, and
        matrices that a CPU keeps packed are read back through the kernel that uses them (see `held_weights`).

        In the dtype of the last update's tensors (before the first one, in the engine's): where the engine keeps fewer bits than it
        was sent, the checksums differ.
        """
        if self._update is not None and self._update.arrived:
            raise RuntimeError("a weight update is under way: the engine holds parts of two sets of weights")
        sums: dict[str, str] = (await self._call_workers("roll_lite_checksums", self._dtypes))[0]
        assert sums.keys() == self._shapes.keys(), f"held and checkpoint differ: {sorted(sums.keys() ^ self._shapes.keys())[:5]}"
        return sums

    # ------------------------------------------------------------ liveness

    @property
    def _llm(self) -> AsyncLLM:
        self._require_alive()
        assert self._engine is not None
        return self._engine

    def _check(self) -> str | None:
        """Why the engine cannot serve, or None."""
        if self._failure is None and self._engine is not None and (compat.is_dead(self._engine) or not self._processes.running()):
            self._failure = "the engine's process died"
        return self._failure

    def _require_alive(self) -> None:
        failure = self._check()
        if failure is not None:
            raise EngineDead(f"vLLM engine: {failure}")

    def _require_update(self) -> WeightUpdate:
        self._require_alive()
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

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self._alive(self._llm.collective_rpc(method, args=args))
        except EngineDead:
            raise
        except Exception as error:  # vLLM passes on only the text of what a worker raised
            raise TransferError(f"{method}: {error}") from error

    async def _alive(self, call: Coroutine[Any, Any, T]) -> T:
        """Await an engine call, which vLLM leaves waiting for ever when its process dies."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LIVENESS_POLL_S)
                if not task.done():
                    self._require_alive()
            return task.result()
        finally:
            task.cancel()
