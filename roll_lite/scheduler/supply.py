"""Supplies: policies that limit how many batches may have started, given how many training has requested and received."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from roll_lite.config.arithmetic import on_sync_of
from roll_lite.config.schema.domains import RolloutConfig


class OnSync(StrEnum):
    """Treatment of running responses at a weight update."""

    DRAIN = "drain"
    """Running responses finish before the update."""
    PAUSE = "pause"
    """Engines pause, then continue running responses with the new weights."""
    ABORT = "abort"
    """Responses are interrupted and continue from their tokens on any engine."""


class Supply(Protocol):
    @property
    def max_staleness(self) -> int:
        """Maximum batches between a group's admission and its training."""
        ...

    @property
    def whole_batches(self) -> bool:
        """True if batches are generated one at a time."""
        ...

    def batches(self, batches_requested: int, handed_out: int) -> int:
        """Return how many batches may have started once training has requested `batches_requested` and got `handed_out`."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """Starts a batch's prompts when training requests it; training waits."""

    max_staleness: int = 0
    whole_batches: ClassVar[bool] = True

    def batches(self, batches_requested: int, handed_out: int) -> int:
        return batches_requested


@dataclass(frozen=True)
class OneStepOff:
    """Starts a batch's prompts when training receives the batch before it."""

    max_staleness: int = 1
    whole_batches: ClassVar[bool] = True

    def batches(self, batches_requested: int, handed_out: int) -> int:
        return handed_out + 1 if handed_out else batches_requested


@dataclass(frozen=True)
class Asynchronous:
    """Starts new prompts as earlier ones end: at most max_staleness + 1 batches are started but not trained."""

    max_staleness: int = 1
    whole_batches: ClassVar[bool] = False

    def batches(self, batches_requested: int, handed_out: int) -> int:
        return batches_requested + self.max_staleness if batches_requested else 0


SUPPLIES: dict[str, type[Synchronous | OneStepOff | Asynchronous]] = {
    "sync": Synchronous,
    "one_step_off": OneStepOff,
    "async": Asynchronous,
}


@dataclass(frozen=True)
class Pacing:
    supply: Supply = Synchronous()
    on_sync: OnSync = OnSync.PAUSE
    oversample: float = 1.0
    """Prompts started for a batch, as a multiple of its size (`rollout.supply: sync`)."""
    engines_rest: bool = False
    """True if engines are offloaded between batches, after interrupting all responses."""


SYNCHRONOUS = Pacing()


def pacing_of(config: RolloutConfig, engines_rest: bool = False) -> Pacing:
    kind = SUPPLIES[config.supply]
    supply = kind() if config.max_staleness is None else kind(config.max_staleness)
    return Pacing(supply, OnSync(on_sync_of(config, engines_rest)), config.oversample, engines_rest)


LEAST_SHARE = 4
"""Divisor: a log-prob pass during generation starts when 1/LEAST_SHARE of a batch's groups are new since the last pass."""


def least_early(prompts_per_step: int) -> int:
    return -(-prompts_per_step // LEAST_SHARE)
