"""A running vLLM engine, asked for what a strategy needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from roll_lite.config.schema import ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import EngineMemory, PauseMode
from roll_lite.distributed.strategy.inference.settings import check_engine_args
from roll_lite.distributed.strategy.vllm.compat.requests import completion, prompt_input, sampling_params
from roll_lite.distributed.strategy.vllm.compat.settings import OWN_ARGUMENTS, engine_arguments

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Llm:
    """AsyncLLM. Of its calls only `run` and `abort` come back when the engine's process dies; the others wait for ever."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        config = llm.model_config.hf_config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.tied_embeddings = bool(config.tie_word_embeddings)
        self._tokenizer = llm.get_tokenizer()

    @classmethod
    def start(cls, model: ModelConfig, strategy: VllmStrategyConfig, max_model_len: int, seed: int, cuda: bool) -> Llm:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_engine_args("vLLM", strategy.engine_args, OWN_ARGUMENTS, AsyncEngineArgs.__dataclass_fields__)
        arguments = engine_arguments(model, strategy, max_model_len, seed, cuda)
        return cls(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))

    # ------------------------------------------------------------ life

    def process_ids(self) -> list[int]:
        """Of the engine's own processes (their children not included)."""
        manager = self._llm.engine_core.resources.engine_manager
        return [process.pid for process in manager.processes if process.pid is not None] if manager is not None else []

    def is_dead(self) -> bool:
        return bool(self._llm.errored)

    def stop_listening(self) -> None:
        """Before a shutdown: vLLM's listener takes the end of its engine for a crash and logs it as an error."""
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()

    def shutdown(self, timeout_s: float) -> None:
        self._llm.shutdown(timeout=timeout_s)

    # ------------------------------------------------------------ requests

    async def keep_order(self) -> None:
        """Once this answer is remembered, requests enter in the order of their submission."""
        await self._llm.get_supported_tasks()

    async def run(self, request: GenerationRequest, version: int, alternatives: int | None) -> Completion:
        """`version`, `alternatives`: see `completion`."""
        params = sampling_params(request, alternatives or 0)
        async for output in self._llm.generate(prompt_input(request.prompt_ids), params, request.request_id):
            if output.finished:
                return completion(output, self._tokenizer, version, alternatives)
        return Completion(request.request_id, error="vLLM ended the request without an output")

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._llm.abort(list(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        await self._llm.pause_generation(mode=mode.value, clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    # ------------------------------------------------------------ weights

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Of all workers. What one raises arrives as its text only."""
        return list(await self._llm.collective_rpc(method, args=args))

    async def set_version(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))

    async def forget(self) -> None:
        """Running requests are recomputed from their tokens: none goes on with keys and values of other weights."""
        await self._llm.reset_prefix_cache(reset_running_requests=True)

    # ------------------------------------------------------------ memory

    async def offload(self, parts: Collection[EngineMemory], cache_stays: bool) -> None:
        """The engine is paused and idle. By the workers' own methods: vLLM's `wake_up` would resume a paused engine."""
        await self.forget()
        if EngineMemory.WEIGHTS not in parts:
            await self.call_workers("discard", (EngineMemory.KV_CACHE.value,))
            return
        await self.call_workers("sleep", 1)  # takes the cache along
        if cache_stays:
            await self.load([EngineMemory.KV_CACHE])

    async def load(self, parts: Collection[EngineMemory]) -> None:
        await self.call_workers("wake_up", [part.value for part in parts])
