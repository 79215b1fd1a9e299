"""An SGLang engine as a program of its own: an exception in SGLang's scheduler kills the whole tree of processes above it, which must end
here and not in the process that hosts the strategy.

Started as `python -m roll_lite.distributed.strategy.sglang.server FD` in a session of its own; FD is its end of a channel.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from roll_lite.data.samples import Completion, FinishReason, GenerationRequest
from roll_lite.distributed.strategy.base import PauseMode
from roll_lite.distributed.strategy.inference.channel import Channel, Closed
from roll_lite.distributed.strategy.inference.processes import cleans_up, end_group_with_host
from roll_lite.distributed.strategy.sglang import compat
from roll_lite.distributed.strategy.sglang.spec import EngineSpec

_FLUSH_POLL_S = 0.01
_FLUSH_TIMEOUT_S = 30.0
_MEMORY_TAGS = ["kv_cache", "weights"]


@dataclass
class _Running:
    """A request on its way."""

    number: int
    request: GenerationRequest
    aborted: bool = False
    dispatched: asyncio.Event = field(default_factory=asyncio.Event)
    """SGLang's scheduler has it, or it has ended."""

    @property
    def rid(self) -> str:
        return f"{self.number}/"  # no rid may be the beginning of another


class EngineServer:
    """The hosting process's commands, carried out on one engine."""

    def __init__(self, engine: Any, spec: EngineSpec, channel: Channel) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._spec = spec
        self._channel = channel
        self._vocabulary = int(self._manager.model_config.vocab_size)
        self._seeds = random.Random(spec.seed)
        self._running: dict[str, _Running] = {}
        self._held: list[_Running] | None = None
        """Requests that came while the engine is being emptied."""
        self._empty = asyncio.Condition()
        self._paused = False
        self._version = "0"
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch_dispatch()
        self._commands: dict[str, Callable[..., Awaitable[Any]]] = {
            "pause": self.pause,
            "resume": self.resume,
            "workers": self.workers,
            "new_weights": self.new_weights,
            "load": self.load,
            "offload": self.offload,
        }

    async def serve(self) -> None:
        """Until the host is gone."""
        while True:
            command, *arguments = await self._channel.receive()
            if command == "generate":
                self._submit(_Running(*arguments))
            elif command == "abort":
                self._start(self.abort(set(arguments[0])))
            else:
                self._start(self._reply(command, *arguments))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, command: str, call: int, *arguments: Any) -> None:
        """Commands are carried out one after the other."""
        try:
            async with self._order:
                answer = (True, await self._commands[command](*arguments))
        except Exception as error:  # an edge of the process: the host raises it again
            answer = (False, f"{error}" or type(error).__name__)
        self._channel.send(("reply", call, *answer))

    # ------------------------------------------------------------ requests

    def _submit(self, running: _Running) -> None:
        self._running[running.rid] = running
        if self._held is not None:
            self._held.append(running)
        else:
            self._start(self._generate(running))

    async def _generate(self, running: _Running) -> None:
        request = running.request
        try:
            asked = compat.generate_input(request, running.rid, self._seeds.getrandbits(62), self._spec.max_model_len, self._vocabulary)
            output = await anext(self._manager.generate_request(asked, None))
            completion = compat.completion(request, output, self._manager.tokenizer, running.aborted)
        except Exception as error:  # an edge of the process: whatever it was, this one request failed of it
            completion = Completion(request.request_id, error=f"{type(error).__name__}: {error}")
        await self._finish(running, completion)

    async def _finish(self, running: _Running, completion: Completion) -> None:
        running.dispatched.set()
        self._channel.send(("completion", running.number, completion))
        async with self._empty:
            del self._running[running.rid]
            self._empty.notify_all()

    def _watch_dispatch(self) -> None:
        """Note when SGLang hands a request to its scheduler: what is sent there afterwards finds it."""
        send = self._manager._send_one_request

        async def send_and_note(tokenized: Any) -> None:
            await send(tokenized)
            if tokenized.rid in self._running:
                self._running[tokenized.rid].dispatched.set()

        self._manager._send_one_request = send_and_note

    async def _all_dispatched(self) -> None:
        held = {running.rid for running in self._held or ()}
        for running in list(self._running.values()):
            if running.rid not in held:
                await running.dispatched.wait()

    async def abort(self, numbers: set[int]) -> None:
        for running in [running for running in self._running.values() if running.number in numbers]:
            running.aborted = True
            if self._held is not None and running in self._held:
                self._held.remove(running)
                await self._finish(running, Completion(running.request.request_id, finish_reason=FinishReason.ABORT))
                continue
            await running.dispatched.wait()
            self._manager.abort_request(running.rid)

    # ------------------------------------------------------------ pause

    async def pause(self, mode: PauseMode) -> None:
        """Requests that come later reach the scheduler, which holds them: SGLang's own pause would keep them outside, from where they
        enter in no fixed order."""
        if mode is not PauseMode.KEEP:
            await self._drain(abort=mode is PauseMode.ABORT)
        await self._stop_scheduler()
        held, self._held = self._held or [], None
        for running in held:
            self._start(self._generate(running))

    async def _drain(self, abort: bool) -> None:
        """End what runs; what comes meanwhile is held."""
        self._held = []
        if self._paused and not abort:
            await self._continue_scheduler()
        before = set(self._running)
        if abort:
            await self.abort({running.number for running in self._running.values()})
        async with self._empty:
            await self._empty.wait_for(lambda: not before & self._running.keys())

    async def resume(self) -> None:
        if self._paused:
            await self._continue_scheduler()

    async def _stop_scheduler(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._all_dispatched()
        # `retract` puts running requests back into the queue: they are recomputed from their tokens when they go on.
        await self._manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="retract"))
        await self._until_heard()
        self._paused = True

    async def _continue_scheduler(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._all_dispatched()
        await self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
        self._paused = False

    async def _until_heard(self) -> None:
        """The scheduler takes messages in their order, and answers this one, which changes nothing."""
        await self._set_version(self._version)

    async def _set_version(self, version: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False))
        self._version = version

    # ------------------------------------------------------------ weights, memory

    async def workers(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method of RolloutScheduler on all workers. It may wait for a trainer, hence the thread."""
        answer = Path(self._spec.scratch) / "answer.json"
        answer.unlink(missing_ok=True)
        try:
            await asyncio.to_thread(lambda: self._engine.collective_rpc(method, answer=str(answer), **arguments))
        except AssertionError as error:
            raise RuntimeError(str(error)) from error
        return compat.read_answer(answer)

    async def new_weights(self, version: str) -> None:
        """Nobody goes on with keys and values of the old ones. The scheduler is paused, so that its cache can be cleared."""
        await self._flush()
        await self._set_version(version)

    async def _flush(self) -> None:
        """SGLang refuses, in a flag, while a request runs; a release then kills the engine."""
        deadline = asyncio.get_running_loop().time() + _FLUSH_TIMEOUT_S
        while not (await self._manager.flush_cache()).success:
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"the engine was not idle within {_FLUSH_TIMEOUT_S:g} s: its cache cannot be cleared")
            await asyncio.sleep(_FLUSH_POLL_S)

    async def offload(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        paused = self._paused
        await self.pause(PauseMode.ABORT)
        await self._flush()
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(_MEMORY_TAGS)), None)
        self._resume_when_loaded = not paused

    async def load(self) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(_MEMORY_TAGS)), None)
        if self._resume_when_loaded:
            await self.resume()


def start_engine(spec: EngineSpec) -> Any:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import ServerArgs

    from roll_lite.distributed.strategy.sglang.scheduler import run_scheduler

    compat.check_engine_args(spec.strategy, compat.known_arguments(ServerArgs))

    class RolloutEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    engine = RolloutEngine(**compat.engine_arguments(spec.model, spec.strategy, spec.max_model_len, spec.seed, spec.cuda))
    # SGLang leaves this file behind. All who use it have it open by now.
    Path(shm_path_for(engine.port_args.instance_id)).unlink(missing_ok=True)
    return engine


def _stop(engine: Any, scratch: str) -> NoReturn:
    """Not SGLang's own way, which also kills the process that clears shared memory. The host may be gone: its part is done too."""
    engine.tokenizer_manager._subprocess_watchdog.stop()
    for child in psutil.Process().children(recursive=True):
        if not cleans_up(child):
            child.kill()
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)  # without the wait for sockets on which nobody listens


async def _serve(channel: Channel, spec: EngineSpec, engine: Any) -> None:
    # SGLang collects garbage with every clearing of its cache, that is with every update: not what the imports have left.
    await engine.tokenizer_manager.freeze_gc()
    channel.send(("ready", engine.get_all_child_pids()))
    await EngineServer(engine, spec, channel).serve()


async def _first_message(end: socket.socket) -> tuple[Channel, EngineSpec]:
    channel = await Channel.over(end)
    return channel, await channel.receive()


def main() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    channel, spec = loop.run_until_complete(_first_message(socket.socket(fileno=int(sys.argv[1]))))
    try:
        engine = start_engine(spec)
    except (ValueError, RuntimeError) as error:
        channel.send(("failed", str(error)))
        loop.run_until_complete(asyncio.sleep(0.1))
        raise
    try:
        loop.run_until_complete(_serve(channel, spec, engine))
    except Closed:
        _stop(engine, spec.scratch)


if __name__ in ("__main__", "__mp_main__"):
    # In SGLang's own processes too, which spawn imports this module into.
    end_group_with_host()
    if not torch.cuda.is_available():
        from roll_lite.distributed.strategy.sglang import cpu_stubs

        cpu_stubs.install()
if __name__ == "__main__":
    main()
