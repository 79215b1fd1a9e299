"""Calls into a running SGLang engine for the server, in the engine's own process."""

from __future__ import annotations

import asyncio
import atexit
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil

from roll_lite.config.schema.models import SglangStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import EngineMemory
from roll_lite.distributed.strategy.inference.processes import kill_all
from roll_lite.distributed.strategy.inference.settings import check_engine_args
from roll_lite.distributed.strategy.sglang.compat.channel import Start
from roll_lite.distributed.strategy.sglang.compat.requests import completion, generate_input, grown
from roll_lite.distributed.strategy.sglang.compat.settings import OWN_ARGUMENTS, check_cache, engine_arguments, node_arguments
from roll_lite.models.hf_config import read_hf_config

_TAGS = {EngineMemory.WEIGHTS: "weights", EngineMemory.KV_CACHE: "kv_cache"}


def launch(start: Start) -> Any:
    """Launch an engine, or this node's part of one: only the first part has a tokenizer manager."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    from roll_lite.distributed.strategy.sglang.compat.scheduler import run_scheduler

    spec, strategy = start.spec, start.spec.strategy
    assert isinstance(strategy, SglangStrategyConfig)
    known = getattr(ServerArgs, "__struct_fields__", ()) or getattr(ServerArgs, "__dataclass_fields__", ())
    check_engine_args("SGLang", strategy.engine_args, OWN_ARGUMENTS, list(known))

    class RolloutEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    arguments = engine_arguments(spec.model, strategy, spec.max_model_len, spec.seed, start.cuda, spec.lora)
    engine = RolloutEngine(**arguments | {"enable_return_routed_experts": spec.experts} | node_arguments(spec.node))
    scheduler = engine._scheduler_init_result.scheduler_infos[0]
    cache = scheduler["max_total_num_tokens"], scheduler["page_size"]
    try:
        check_cache(spec.model, strategy, spec.max_model_len, start.cuda, *cache)
    except ValueError:
        end(engine)
        raise
    return engine


class Manager:
    """SGLang's engine and its tokenizer manager, which handles every call."""

    def __init__(self, engine: Any, start: Start) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._max_model_len = start.spec.max_model_len
        self._answer = Path(start.scratch) / "answer.json"
        self._vocabulary = int(self._manager.model_config.vocab_size)
        self._experts = read_hf_config(start.spec.model.path).experts if start.spec.experts else None
        self._version = "0"

    # ------------------------------------------------------------ life

    async def scheduler_answers(self) -> None:
        """Return when the scheduler has answered; it takes messages in every round of its loop."""
        await self._manager.get_internal_state()

    async def freeze_gc(self) -> None:
        """Freeze the imported objects for the garbage collector, which SGLang runs whenever it clears its cache, so at every update."""
        await self._manager.freeze_gc()

    # ------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest, rid: str, seed: int, aborted: Callable[[], bool]) -> Completion:
        """Generate. `rid` must be no prefix of another. `aborted` says, once the request has ended, whether it was aborted on purpose."""
        asked = generate_input(request, rid, seed, self._max_model_len, self._vocabulary, self._experts is not None)
        output = await anext(self._manager.generate_request(asked, None))
        return completion(request, output, self._manager.tokenizer, aborted(), self._experts)

    def on_dispatch(self, dispatched: Callable[[str], None]) -> None:
        """Call `dispatched` with the rid when SGLang hands a request to its scheduler; later messages to the scheduler find it there."""
        send = self._manager._send_one_request

        async def send_and_tell(tokenized: Any) -> None:
            await send(tokenized)
            dispatched(tokenized.rid)

        self._manager._send_one_request = send_and_tell

    def generated(self, rid: str) -> int:
        """Tokens generated so far. SGLang's scheduler reports a request that is not streamed at its first token and every 50 tokens."""
        state = self._manager.rid_to_state.get(rid)
        return 0 if state is None else len(state.output_ids)

    def grown(self, request: GenerationRequest, rid: str, first: int) -> Completion | None:
        """Tokens after the first ones, of a request that has run under one set of weights only."""
        state = self._manager.rid_to_state.get(rid)
        return None if state is None else grown(request, state, first, int(self._version))

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    async def stop_scheduler(self) -> None:
        """Return when the scheduler has stopped. SGLang's own pause would hold later requests outside, and admit them in no fixed order."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        # `retract` puts running requests back into the queue: they are recomputed from their tokens on resume.
        await self._manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="retract"))
        # The scheduler handles messages in order, and answers this one, which changes nothing.
        await self.set_version(self._version)

    async def continue_scheduler(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())

    # ------------------------------------------------------------ weights, memory

    async def call_workers(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method of RolloutScheduler on all workers and collect the answers, in a thread because it may wait for a trainer."""
        answer = self._answer
        answer.unlink(missing_ok=True)
        try:
            await asyncio.to_thread(lambda: self._engine.collective_rpc(method, answer=str(answer), **arguments))
        except AssertionError as error:
            raise RuntimeError(str(error)) from error
        return json.loads(answer.read_text(encoding="utf-8"))

    async def set_version(self, version: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False))
        self._version = version

    async def flush(self) -> bool:
        """Clear the cache. SGLang refuses while a request runs; a release then kills the engine."""
        return bool((await self._manager.flush_cache()).success)

    async def offload(self, parts: Collection[EngineMemory]) -> None:
        """Release the memory of these parts. The cache must be clear."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[_TAGS[part] for part in parts]), None)

    async def load(self, parts: Collection[EngineMemory]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[_TAGS[part] for part in parts]), None)


def end(engine: Any) -> None:
    """End the engine. SGLang's own way also kills the process that clears shared memory, which its watchdog takes for a crash."""
    atexit.unregister(engine.shutdown)
    if engine.tokenizer_manager is not None:
        engine.tokenizer_manager._subprocess_watchdog.stop()
    kill_all(psutil.Process().children(recursive=True))
