"""Part of a vLLM engine on a node other than the first: workers that the first node calls."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from roll_lite.distributed.strategy.base import EngineSpec
from roll_lite.distributed.strategy.inference.processes import HOST_PID, EngineProcesses
from roll_lite.distributed.strategy.inference.scratch import Scratch
from roll_lite.distributed.strategy.vllm.compat import settings
from roll_lite.distributed.strategy.vllm.compat.engine import engine_args

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class VllmPart:
    """Workers as `vllm serve --headless` runs them on all nodes but the first."""

    name = "vLLM"

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._cuda = torch.cuda.is_available()
        self._variables = settings.engine_environment(spec.threads, self._cuda, spec.node).variables()
        self._scratch: Scratch | None = None
        self._executor: MultiprocExecutor | None = None

    def check_version(self) -> str:
        return settings.check_version()

    async def start(self) -> list[int]:
        """Start; blocks the event loop until the workers of all nodes have met, because they belong to the starting thread."""
        os.environ.update(self._variables | {HOST_PID: str(os.getpid())})
        self._scratch = Scratch("rl-vllm-", settings.SOCKETS)
        with self._scratch.inherited():
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            config = engine_args(self._spec, self._cuda).create_engine_config(headless=True)
            self._executor = MultiprocExecutor(config, monitor_workers=False)
        return [worker.proc.pid for worker in self._executor.workers]

    def is_dead(self) -> bool:
        return False

    async def stop(self, processes: EngineProcesses) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            await processes.end(executor.shutdown)
        if self._scratch is not None:
            self._scratch.remove()
