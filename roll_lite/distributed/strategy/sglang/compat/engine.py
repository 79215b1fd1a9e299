from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from roll_lite.config.schema.models import SglangStrategyConfig
from roll_lite.data.samples import Completion
from roll_lite.distributed.strategy.base import EngineSpec, PauseMode, RequestProgress
from roll_lite.distributed.strategy.inference.answers import values
from roll_lite.distributed.strategy.inference.life import EngineDead, EngineMemory
from roll_lite.distributed.strategy.inference.processes import HOST_PID, EngineProcesses, group, kill_all
from roll_lite.distributed.strategy.inference.requests import InFlight
from roll_lite.distributed.strategy.inference.scratch import Scratch
from roll_lite.distributed.strategy.sglang.compat import settings
from roll_lite.distributed.strategy.sglang.compat.channel import Closed, PickleChannel, Start
from roll_lite.distributed.strategy.sglang.compat.settings import logged_error
from roll_lite.models.hf_config import HfConfig

_LAST_S = 3.0  # seconds that the server gets for a clean shutdown
SERVER = "roll_lite.distributed.strategy.sglang.compat.server"


class SglangEngine:
    name = "SGLang"

    def __init__(self, spec: EngineSpec) -> None:
        assert isinstance(spec.strategy, SglangStrategyConfig)
        self._spec = spec
        self.cuda = torch.cuda.is_available()
        environment = settings.engine_environment(spec.threads, self.cuda, spec.strategy.tensor_parallel, spec.node, spec.sleep)
        self._variables = environment.variables()
        self.notes = environment.notes()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._scratch: Scratch | None = None
        self._channel: PickleChannel | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._listening: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    def check_version(self) -> str:
        return settings.check_version()

    async def preload(self) -> None:
        """Do nothing: SGLang runs in the server's process."""

    async def start(self) -> list[int]:
        self._scratch = scratch = Scratch("rl-sgl-")
        ours, theirs = socket.socketpair()
        with scratch.inherited(), theirs:
            self._server = subprocess.Popen(  # noqa: ASYNC220 (quick)
                [sys.executable, "-m", SERVER, str(theirs.fileno())],
                env=os.environ | self._variables | {HOST_PID: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._channel = await PickleChannel.over(ours)
        self._channel.send(Start(self._spec, self.cuda, scratch.path))
        try:
            state, answer = await self._channel.receive()
        except Closed:
            cause = logged_error(Path(scratch.path)) or "for a reason that it has not logged"
            raise EngineDead(f"SGLang engine: its process ended while it started: {cause} (more is in this process's log)") from None
        if state == "failed":
            raise ValueError(answer)
        return [self._server.pid, *answer]

    async def prepare(self, config: HfConfig) -> None:
        self._listening = asyncio.create_task(self._listen())

    def is_dead(self) -> bool:
        ended = self._listening is not None and self._listening.done()
        return ended or (self._server is not None and self._server.poll() is not None)

    async def answered(self) -> object:
        return await self._call("scheduler")

    async def stop(self, processes: EngineProcesses) -> None:
        if self._listening is not None:
            self._listening.cancel()
        if self._channel is not None:
            self._channel.close()  # the server ends when its channel closes
        if processes.all:  # a server that is still starting does not react to a closed channel
            await processes.end(self._wait_for_server)
        server, self._server = self._server, None
        if server is not None:  # only once: the id of its process group may be reused
            left = group(server.pid)
            kill_all(left)
            server.wait()
            psutil.wait_procs(left, _LAST_S)
        if self._scratch is not None:
            self._scratch.remove()

    def _wait_for_server(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._server is not None:
                self._server.wait(_LAST_S)

    # ------------------------------------------------------------ requests

    async def run(self, flight: InFlight) -> Completion:
        flight.number = next(self._numbers)
        try:
            completion: Completion = await self._answer("generate", flight.number, flight.request)
            return completion
        except asyncio.CancelledError:
            await self.abort([flight])
            raise

    async def progress(self, flights: Sequence[InFlight], parts: bool) -> list[RequestProgress | None]:
        found: dict[int, RequestProgress] = await self._call("progress", {flight.number: flight.reported for flight in flights}, parts)
        return [found.get(flight.number) for flight in flights]

    async def abort(self, flights: Sequence[InFlight]) -> None:
        self._send("abort", [flight.number for flight in flights])

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    # ------------------------------------------------------------ weights, memory

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return values(await self._call("workers", method, arguments))

    async def renew(self, version: int) -> None:
        await self._call("new_weights", str(version))

    async def offload(self, parts: Collection[EngineMemory], cache_stays: bool) -> None:
        """Free memory on GPUs; do nothing on a CPU."""
        await self._call("offload", list(parts))

    async def load(self, parts: Collection[EngineMemory]) -> None:
        await self._call("load", list(parts))

    # ------------------------------------------------------------ the channel

    async def _call(self, command: str, *arguments: Any) -> Any:
        return await self._answer(command, next(self._numbers), *arguments)

    async def _answer(self, command: str, number: int, *arguments: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._send(command, number, *arguments)
        try:
            done, answer = await future
        finally:
            del self._waiting[number]
        if not done:
            raise RuntimeError(answer)
        return answer

    def _send(self, *message: Any) -> None:
        assert self._channel is not None
        self._channel.send(message)

    async def _listen(self) -> None:
        assert self._channel is not None
        with contextlib.suppress(Closed):
            while True:
                number, *answer = await self._channel.receive()
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(answer)
