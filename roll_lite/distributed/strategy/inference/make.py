"""Interface of an engine make: what vLLM and SGLang each add to `strategy.py`."""

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
        """RuntimeError if the engine is not installed or its version is not supported."""

    async def start(self) -> list[int]:
        """Start, and return the process ids."""
        ...

    async def stop(self, processes: EngineProcesses) -> None:
        """Stop and clean up, however far the start got."""


class EngineMake(EnginePart, Protocol):
    r"""Engine in separate processes. EngineStrategy calls it in allowed states only, and raises EngineDead if it dies during a call.

    Its workers' methods `roll_lite_connect`, `roll_lite_load_bucket`, `roll_lite_put_in_place`, `roll_lite_weights_touched` and
    `roll_lite_checksums` move weights, or adapters alone after `roll_lite_take_adapters`.
    """

    @property
    def notes(self) -> Sequence[str]: ...

    # ------------------------------------------------------------ life

    def is_dead(self) -> bool: ...

    async def prepare(self, config: HfConfig) -> None:
        """Finish the start, once the processes are watched."""

    async def answered(self) -> object:
        """Wait for an answer of the engine's step loop, which answers between two steps, also while paused."""
        ...

    # ------------------------------------------------------------ requests

    async def run(self, flight: InFlight) -> Completion:
        """Run a checked request; cancelling aborts it in the engine."""
        ...

    async def progress(self, flights: Sequence[InFlight], parts: bool) -> Sequence[RequestProgress | None]:
        """Progress of the requests; see `Look` in requests.py."""
        ...

    async def abort(self, flights: Sequence[InFlight]) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    # ------------------------------------------------------------ weights, memory

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method on all workers; returns their answers in order. TransferError if a transfer broke off."""
        ...

    async def renew(self, version: int) -> None:
        """Use new weights: drop cached keys and values of old ones, and give further tokens this version."""

    async def offload(self, parts: Collection[EngineMemory], cache_stays: bool) -> None:
        """Offload parts that are on the device. The engine is paused and idle."""

    async def load(self, parts: Collection[EngineMemory]) -> None:
        """Load parts that are offloaded."""
