r"""SGLang engine as a separate program. An exception in SGLang's scheduler kills all processes above it; that must end here and not in
the process that hosts the strategy.

Started as `python -m roll_lite.distributed.strategy.sglang.compat.server FD` in its own session; FD is its end of a channel.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from roll_lite.data.samples import Completion, FinishReason, GenerationRequest
from roll_lite.distributed.session_guard import remove_folder
from roll_lite.distributed.strategy.base import EngineMemory, PauseMode
from roll_lite.distributed.strategy.inference.processes import end_group_with_host_or_leader
from roll_lite.distributed.strategy.inference.scratch import SCRATCH, name_semaphores
from roll_lite.distributed.strategy.sglang.compat.channel import Closed, PickleChannel, Start
from roll_lite.distributed.strategy.sglang.compat.manager import Manager, end, launch
from roll_lite.distributed.strategy.sglang.compat.settings import keep_files_in

_FLUSH_POLL_S = 0.01
_FLUSH_TIMEOUT_S = 30.0
_GENERATED_POLL_S = 0.5


@dataclass
class _Running:
    """Request in progress."""

    number: int
    request: GenerationRequest
    aborted: bool = False
    generated: int = 0
    """Tokens that the host knows of."""
    had_other_weights: bool = False
    """True once it runs under a second set of weights. Versions of its tokens are then known only at its end."""
    dispatched: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when SGLang's scheduler has the request, or it has ended."""

    @property
    def rid(self) -> str:
        return f"{self.number}/"  # no rid may be a prefix of another


class EngineServer:
    """Executor of the hosting process's commands on one engine."""

    def __init__(self, manager: Manager, seed: int, channel: PickleChannel) -> None:
        self._manager = manager
        self._channel = channel
        self._seeds = random.Random(seed)
        self._running: dict[str, _Running] = {}
        self._held: list[_Running] | None = None
        """Requests that arrived while the engine is being emptied."""
        self._empty = asyncio.Condition()
        self._paused = False
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        manager.on_dispatch(self._dispatched)
        self._commands: dict[str, Callable[..., Awaitable[Any]]] = {
            "pause": self.pause,
            "resume": self.resume,
            "workers": manager.call_workers,
            "new_weights": self.new_weights,
            "load": manager.load,
            "offload": self.offload,
        }

    async def serve(self) -> None:
        """Serve until the host is gone."""
        self._start(self._tell_generated())
        while True:
            command, *arguments = await self._channel.receive()
            if command == "generate":
                self._submit(_Running(*arguments))
            elif command == "abort":
                self._start(self.abort(set(arguments[0])))
            elif command == "grown":
                self._tell_grown(*arguments)
            elif command == "scheduler":
                self._start(self._answer_of_scheduler(*arguments))
            else:
                self._start(self._reply(command, *arguments))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, command: str, call: int, *arguments: Any) -> None:
        """Run a command and reply; commands run one after the other."""
        try:
            async with self._order:
                answer = (True, await self._commands[command](*arguments))
        except Exception as error:  # the edge of the process: the host raises it again
            answer = (False, f"{error}" or type(error).__name__)
        self._channel.send(("reply", call, *answer))

    async def _answer_of_scheduler(self, call: int) -> None:
        """Answer for the scheduler, outside of the order of commands."""
        try:
            await self._manager.scheduler_answers()
            answer: tuple[bool, str | None] = (True, None)
        except Exception as error:  # the edge of the process, as above
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
            seed = self._seeds.getrandbits(62)
            completion = await self._manager.generate(request, running.rid, seed, lambda: running.aborted)
        except Exception as error:  # the edge of the process: this one request failed, whatever the error
            completion = Completion(request.request_id, error=f"{type(error).__name__}: {error}")
        await self._finish(running, completion)

    async def _finish(self, running: _Running, completion: Completion) -> None:
        running.dispatched.set()
        self._channel.send(("completion", running.number, completion))
        async with self._empty:
            del self._running[running.rid]
            self._empty.notify_all()

    def _dispatched(self, rid: str) -> None:
        if rid in self._running:
            self._running[rid].dispatched.set()

    async def _all_dispatched(self) -> None:
        held = {running.rid for running in self._held or ()}
        for running in list(self._running.values()):
            if running.rid not in held:
                await running.dispatched.wait()

    async def _tell_generated(self) -> None:
        while True:
            news = {}
            for running in self._running.values():
                if (tokens := self._manager.generated(running.rid)) > running.generated:
                    news[running.number] = running.generated = tokens
            if news:
                self._channel.send(("generated", news))
            await asyncio.sleep(_GENERATED_POLL_S)

    def _tell_grown(self, call: int, since: dict[int, int]) -> None:
        found = []
        for running in self._running.values():
            if running.number in since and not running.had_other_weights:
                found.append(self._manager.grown(running.request, running.rid, since[running.number]))
        self._channel.send(("reply", call, True, [one for one in found if one is not None]))

    async def abort(self, numbers: set[int]) -> None:
        for running in [running for running in self._running.values() if running.number in numbers]:
            running.aborted = True
            if self._held is not None and running in self._held:
                self._held.remove(running)
                await self._finish(running, Completion(running.request.request_id, finish_reason=FinishReason.ABORT))
                continue
            await running.dispatched.wait()
            self._manager.abort(running.rid)

    # ------------------------------------------------------------ pause

    async def pause(self, mode: PauseMode) -> None:
        if mode is not PauseMode.KEEP:
            await self._drain(abort=mode is PauseMode.ABORT)
        await self._stop_scheduler()
        held, self._held = self._held or [], None
        for running in held:
            self._start(self._generate(running))

    async def _drain(self, abort: bool) -> None:
        """End running requests; hold those that arrive meanwhile."""
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
        await self._all_dispatched()
        await self._manager.stop_scheduler()
        self._paused = True

    async def _continue_scheduler(self) -> None:
        await self._all_dispatched()
        await self._manager.continue_scheduler()
        self._paused = False

    # ------------------------------------------------------------ weights, memory

    async def new_weights(self, version: str) -> None:
        """Use new weights: drop cached keys and values of old ones. The scheduler is paused, so that its cache can be cleared."""
        await self._flush()
        for running in self._running.values():
            running.had_other_weights = True
        await self._manager.set_version(version)

    async def _flush(self) -> None:
        deadline = asyncio.get_running_loop().time() + _FLUSH_TIMEOUT_S
        while not await self._manager.flush():
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"the engine was not idle within {_FLUSH_TIMEOUT_S:g} s: its cache cannot be cleared")
            await asyncio.sleep(_FLUSH_POLL_S)

    async def offload(self, parts: Collection[EngineMemory]) -> None:
        await self._flush()
        await self._manager.offload(parts)


def _stop(engine: Any, scratch: str) -> NoReturn:
    """Stop the engine; the host may be gone and cannot do its part."""
    end(engine)
    remove_folder(Path(scratch))
    os._exit(0)  # without waiting for sockets on which nobody listens


async def _serve(channel: PickleChannel, start: Start, engine: Any) -> None:
    pids = list(engine.get_all_child_pids())
    if start.spec.node is not None and start.spec.node.number > 0:  # the first node calls the schedulers of this one
        channel.send(("ready", pids))
        await channel.receive()  # no messages come but the host's end
        raise Closed
    manager = Manager(engine, start)
    await manager.freeze_gc()
    channel.send(("ready", pids))
    await EngineServer(manager, start.spec.seed, channel).serve()


async def _first_message(connection: socket.socket) -> tuple[PickleChannel, Start]:
    channel = await PickleChannel.over(connection)
    return channel, await channel.receive()


def main() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    channel, start = loop.run_until_complete(_first_message(socket.socket(fileno=int(sys.argv[1]))))
    try:
        engine = launch(start)
    except Exception as error:  # the edge of the process: the host raises it again
        channel.send(("failed", str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"))
        loop.run_until_complete(asyncio.sleep(0.1))
        raise
    try:
        loop.run_until_complete(_serve(channel, start, engine))
    except Closed:
        _stop(engine, start.scratch)


if __name__ in ("__main__", "__mp_main__"):
    # In SGLang's own processes too, which spawn imports this module into.
    end_group_with_host_or_leader()
    name_semaphores()
    if not torch.cuda.is_available():
        from roll_lite.distributed.strategy.sglang.compat import cpu_stubs

        cpu_stubs.install()
    keep_files_in(Path(os.environ[SCRATCH]))
if __name__ == "__main__":
    main()
