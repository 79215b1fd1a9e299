"""Interface that each make of engine (vLLM, SGLang) implements for `strategy.py`."""

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
    """Processes of an engine on one node."""

    @property
    def name(self) -> str: ...

    def check_version(self) -> object:
        """Raise RuntimeError if the engine is not installed or its version is not supported."""

    async def start(self) -> list[int]:
        """Start the processes and return their ids."""
        ...

    async def stop(self, processes: EngineProcesses) -> None:
        """Stop the processes and clean up, even after a partial start."""


class EngineMake(EnginePart, Protocol):
    """Engine (vLLM or SGLang) in separate processes. EngineStrategy calls these methods only when the engine's state allows it, and raises
    EngineDead if the engine dies during a call.

    The engine's workers have methods to receive and read weights (`roll_lite_connect`, `roll_lite_load_bucket`, ...). After
    `roll_lite_take_adapters` they handle only LoRA adapters."""

    @property
    def notes(self) -> Sequence[str]: ...

    # ------------------------------------------------------------ life

    def is_dead(self) -> bool: ...

    async def prepare(self, config: HfConfig) -> None:
        """Finish the start. Called once the processes are monitored, so a crash is noticed."""

    async def answered(self) -> object:
        """Wait until the engine's step loop answers, which it does between two steps, also while paused."""
        ...

    # ------------------------------------------------------------ requests

    async def run(self, flight: InFlight) -> Completion:
        """Run a validated request. Cancelling aborts it in the engine."""
        ...

    async def progress(self, flights: Sequence[InFlight], parts: bool) -> Sequence[RequestProgress | None]:
        """Return the progress of requests; see `Look` in requests.py."""
        ...

    async def abort(self, flights: Sequence[InFlight]) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    # ------------------------------------------------------------ weights, memory

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method on all workers and return their answers in order. Raises TransferError if a weight transfer failed."""
        ...

    async def renew(self, version: int) -> None:
        """Start using new weights: drop the KV cache's contents, and label tokens generated from now on with this version."""

    async def offload(self, parts: Collection[EngineMemory], cache_stays: bool) -> None:
        """Offload parts that are on the device. The engine is paused and has no running requests. `cache_stays`: the KV cache remains on
        the device."""

    async def load(self, parts: Collection[EngineMemory]) -> None:
        """Load parts that are offloaded."""
