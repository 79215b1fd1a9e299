"""Run an SGLang engine in a separate process: an exception in its scheduler kills the launching process.

Run as `python -m roll_lite.distributed.strategy.sglang.compat.server FD` in its own session; FD: the channel's file descriptor.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from roll_lite.config.schema.models import SglangStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest, VersionSpan
from roll_lite.distributed.session_guard import remove_folder
from roll_lite.distributed.strategy.base import PauseMode, RequestProgress
from roll_lite.distributed.strategy.inference.answers import values
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.strategy.inference.processes import end_group_with_host_or_leader, kill_all
from roll_lite.distributed.strategy.inference.scratch import SCRATCH, name_semaphores
from roll_lite.distributed.strategy.sglang.compat.channel import Closed, PickleChannel, Start
from roll_lite.distributed.strategy.sglang.compat.requests import completion, generate_input, new_tokens
from roll_lite.distributed.strategy.sglang.compat.settings import (
    check_cache,
    engine_arguments,
    keep_files_in,
    node_arguments,
)
from roll_lite.models.hf_config import read_hf_config

_FLUSH_POLL_S = 0.01
_FLUSH_TIMEOUT_S = 30.0


_TAGS = {EngineMemory.WEIGHTS: ["weights"], EngineMemory.KV_CACHE: ["kv_cache", "cuda_graph"]}


def _tags(parts: Collection[EngineMemory]) -> list[str]:
    return [tag for part in parts for tag in _TAGS[part]]


def launch(start: Start) -> Any:
    """Launch an engine, or this node's part of a multi-node one. The first node has the tokenizer manager."""
    from sglang.srt.entrypoints.engine import Engine

    from roll_lite.distributed.strategy.sglang.compat.scheduler import run_scheduler

    spec, strategy = start.spec, start.spec.strategy
    assert isinstance(strategy, SglangStrategyConfig)

    class RolloutEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    arguments = engine_arguments(spec.model, strategy, spec.max_model_len, spec.seed, start.cuda, spec.lora, spec.sleep)
    engine = RolloutEngine(**arguments | {"enable_return_routed_experts": spec.reports_experts} | node_arguments(spec.node))
    scheduler = engine._scheduler_init_result.scheduler_infos[0]
    cache = scheduler["max_total_num_tokens"], scheduler["page_size"]
    try:
        check_cache(spec.model, strategy, spec.max_model_len, start.cuda, *cache)
    except ValueError:
        end(engine)
        raise
    return engine


@dataclass
class _Running:
    number: int
    request: GenerationRequest
    versions: list[VersionSpan]
    aborted: bool = False
    dispatched: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once SGLang's scheduler has the request, or it has ended."""

    @property
    def rid(self) -> str:
        return f"{self.number}/"  # no rid may be a prefix of another


class EngineServer:
    def __init__(self, engine: Any, start: Start, channel: PickleChannel) -> None:
        self._engine, self._manager = engine, engine.tokenizer_manager
        self._spec = start.spec
        self._channel = channel
        self._answer = Path(start.scratch) / "answer.json"
        self._vocabulary = int(self._manager.model_config.vocab_size)
        self._experts = read_hf_config(start.spec.model.path).experts if start.spec.reports_experts else None
        self._version = "0"
        self._running: dict[str, _Running] = {}
        self._empty = asyncio.Condition()
        self._paused = False
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._send_to_scheduler, self._manager._send_one_request = self._manager._send_one_request, self._dispatch
        self._commands: dict[str, Callable[..., Awaitable[Any]]] = {
            "pause": self.pause,
            "resume": self.resume,
            "workers": self.call_workers,
            "new_weights": self.new_weights,
            "load": self.load,
            "offload": self.offload,
        }

    async def serve(self) -> None:
        """Execute the parent's commands; raise Closed when it closes the channel or ends."""
        while True:
            match await self._channel.receive():
                case "generate", number, request:
                    running = _Running(number, request, [VersionSpan(0, int(self._version))])
                    self._running[running.rid] = running
                    self._start(self._generate(running))
                case "abort", numbers:
                    self._start(self.abort(set(numbers)))
                case "progress", call, since, parts:
                    self._channel.send((call, True, self._progress(since, parts)))
                case "scheduler", call:
                    self._start(self._reply(call, self._ask_scheduler()))
                case command, call, *arguments:
                    self._start(self._reply(call, self._in_order(self._commands[command](*arguments))))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, call: int, work: Awaitable[Any]) -> None:
        try:
            answer = (True, await work)
        except Exception as error:  # process boundary: the host raises it again
            answer = (False, f"{error}" or type(error).__name__)
        self._channel.send((call, *answer))

    async def _in_order(self, command: Awaitable[Any]) -> Any:
        async with self._order:
            return await command

    async def _ask_scheduler(self) -> None:
        await self._manager.get_internal_state()

    # ------------------------------------------------------------ requests

    async def _generate(self, running: _Running) -> None:
        request = running.request
        try:
            asked = generate_input(request, running.rid, self._spec.max_model_len, self._vocabulary, self._experts is not None)
            output = await anext(self._manager.generate_request(asked, None))
            answer = completion(request, output, self._manager.tokenizer, running.aborted, self._experts)
        except Exception as error:  # only this request fails, whatever the error
            answer = Completion(request.request_id, error=f"{type(error).__name__}: {error}")
        running.dispatched.set()
        self._channel.send((running.number, True, answer))
        async with self._empty:
            del self._running[running.rid]
            self._empty.notify_all()

    async def _dispatch(self, tokenized: Any) -> None:
        """Send a request to SGLang's scheduler, then set `dispatched`, for which an abort waits."""
        await self._send_to_scheduler(tokenized)
        if tokenized.rid in self._running:
            self._running[tokenized.rid].dispatched.set()

    async def _all_dispatched(self) -> None:
        for running in list(self._running.values()):
            await running.dispatched.wait()

    def _progress(self, since: dict[int, int], parts: bool) -> dict[int, RequestProgress]:
        """Return {request number: progress}. `since`: {request number: tokens already reported}. `parts`: with newer tokens."""
        found = {}
        for running in self._running.values():
            # SGLang reports non-streamed requests every 50 tokens.
            state = self._manager.rid_to_state.get(running.rid)
            if running.number in since and state is not None and state.output_ids:
                part = new_tokens(running.request, state, since[running.number], running.versions) if parts else None
                found[running.number] = RequestProgress(len(state.output_ids), part)
        return found

    async def abort(self, numbers: set[int]) -> None:
        for running in [running for running in self._running.values() if running.number in numbers]:
            running.aborted = True
            await running.dispatched.wait()
            self._manager.abort_request(running.rid)

    # ------------------------------------------------------------ pause

    async def pause(self, mode: PauseMode) -> None:
        """Pause the scheduler. After SGLang's own `pause_generation`, waiting requests would enter in no fixed order."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode is PauseMode.ABORT:
            before = dict(self._running)
            await self.abort({running.number for running in before.values()})
            async with self._empty:
                await self._empty.wait_for(lambda: not before.keys() & self._running.keys())
        await self._all_dispatched()
        # `retract` re-queues running requests; on resume they are recomputed from their tokens.
        await self._manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="retract"))
        # Messages are answered in order: an answer to this one, which changes nothing, means that the scheduler has stopped.
        await self._set_version(self._version)
        self._paused = True

    async def resume(self) -> None:
        if self._paused:
            from sglang.srt.managers.io_struct import ContinueGenerationReqInput

            await self._all_dispatched()
            await self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
            self._paused = False

    # ------------------------------------------------------------ weights, memory

    async def new_weights(self, version: str) -> None:
        await self._flush()
        (lengths, *_) = values(await self.call_workers("roll_lite_lengths", {}))
        await self._set_version(version)
        for running in self._running.values():
            length = lengths.get(running.rid, 0)
            running.versions = [*(span for span in running.versions if span.start < length), VersionSpan(length, int(version))]

    async def _set_version(self, version: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False))
        self._version = version

    async def call_workers(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call a RolloutScheduler method on all workers, in a thread, since it may wait for a trainer."""
        answer = self._answer
        answer.unlink(missing_ok=True)
        try:
            await asyncio.to_thread(lambda: self._engine.collective_rpc(method, answer=str(answer), **arguments))
        except AssertionError as error:
            raise RuntimeError(str(error)) from error
        return json.loads(answer.read_text(encoding="utf-8"))

    async def _flush(self) -> None:
        deadline = asyncio.get_running_loop().time() + _FLUSH_TIMEOUT_S
        while not (await self._manager.flush_cache()).success:
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"the engine was not idle within {_FLUSH_TIMEOUT_S:g} s: its cache cannot be cleared")
            await asyncio.sleep(_FLUSH_POLL_S)

    async def offload(self, parts: Collection[EngineMemory]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._flush()
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=_tags(parts)), None)

    async def load(self, parts: Collection[EngineMemory]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=_tags(parts)), None)


def end(engine: Any) -> None:
    atexit.unregister(engine.shutdown)
    if engine.tokenizer_manager is not None:
        engine.tokenizer_manager._subprocess_watchdog.stop()
    kill_all(psutil.Process().children(recursive=True))


async def _serve(channel: PickleChannel, start: Start, engine: Any) -> None:
    pids = list(engine.get_all_child_pids())
    if start.spec.node is not None and start.spec.node.number > 0:  # the first node calls this node's schedulers
        channel.send(("ready", pids))
        await channel.receive()  # no message comes; raises Closed when the host ends
        raise Closed
    # Freeze imported objects: SGLang collects garbage whenever it clears its cache, at every weight update.
    await engine.tokenizer_manager.freeze_gc()
    channel.send(("ready", pids))
    await EngineServer(engine, start, channel).serve()


def main() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    channel = loop.run_until_complete(PickleChannel.over(socket.socket(fileno=int(sys.argv[1]))))
    start = loop.run_until_complete(channel.receive())
    try:
        engine = launch(start)
    except Exception as error:  # process boundary: the host raises it again
        channel.send(("failed", str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"))
        loop.run_until_complete(asyncio.sleep(0.1))
        raise
    try:
        loop.run_until_complete(_serve(channel, start, engine))
    except Closed:
        end(engine)
        remove_folder(Path(start.scratch))
        os._exit(0)  # does not wait for unread sockets


if __name__ in ("__main__", "__mp_main__"):
    # Also in SGLang's own processes, where spawn imports this module.
    end_group_with_host_or_leader()
    name_semaphores()
    if not torch.cuda.is_available():
        from roll_lite.distributed.strategy.sglang.compat import cpu_stubs

        cpu_stubs.install()
    keep_files_in(Path(os.environ[SCRATCH]))
if __name__ == "__main__":
    main()
