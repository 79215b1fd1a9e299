"""One SGLang engine behind a process of its own: requests in, completions out as they finish, weights replaced in between."""

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

from roll_lite.config.hf_config import HfConfig
from roll_lite.config.schema import ModelConfig, SglangStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import Capabilities, EngineMemory, PauseMode
from roll_lite.distributed.strategy.inference.channel import Channel, Closed
from roll_lite.distributed.strategy.inference.engine import DIED, EngineDead, EngineStrategy
from roll_lite.distributed.strategy.inference.processes import HOST_PID, group, kill_all
from roll_lite.distributed.strategy.inference.scratch import Scratch
from roll_lite.distributed.strategy.sglang.compat import settings
from roll_lite.distributed.strategy.sglang.compat.files import logged_error
from roll_lite.distributed.strategy.sglang.spec import EngineSpec
from roll_lite.distributed.weight_sync.group import TransferError

LIVENESS_POLL_S = 0.25
_LAST_S = 3.0  # for the server to end what it has started
SERVER = "roll_lite.distributed.strategy.sglang.server"


class SglangStrategy(EngineStrategy):
    """Talks to `server.py`, which runs the engine."""

    make = "SGLang"

    def __init__(
        self,
        model: ModelConfig,
        strategy: SglangStrategyConfig,
        max_model_len: int,
        seed: int = 1,
        devices: Sequence[int] | None = None,
        threads: int = 1,
    ) -> None:
        super().__init__(model, strategy, max_model_len, seed, devices, threads)
        self._strategy = strategy
        self._cuda = torch.cuda.is_available()
        self.capabilities = Capabilities(keep_mask=True, frees_memory=self._cuda, pause_modes=frozenset(PauseMode))
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        """Futures of requests and of calls, by number."""
        self._request_ids: dict[int, str] = {}
        self._channel: Channel | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ life

    def _check_version(self) -> None:
        settings.check_version()

    async def _launch(self) -> list[int]:
        self._scratch = scratch = Scratch("rl-sgl-")
        ours, theirs = socket.socketpair()
        workers = self._strategy.tensor_parallel
        environment = settings.engine_environment(self._threads, self._devices, self._cuda, workers)
        self.notes = environment.notes()
        with scratch.inherited(), theirs:
            self._server = subprocess.Popen(  # noqa: ASYNC220 (takes a moment)
                [sys.executable, "-m", SERVER, str(theirs.fileno())],
                env=os.environ | environment.variables() | {HOST_PID: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._channel = await Channel.over(ours)
        self._channel.send(EngineSpec(self._model, self._strategy, self._max_model_len, self._seed, self._cuda, scratch.path))
        try:
            state, answer = await self._channel.receive()
        except Closed:
            cause = logged_error(Path(scratch.path)) or "for a reason that it has not logged"
            raise EngineDead(f"SGLang engine: its process ended while it started: {cause} (more is in this process's log)") from None
        if state == "failed":
            raise ValueError(answer)
        return [self._server.pid, *answer]

    async def _open(self, config: HfConfig) -> None:
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def shutdown(self) -> None:
        self._give_up(self._failure or "shut down")
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.close()  # the server ends when it hears nothing more
        if self._processes.watched:  # one that is still starting does not listen
            await self._processes.end(self._wait_for_server)
        self._kill_server()
        if self._scratch is not None:
            self._scratch.remove()

    def _wait_for_server(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._server is not None:
                self._server.wait(_LAST_S)

    def _kill_server(self) -> None:
        """And all that it has started, of which some may outlive it. Once: the group's id is free for others afterwards."""
        server, self._server = self._server, None
        if server is not None:
            processes = group(server.pid)
            kill_all(processes)
            server.wait()
            psutil.wait_procs(processes, _LAST_S)

    # ------------------------------------------------------------ requests

    async def _run(self, request: GenerationRequest) -> Completion:
        number = next(self._numbers)
        self._request_ids[number] = request.request_id
        try:
            answer: Completion = await self._answer(number, ("generate", number, request))
            return answer
        except asyncio.CancelledError:
            self._send(("abort", [number]))
            raise
        finally:
            del self._request_ids[number]

    async def _abort(self, request_ids: Sequence[str]) -> None:
        wanted = set(request_ids)
        self._send(("abort", [number for number, request_id in self._request_ids.items() if request_id in wanted]))

    async def _pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode)

    async def _resume(self) -> None:
        await self._call("resume")

    # ------------------------------------------------------------ weights

    async def _connect(self, first_member: int, membership: dict[str, Any]) -> None:
        await self._call_workers("roll_lite_connect", {"first_member": first_member, "membership": membership})

    async def _load_bucket(self, routes: list[dict[str, Any]]) -> None:
        await self._call_workers("roll_lite_load_bucket", {"routes": routes})

    async def _weights_touched(self) -> bool:
        return bool(await self._call_workers("roll_lite_weights_touched", {}))

    async def _put_in_place(self, version: int) -> None:
        await self._call_workers("roll_lite_put_in_place", {})
        await self._call("new_weights", str(version))

    async def _checksums(self, dtypes: dict[str, str]) -> dict[str, str]:
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        sums: dict[str, str] = await self._call_workers("roll_lite_checksums", {"dtypes": dtypes, "shapes": shapes})
        return sums

    # ------------------------------------------------------------ memory

    async def _offload(self, parts: Collection[EngineMemory]) -> None:
        """A CPU engine only notes it."""
        await self._call("offload", list(parts))

    async def _load(self, parts: Collection[EngineMemory]) -> None:
        await self._call("load", list(parts))

    # ------------------------------------------------------------ the channel

    async def _call_workers(self, method: str, arguments: dict[str, Any]) -> Any:
        try:
            return await self._call("workers", method, arguments)
        except EngineDead:
            raise
        except RuntimeError as error:  # SGLang passes on only the text of what a worker raised
            raise TransferError(f"{method}: {error}") from error

    async def _call(self, command: str, *arguments: Any) -> Any:
        self._require_alive()
        number = next(self._numbers)
        done, answer = await self._answer(number, (command, number, *arguments))
        if not done:
            raise RuntimeError(answer)
        return answer

    async def _answer(self, number: int, message: tuple[Any, ...]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._send(message)
        try:
            return await future
        finally:
            del self._waiting[number]

    def _send(self, message: tuple[Any, ...]) -> None:
        assert self._channel is not None
        self._channel.send(message)

    async def _listen(self) -> None:
        assert self._channel is not None
        try:
            while True:
                kind, number, *answer = await self._channel.receive()
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(answer[0] if kind == "completion" else tuple(answer))
        except Closed:
            self._lose()

    async def _watch(self) -> None:
        """SGLang notices only after a while that one of its processes was killed."""
        while True:
            await asyncio.sleep(LIVENESS_POLL_S)
            if self._check() is not None:  # somebody may have asked before, and told nobody who waits
                self._lose()
                break

    def _lose(self) -> None:
        self._fail(self._failure or DIED)

    def _give_up(self, why: str) -> None:
        super()._give_up(why)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDead(f"{self.make} engine: {why}"))

    def _is_dead(self) -> bool:
        return self._server is not None and self._server.poll() is not None
