"""One vLLM engine: requests in, completions out as they finish, weights replaced in between."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from roll_lite.config.hf_config import HfConfig
from roll_lite.config.keep_mask import keep_mask_width
from roll_lite.config.schema import ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import Capabilities, EngineMemory, PauseMode
from roll_lite.distributed.strategy.inference.engine import EngineDead, EngineStrategy
from roll_lite.distributed.strategy.inference.processes import HOST_PID
from roll_lite.distributed.strategy.inference.scratch import Scratch
from roll_lite.distributed.strategy.vllm.compat import settings
from roll_lite.distributed.strategy.vllm.compat.llm import Llm
from roll_lite.distributed.weight_sync.group import TransferError

T = TypeVar("T")

LIVENESS_POLL_S = 0.25
_LAST_S = 3.0  # for the engine to end what it has started


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
        self._cuda = torch.cuda.is_available()
        self.capabilities = Capabilities(keep_mask=True, frees_memory=self._cuda, pause_modes=frozenset(PauseMode))
        self._engine: Llm | None = None

    # ------------------------------------------------------------ life

    def _check_version(self) -> None:
        settings.check_version()

    async def _launch(self) -> list[int]:
        """Blocks the event loop while the engine starts: its processes belong to the thread that starts them."""
        environment = settings.engine_environment(self._threads, self._devices, self._cuda)
        self.notes = settings.notes(self._strategy, self._max_model_len, self._cuda, environment)
        os.environ.update(environment.variables() | {HOST_PID: str(os.getpid())})
        self._scratch = Scratch("rl-vllm-", settings.SOCKETS)
        with self._scratch.inherited():
            self._engine = Llm.start(self._model, self._strategy, self._max_model_len, self._seed, self._cuda)
        return self._engine.process_ids()

    async def _open(self, config: HfConfig) -> None:
        read = (self._llm.vocabulary, self._llm.tied_embeddings)
        if read != (config.vocab_size, config.tied_embeddings):
            # Where engine_args overrides it, for one.
            raise ValueError(f"vLLM has another model than {self._model.path / 'config.json'}: vocabulary and tied embeddings are {read}")
        await self._alive(self._llm.keep_order())
        await self._alive(self._llm.set_version(self._version))

    async def shutdown(self) -> None:
        self._give_up(self._failure or "shut down")
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop_listening()
            await self._processes.end(lambda: engine.shutdown(_LAST_S))
        if self._scratch is not None:
            self._scratch.remove()

    # ------------------------------------------------------------ requests

    async def _run(self, request: GenerationRequest) -> Completion:
        assert self._engine is not None
        return await self._engine.run(request, self._version, self._alternatives(request))

    def _alternatives(self, request: GenerationRequest) -> int | None:
        """Tokens whose log-probs say which ones survived truncation; None where nobody asks. Greedy decoding knows no truncation."""
        sampling = request.sampling
        if not sampling.keep_mask:
            return None
        return keep_mask_width(sampling, self._vocabulary) if sampling.temperature > 0 else 0

    async def _abort(self, request_ids: Sequence[str]) -> None:
        await self._llm.abort(request_ids)

    async def _pause(self, mode: PauseMode) -> None:
        await self._alive(self._llm.pause(mode))

    async def _resume(self) -> None:
        await self._alive(self._llm.resume())

    # ------------------------------------------------------------ weights

    async def _connect(self, first_member: int, membership: dict[str, Any]) -> None:
        await self._transfer(self._llm.call_workers("roll_lite_connect", first_member, membership))

    async def _load_bucket(self, routes: list[dict[str, Any]]) -> None:
        await self._transfer(self._llm.call_workers("roll_lite_load_bucket", routes))

    async def _weights_touched(self) -> bool:
        return any(await self._transfer(self._llm.call_workers("roll_lite_weights_touched")))

    async def _put_in_place(self, version: int) -> None:
        await self._transfer(self._llm.call_workers("roll_lite_put_in_place"))
        await self._alive(self._llm.forget())
        await self._alive(self._llm.set_version(version))

    async def _checksums(self, dtypes: dict[str, str]) -> dict[str, str]:
        sums: dict[str, str] = (await self._transfer(self._llm.call_workers("roll_lite_checksums", dtypes)))[0]
        return sums

    # ------------------------------------------------------------ memory

    async def _offload(self, parts: Collection[EngineMemory]) -> None:
        if self._cuda:
            await self._alive(self._llm.offload(parts, cache_stays=EngineMemory.KV_CACHE not in self._away | set(parts)))

    async def _load(self, parts: Collection[EngineMemory]) -> None:
        if self._cuda:
            await self._alive(self._llm.load(parts))

    # ------------------------------------------------------------ liveness

    @property
    def _llm(self) -> Llm:
        self._require_alive()
        assert self._engine is not None
        return self._engine

    def _is_dead(self) -> bool:
        return self._engine is not None and self._engine.is_dead()

    async def _transfer(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._alive(call)
        except EngineDead:
            raise
        except Exception as error:  # vLLM passes on only the text of what a worker raised
            raise TransferError(f"weight update: {error}") from error

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
