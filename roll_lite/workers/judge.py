"""Judges that the run starts itself: vLLM's OpenAI-compatible server in a process of its own, started again when it dies."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray

from roll_lite.config.check_endpoints import JUDGE
from roll_lite.config.schema import JudgeServerConfig, RewardConfig
from roll_lite.distributed.worker import AsyncWorker

POLL_SECONDS = 0.25
HEALTH_SECONDS = 5.0


@dataclass(frozen=True)
class JudgeAddress:
    """Where a judge is, for the reward workers."""

    urls: tuple[str, ...]
    model: str
    """Its name in requests."""
    fingerprint: str
    """Changes with whatever may change its answers."""

    @staticmethod
    def of(servers: Sequence[JudgeAddress]) -> JudgeAddress:
        """All servers of one judge."""
        return JudgeAddress(tuple(url for server in servers for url in server.urls), servers[0].model, servers[0].fingerprint)


def with_addresses(reward: RewardConfig, judges: Mapping[str, JudgeAddress]) -> RewardConfig:
    """The reward and its terms, with the addresses of the judges that they name."""

    def known(type_: str, args: dict[str, object]) -> dict[str, object]:
        if type_ != JUDGE or args.get("server") not in judges:
            return args
        judge = judges[str(args["server"])]
        return {**args, "url": list(judge.urls), "model": judge.model, "fingerprint": judge.fingerprint}

    terms = [term.model_copy(update={"args": known(term.type, term.args)}) for term in reward.terms]
    return reward.model_copy(update={"args": known(reward.type, reward.args), "terms": terms})


class JudgeWorker(AsyncWorker):
    """One server. Its port is bound here and stays ours while the server is started, and started again."""

    def __init__(self, config: JudgeServerConfig) -> None:
        super().__init__()
        self._config = config
        self._name = self.role.removeprefix("judges.")
        # Nobody else needs to see it where there is no other node.
        alone = sum(node["Alive"] for node in ray.nodes()) == 1
        self._host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        self._port = reserve_port(self._host)
        self._process: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._given_up: asyncio.Future[None] | None = None
        self._started = 0

    async def address(self) -> JudgeAddress:
        """Known before the server answers there."""
        return JudgeAddress((f"http://{self._host}:{self._port.getsockname()[1]}/v1",), self._name, fingerprint(self._config))

    async def initialize(self) -> None:
        await self._start()
        self._watching = asyncio.create_task(self._watch())

    async def restarts(self) -> int:
        return max(0, self._started - 1)

    async def server_process(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def until_death(self) -> None:  # type: ignore[override]
        """Ends with an error, too, when the server cannot be kept alive: that is the end of the run."""
        self._given_up = self._given_up or asyncio.get_running_loop().create_future()
        await self._given_up

    async def shutdown(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._kill()
        self._port.close()

    # ------------------------------------------------------------ the server

    async def _start(self) -> None:
        import torch

        from roll_lite.distributed.strategy.inference.processes import HOST_PID
        from roll_lite.distributed.strategy.vllm.compat.judge_server import command
        from roll_lite.distributed.strategy.vllm.compat.settings import engine_environment

        port = self._port.getsockname()[1]
        self._started += 1
        cuda = torch.cuda.is_available()
        environment = engine_environment(self._config.threads, None, cuda)
        self._process = subprocess.Popen(  # noqa: ASYNC220 (takes a moment)
            command(self._config, self._host, port, self._name, cuda),
            env=os.environ | environment.variables() | {HOST_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + self._config.start_timeout_s
        while not await self._is_healthy(port):
            code = self._process.poll()
            if code is not None:
                self._kill()
                raise RuntimeError(f"the judge's server ended with exit code {code} while it started; see the root cause above")
            if time.monotonic() > deadline:
                self._kill()
                limit = f"judges.{self._name}.start_timeout_s: {self._config.start_timeout_s:g}"
                raise TimeoutError(f"the judge's server does not answer in time ({limit}); its log is this worker's")
            await asyncio.sleep(POLL_SECONDS)

    async def _watch(self) -> None:
        """Until the server cannot be started again."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            assert self._process is not None
            code = self._process.poll()
            if code is None:
                continue
            self._kill()
            cause = f"the judge's server died (exit code {code})"
            if self._started > self._config.restarts:
                self._give_up(f"{cause}, and was started again {self._config.restarts} time(s) before (judges.{self._name}.restarts)")
                return
            sys.stderr.write(f"{cause}; starting it again\n")
            try:
                await self._start()
            except (RuntimeError, TimeoutError) as error:
                self._give_up(f"{cause}, and could not be started again: {error}")
                return

    def _give_up(self, cause: str) -> None:
        sys.stderr.write(f"{cause}\n")
        self._given_up = self._given_up or asyncio.get_running_loop().create_future()
        self._given_up.set_exception(RuntimeError(cause))

    async def _is_healthy(self, port: int) -> bool:
        import aiohttp

        try:
            async with aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(HEALTH_SECONDS)) as session:
                async with session.get(f"http://{self._host}:{port}/health") as response:
                    return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    def _kill(self) -> None:
        """With everything that it started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def reserve_port(host: str) -> socket.socket:
    """Bound, and never listened on: the system gives the port to nobody, but a server that binds it with SO_REUSEADDR gets it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def fingerprint(config: JudgeServerConfig) -> str:
    """Of the weights' files and of how they are run."""
    parts = [str(config.path), config.dtype, config.strategy.model_dump_json()]
    for file in sorted(config.path.glob("*")):
        stat = file.stat()
        parts.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
