"""What the scheduler needs of the world: engines that generate, rewards that score, prompts in an order; and how they fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from roll_lite.data.samples import Completion, GenerationRequest, Prompt, RewardInput, Score


class RequestFailed(Exception):
    """One generation request failed; another attempt may succeed."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class EngineDead(Exception):
    """An engine is gone, and with it the request; another engine can take it."""

    def __init__(self, engine: str, cause: str) -> None:
        super().__init__(f"engine {engine} died: {cause}")
        self.engine = engine
        self.cause = cause


class NoEngineLeft(RuntimeError):
    """The last engine died."""


class DomainFailed(RuntimeError):
    """A domain yields nothing but failures."""


class EngineClient(Protocol):
    name: str

    async def generate(self, request: GenerationRequest) -> Completion:
        """The finished completion. A failure of the request is in its `error`; raises EngineDead when the engine is gone."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody waits for any more; does not wait for it."""
        ...


class RewardClient(Protocol):
    async def score(self, item: RewardInput) -> Score:
        """Raises rewards.base.RewardFailed; never gives a failure as a score of zero."""
        ...


class PromptSource(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


class PromptSequence(Protocol):
    """A seeded order over the rows of a PromptSource that can be stopped and continued."""

    def next(self) -> tuple[int, int]:
        """(epoch, index)"""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
