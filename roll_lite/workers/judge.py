"""LLM judges of the run: vLLM's OpenAI-compatible server in its own process, restarted when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray

from roll_lite.config.checks.scoring_models import JUDGE
from roll_lite.config.schema.domains import RewardConfig
from roll_lite.config.schema.models import JudgeServerConfig
from roll_lite.distributed.failures import MemberLost
from roll_lite.distributed.fleet import Fleet, Policy
from roll_lite.distributed.liveness import Heartbeat, first_of
from roll_lite.distributed.worker import AsyncWorker, reserve_port

POLL_SECONDS = 0.25
HEALTH_SECONDS = 5.0
"""Interval and timeout of health checks, in seconds."""
SILENCE_SECONDS = 120.0
"""Seconds without an answer after which a server counts as hanging."""
PORT_SECONDS = 30.0
"""Maximum seconds to wait until the server of a lost worker has released its port."""


@dataclass(frozen=True)
class JudgeAddress:
    urls: tuple[str, ...]
    model: str

    @staticmethod
    def of(servers: Sequence[JudgeAddress]) -> JudgeAddress:
        return JudgeAddress(tuple(url for server in servers for url in server.urls), servers[0].model)


def with_addresses(reward: RewardConfig, judges: Mapping[str, JudgeAddress]) -> RewardConfig:

    def known(type_: str, args: dict[str, object]) -> dict[str, object]:
        if type_ != JUDGE or args.get("server") not in judges:
            return args
        judge = judges[str(args["server"])]
        return {**args, "url": list(judge.urls), "model": judge.model}

    terms = [term.model_copy(update={"args": known(term.name, term.args)}) for term in reward.terms]
    return reward.model_copy(update={"args": known(reward.name, reward.args), "terms": terms})


class JudgeServer:
    """Process of a judge's server. It reserves the port, which restarts keep."""

    def __init__(self, name: str, config: JudgeServerConfig) -> None:
        self.name = "the judge's server"
        self.process: subprocess.Popen[bytes] | None = None
        self._served_name = name
        self._config = config
        # Reachable from other nodes only if there are any, lost ones included.
        self._host = "127.0.0.1" if len(ray.nodes()) == 1 else ray.util.get_node_ip_address()
        self._held = reserve_port(self._host)
        self._port: int = self._held.getsockname()[1]

    @property
    def address(self) -> JudgeAddress:
        return JudgeAddress((f"http://{self._host}:{self._port}/v1",), self._served_name)

    async def take_over(self, address: JudgeAddress) -> None:
        """Take over a lost server's address, which reward workers know; on another node, keep the own one."""
        host, port = address.urls[0].removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
        if host != self._host:
            return
        self._held.close()
        end = time.monotonic() + PORT_SECONDS
        while True:
            try:
                self._held = reserve_port(host, int(port))
                break
            except OSError as error:  # the lost worker's server ends within seconds
                if time.monotonic() > end:
                    raise MemberLost(f"{self.name} cannot have its port {port} again: {error}") from None
            await asyncio.sleep(POLL_SECONDS)
        self._port = int(port)

    async def start(self) -> None:
        import torch

        from roll_lite.distributed.strategy.inference.processes import HOST_PID
        from roll_lite.distributed.strategy.vllm.compat.judge_server import command
        from roll_lite.distributed.strategy.vllm.compat.settings import engine_environment

        cuda = torch.cuda.is_available()
        environment = engine_environment(self._config.threads, cuda)
        self.process = subprocess.Popen(  # noqa: ASYNC220 (takes a moment)
            command(self._config, self._host, self._port, self._served_name, cuda),
            env=os.environ | environment.variables() | {HOST_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if (code := await first_of(self._ended(), self._until_healthy())) is not None:
            raise MemberLost(f"{self.name} ended with exit code {code} while it started; see the root cause above")

    async def until_lost(self) -> str:
        heartbeat = Heartbeat(self._until_healthy, SILENCE_SECONDS, HEALTH_SECONDS, POLL_SECONDS)
        code = await first_of(self._ended(), heartbeat.until_silent())
        cause = f"died (exit code {code})" if isinstance(code, int) else f"did not answer for {SILENCE_SECONDS:g} s"
        sys.stderr.write(f"{self.name} {cause}\n")
        return f"{self.name} {cause}"

    async def _ended(self) -> int:
        assert self.process is not None
        while (code := self.process.poll()) is None:  # noqa: ASYNC110 (processes make no events)
            await asyncio.sleep(POLL_SECONDS)
        return code

    async def _until_healthy(self) -> None:
        import httpx2

        while True:
            with suppress(TimeoutError, httpx2.HTTPError, OSError):
                async with asyncio.timeout(HEALTH_SECONDS), httpx2.AsyncClient(trust_env=False) as client:
                    if (await client.get(f"http://{self._host}:{self._port}/health")).status_code == 200:
                        return
            await asyncio.sleep(POLL_SECONDS)

    def kill(self) -> None:
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def close(self) -> None:
        self._held.close()


class JudgeWorker(AsyncWorker):
    def __init__(self, config: JudgeServerConfig) -> None:
        super().__init__()
        self._server = JudgeServer(self.role.removeprefix("judges."), config)
        policy = Policy(config.start_timeout_s, config.restarts, attempts=1, path=self.role)
        self._fleet = Fleet(self.role, [self._server], policy, down=self.tell_end)

    async def address(self) -> JudgeAddress:
        return self._server.address

    async def initialize(self, before: Sequence[JudgeAddress] | None = None) -> None:
        """Start the server. `before`: after a restart, the judge's former addresses by rank; this rank's is kept."""
        if before is not None:
            await self._server.take_over(before[self.rank])
        await self._fleet.start()

    async def restarts(self) -> int:
        return self._fleet.replaced

    async def shutdown(self) -> None:
        self._fleet.close()
        self._server.close()
