"""One vLLM engine: requests in, completions out as they finish, weights replaced in between."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from roll_lite.config.keep_mask import keep_mask_width
from roll_lite.config.schema import ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import Capabilities, PauseMode, TransferEndpoint
from roll_lite.distributed.strategy.inference.checkpoint import checkpoint_shapes
from roll_lite.distributed.strategy.inference.engine import EngineDead, EngineStrategy
from roll_lite.distributed.strategy.inference.scratch import Scratch
from roll_lite.distributed.strategy.vllm import compat
from roll_lite.distributed.strategy.vllm.environment import apply_environment, on_cuda
from roll_lite.distributed.weight_sync.transport import TransferError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

LIVENESS_POLL_S = 0.25


class VllmStrategy(EngineStrategy):
    """AsyncLLM, which starts processes of its own for the engine."""

    make = "vLLM"

    def __init__(
        self,
        model: ModelConfig,
        strategy: VllmStrategyConfig,
        max_model_len: int,
        seed: int = 1,
        devices: Sequence[int] | None = None,
        threads: int = 1,
    ) -> None:
        super().__init__(model, strategy, max_model_len, seed, devices, threads)
        self._strategy = strategy
        self._cuda = on_cuda()
        self.capabilities = Capabilities(keep_mask=True, frees_memory=self._cuda, pause_modes=frozenset(PauseMode))
        self._engine: AsyncLLM | None = None

    # ------------------------------------------------------------ life

    async def initialize(self) -> None:
        """Blocks the event loop while the engine starts: its processes belong to the thread that starts them."""
        compat.check_version()
        apply_environment(self._threads, self._devices)
        self._scratch = Scratch("rl-vllm-", "VLLM_RPC_BASE_PATH")
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

    async def load(self) -> None:
        if self._cuda and await self._alive(self._llm.is_sleeping()):
            await self._alive(self._llm.wake_up())

    async def offload(self) -> None:
        """Weights go to host memory, the key/value cache is dropped; running requests end as aborted. Nothing on a CPU."""
        if self._cuda:
            await self._alive(self._llm.sleep(level=1, mode="abort"))

    # ------------------------------------------------------------ requests

    async def _run(self, request: GenerationRequest) -> Completion:
        alternatives = self._alternatives(request)
        params = compat.sampling_params(request, alternatives or 0)
        async for output in self._llm.generate(compat.prompt_input(request.prompt_ids), params, request.request_id):
            if output.finished:
                return compat.completion(output, self._tokenizer, self._version, alternatives)
        return Completion(request.request_id, error="vLLM ended the request without an output")

    def _alternatives(self, request: GenerationRequest) -> int | None:
        """Tokens whose log-probs say which ones survived truncation; None where nobody asks. Greedy decoding knows no truncation."""
        sampling = request.sampling
        if not sampling.keep_mask:
            return None
        return keep_mask_width(sampling, self._vocabulary) if sampling.temperature > 0 else 0

    async def _abort(self, request_ids: Sequence[str]) -> None:
        await self._llm.abort(list(request_ids))

    async def _pause(self, mode: PauseMode) -> None:
        await self._alive(self._llm.pause_generation(mode=mode.value, clear_cache=False))

    async def _resume(self) -> None:
        await self._alive(self._llm.resume_generation())

    # ------------------------------------------------------------ weights

    async def _connect(self, endpoint: TransferEndpoint) -> None:
        await self._call_workers("init_weight_transfer_engine", asdict(endpoint))

    async def _load_bucket(self, bucket: dict[str, Any], first: bool) -> None:
        """A bucket that fails closes vLLM's update."""
        if first:
            await self._call_workers("start_weight_update")
        await self._call_workers("update_weights", bucket)

    async def _weights_touched(self) -> bool:
        return any(await self._call_workers("roll_lite_weights_touched"))

    async def _put_in_place(self, version: int) -> None:
        await self._call_workers("finish_weight_update")
        # Running requests are recomputed from their tokens: none goes on with keys and values of the old weights.
        await self._alive(self._llm.reset_prefix_cache(reset_running_requests=True))
        await self._alive(self._llm.update_weight_version(str(version)))

    async def _checksums(self, dtypes: dict[str, str]) -> dict[str, str]:
        """Matrices that a CPU keeps packed are read back through the kernel that uses them."""
        sums: dict[str, str] = (await self._call_workers("roll_lite_checksums", dtypes))[0]
        return sums

    # ------------------------------------------------------------ liveness

    @property
    def _llm(self) -> AsyncLLM:
        self._require_alive()
        assert self._engine is not None
        return self._engine

    def _is_dead(self) -> bool:
        return self._engine is not None and compat.is_dead(self._engine)

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
