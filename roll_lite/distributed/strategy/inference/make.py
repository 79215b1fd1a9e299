"""What a make of engine adds to what all engines have in common (`engine.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from roll_lite.config.hf_config import HfConfig
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import EngineMemory, PauseMode
from roll_lite.distributed.strategy.inference.processes import EngineProcesses


class EnginePart(Protocol):
    """The processes that an engine has on one node."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def check_version(self) -> object:
        """RuntimeError where the engine is not installed, or in a version that is not supported."""

    async def start(self) -> list[int]:
        """Process ids of what has been started."""
        ...

    def is_dead(self) -> bool: ...

    async def stop(self, processes: EngineProcesses) -> None:
        """Nothing of it stays behind, whatever had been started."""


class EngineMake(EnginePart, Protocol):
    """One engine in processes of its own. Calls come in an order that an engine allows; those that never come back when it dies raise
    EngineDead instead. In its workers, methods `roll_lite_connect`, `roll_lite_load_bucket`, `roll_lite_put_in_place`,
    `roll_lite_weights_touched` and `roll_lite_checksums` move weights, or adapters alone after `roll_lite_take_adapters`."""

    @property
    def notes(self) -> Sequence[str]:
        """See InferenceStrategy."""
        ...

    # ------------------------------------------------------------ life

    async def prepare(self, config: HfConfig) -> None:
        """The engine runs and is watched: what is left to do before it serves."""

    async def answered(self) -> object:
        """Done when the loop that takes the engine's steps has answered, between two of them; also while it is paused."""
        ...

    def give_up(self, why: str) -> None:
        """The engine will not answer any more: fail whatever waits for it."""

    # ------------------------------------------------------------ requests

    async def run(self, request: GenerationRequest, version: int) -> Completion:
        """A request that nothing speaks against. Cancelled, it is aborted in the engine. `version`: of the weights."""
        ...

    def generated(self, request_ids: Collection[str]) -> Mapping[str, int]:
        """See InferenceStrategy."""
        ...

    async def grown(self, since: Mapping[str, int]) -> list[Completion]:
        """See InferenceStrategy."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    # ------------------------------------------------------------ weights, memory

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Of all workers, in their order. TransferError where a transfer broke off."""
        ...

    async def renew(self, version: int) -> None:
        """New weights are in place: no keys and values of old ones stay, and tokens carry the version from now on."""

    async def offload(self, parts: Collection[EngineMemory], cache_stays: bool) -> None:
        """Parts that are there. The engine is paused and runs nothing."""

    async def load(self, parts: Collection[EngineMemory]) -> None:
        """Parts that are away."""
