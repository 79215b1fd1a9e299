"""Interface that vLLM and SGLang implement for `strategy.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from roll_lite.data.samples import Completion
from roll_lite.distributed.strategy.base import PauseMode, RequestProgress
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.strategy.inference.processes import EngineProcesses
from roll_lite.distributed.strategy.inference.requests import InFlight
from roll_lite.models.hf_config import HfConfig


class EnginePart(Protocol):
    @property
    def name(self) -> str: ...

    def check_version(self) -> object:
        """Raise RuntimeError if the engine is missing or its version is unsupported."""

    async def start(self) -> list[int]: ...

    async def stop(self, processes: EngineProcesses) -> None:
        """Stop the processes and clean up, even after a partial start."""


class EngineMake(EnginePart, Protocol):
    """vLLM or SGLang in separate processes. EngineStrategy calls its methods in states that allow them (`ALLOWED` in life.py)."""

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def cuda(self) -> bool: ...

    # ------------------------------------------------------------ life

    async def preload(self) -> None:
        """Import the engine's package before `start`; may do nothing."""

    def is_dead(self) -> bool: ...

    async def prepare(self, config: HfConfig) -> None:
        """Finish the start. Crashes of processes are already watched."""

    async def answered(self) -> object:
        """Wait until the engine's step loop answers, which it does between steps, even while paused."""
        ...

    # ------------------------------------------------------------ requests

    async def run(self, flight: InFlight) -> Completion:
        """Run a validated request. Cancelling aborts it."""
        ...

    async def progress(self, flights: Sequence[InFlight], parts: bool) -> Sequence[RequestProgress | None]: ...

    async def abort(self, flights: Sequence[InFlight]) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    # ------------------------------------------------------------ weights, memory

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call all workers. Raise TransferError if a weight transfer failed."""
        ...

    async def renew(self, version: int) -> None:
        """Use new weights: drop the KV cache, and label new tokens with this version."""

    async def offload(self, parts: Collection[EngineMemory], cache_stays: bool) -> None:
        """Offload parts of a paused, idle engine. `cache_stays`: KV memory stays allocated; contents may be lost."""

    async def load(self, parts: Collection[EngineMemory]) -> None:
        """Load offloaded parts."""
