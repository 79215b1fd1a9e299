from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from roll_lite.config.keep_mask import keep_mask_width
from roll_lite.config.schema.models import VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import EngineSpec, PauseMode, RequestProgress
from roll_lite.distributed.strategy.inference.answers import values
from roll_lite.distributed.strategy.inference.life import EngineDead, EngineMemory
from roll_lite.distributed.strategy.inference.processes import HOST_PID, EngineProcesses
from roll_lite.distributed.strategy.inference.requests import InFlight
from roll_lite.distributed.strategy.inference.scratch import Scratch
from roll_lite.distributed.strategy.vllm.compat import settings
from roll_lite.distributed.strategy.vllm.compat.requests import (
    adapters_request,
    completion,
    new_tokens,
    prompt_input,
    restore_stop_overlap,
    sampling_params,
)
from roll_lite.models.hf_config import HfConfig

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

_LAST_S = 3.0  # seconds that vLLM gets for a clean shutdown


def engine_args(spec: EngineSpec, cuda: bool) -> AsyncEngineArgs:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert isinstance(spec.strategy, VllmStrategyConfig)
    arguments = settings.engine_arguments(spec.model, spec.strategy, spec.max_model_len, spec.seed, cuda, spec.lora)
    return AsyncEngineArgs(**arguments, **settings.node_arguments(spec.node), enable_return_routed_experts=spec.reports_experts)


class VllmProcesses:
    name = "vLLM"

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.cuda = torch.cuda.is_available()
        self._environment = settings.engine_environment(spec.threads, self.cuda, spec.node)
        self._scratch: Scratch | None = None

    def check_version(self) -> str:
        return settings.check_version()

    def _set_environment(self) -> None:
        os.environ.update(self._environment.variables() | {HOST_PID: str(os.getpid())})

    @contextmanager
    def _inherited(self) -> Iterator[None]:
        self._set_environment()
        self._scratch = Scratch("rl-vllm-", settings.SOCKETS)
        with self._scratch.inherited():
            yield

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()


class VllmEngine(VllmProcesses):
    """vLLM engine, or the first node's part of a multi-node one. After its death, calls except `generate` and `abort` never return."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        assert isinstance(spec.strategy, VllmStrategyConfig)
        self.notes = settings.notes(spec.strategy, spec.max_model_len, self.cuda, self._environment)
        self._running: AsyncLLM | None = None

    # ------------------------------------------------------------ life

    async def preload(self) -> None:
        self._set_environment()
        await asyncio.to_thread(import_module, "vllm.v1.engine.async_llm")

    async def start(self) -> list[int]:
        """Start the engine. Blocks the event loop: processes belong to the thread that starts them."""
        with self._inherited():
            self._running = self._start()
        restore_stop_overlap(self._running.output_processor)
        config = self._llm.model_config.hf_config.get_text_config()
        self._vocabulary, self._tied = int(config.vocab_size), bool(config.tie_word_embeddings)
        self._tokenizer = self._llm.get_tokenizer()
        self._adapters = adapters_request() if self._spec.lora is not None else None
        manager = self._llm.engine_core.resources.engine_manager
        return [process.pid for process in manager.processes if process.pid is not None] if manager is not None else []

    def _start(self) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(engine_args(self._spec, self.cuda))

    async def prepare(self, config: HfConfig) -> None:
        read = (self._vocabulary, self._tied)
        if read != (config.vocab_size, config.tied_embeddings):
            # e.g. with an override in engine_args
            raise ValueError(
                f"vLLM has another model than {self._spec.model.path / 'config.json'}: vocabulary and tied embeddings are {read}"
            )
        self._experts = config.experts if self._spec.reports_experts else None
        # Once this answer is cached, requests enter in the order in which they were submitted.
        await self._llm.get_supported_tasks()
        await self._set_version(0)

    def is_dead(self) -> bool:
        return self._running is not None and bool(self._running.errored)

    async def answered(self) -> object:
        return await self._llm.get_weight_version()

    async def stop(self, processes: EngineProcesses) -> None:
        llm, self._running = self._running, None
        if llm is not None:
            if llm.output_handler is not None:
                # vLLM's listener would report the engine's end as a crash.
                llm.output_handler.cancel()
            await processes.end(lambda: llm.shutdown(timeout=_LAST_S))
        self._remove_scratch()

    @property
    def _llm(self) -> AsyncLLM:
        if self._running is None:
            raise EngineDead("vLLM engine: shut down")
        return self._running

    # ------------------------------------------------------------ requests

    async def run(self, flight: InFlight) -> Completion:
        request = flight.request
        alternatives = self._alternatives(request)
        params = sampling_params(request, alternatives or 0)
        prompt = prompt_input(request.prompt_ids)
        async for output in self._llm.generate(prompt, params, request.request_id, lora_request=self._adapters):
            if output.finished:
                return completion(request, output, self._tokenizer, flight.version, alternatives, self._experts)
        return Completion(request.request_id, error="vLLM ended the request without an output")

    def _alternatives(self, request: GenerationRequest) -> int | None:
        """Return how many likeliest tokens' log-probs to request for `kept_ids`: 0 for greedy decoding, None without `keep_mask`."""
        sampling = request.sampling
        if not sampling.keep_mask:
            return None
        return keep_mask_width(sampling, self._vocabulary) if sampling.temperature > 0 else 0

    async def progress(self, flights: Sequence[InFlight], parts: bool) -> list[RequestProgress | None]:
        return [self._progress(flight, parts) for flight in flights]

    def _progress(self, flight: InFlight, parts: bool) -> RequestProgress | None:
        known = self._llm.output_processor
        own_ids = known.external_req_ids.get(flight.request.request_id, ())
        state = next((known.request_states[own] for own in own_ids if own in known.request_states), None)
        if state is None or state.is_prefilling or state.detokenizer is None:
            return None
        part = new_tokens(flight, state, self._alternatives(flight.request)) if parts else None
        return RequestProgress(state.detokenizer.num_output_tokens(), part)

    async def abort(self, flights: Sequence[InFlight]) -> None:
        await self._llm.abort([flight.request.request_id for flight in flights])

    async def pause(self, mode: PauseMode) -> None:
        await self._llm.pause_generation(mode=mode.value, clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    # ------------------------------------------------------------ weights, memory

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return values(await self._llm.collective_rpc(method, kwargs=arguments))

    async def renew(self, version: int) -> None:
        await self._forget()
        await self._set_version(version)

    async def _set_version(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))

    async def _forget(self) -> None:
        await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def offload(self, parts: Collection[EngineMemory], cache_stays: bool) -> None:
        """Offload by worker calls: vLLM's `wake_up` would resume a paused engine, and cannot offload weights alone. With `cache_stays`, the
        cache is dropped and reallocated. On a CPU, only the cache is freed."""
        if not self.cuda:
            if EngineMemory.KV_CACHE in parts:
                await self._forget()
                await self.call_workers("roll_lite_drop_cache")
            return
        await self._forget()
        if EngineMemory.WEIGHTS not in parts:
            await self._workers("discard", (EngineMemory.KV_CACHE.value,))
            return
        await self._workers("sleep", 2 if self._spec.sleep == "without_copy" else 1)  # level 2 makes no copy of the weights
        if cache_stays:
            await self._workers("wake_up", [EngineMemory.KV_CACHE.value])

    async def load(self, parts: Collection[EngineMemory]) -> None:
        if self.cuda:
            await self._workers("wake_up", [part.value for part in parts])
        elif EngineMemory.KV_CACHE in parts:
            await self.call_workers("roll_lite_make_cache")

    async def _workers(self, method: str, *arguments: Any) -> None:
        await self._llm.collective_rpc(method, args=arguments)


class VllmPart(VllmProcesses):
    """Workers of a vLLM engine on a further node (like `vllm serve --headless`)."""

    _executor: MultiprocExecutor | None = None

    async def start(self) -> list[int]:
        """Start the workers in this thread. Blocks the event loop until all nodes have connected."""
        with self._inherited():
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            config = engine_args(self._spec, self.cuda).create_engine_config(headless=True)
            self._executor = MultiprocExecutor(config, monitor_workers=False)
        return [worker.proc.pid for worker in self._executor.workers]

    async def stop(self, processes: EngineProcesses) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            await processes.end(executor.shutdown)
        self._remove_scratch()
