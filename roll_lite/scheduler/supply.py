"""How far ahead of the training prompts are admitted: together with it, or some batches before.

The clock of all of them is the number of batches that have been asked for: whoever asks for one has trained on the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol


class OnSync(StrEnum):
    """What becomes of the responses that engines are generating when new weights come."""

    DRAIN = "drain"
    """They end first; nothing new is sent meanwhile."""
    PAUSE = "pause"
    """The engines stand still for the update, and go on with the new weights and the keys and values that they have."""
    ABORT = "abort"
    """They are interrupted, and go on afterwards from the tokens that they have, on any engine, with keys and values of the new weights."""


class Supply(Protocol):
    @property
    def max_staleness(self) -> int:
        """A group may be trained so many batches after the one in whose time its prompt was admitted."""
        ...

    @property
    def whole_batches(self) -> bool:
        """A batch is generated with one version: where responses end before new weights come, all of its groups do."""
        ...

    def batches(self, asked: int, handed_out: int) -> int:
        """So many batches' prompts, from the first one on, may have been admitted by now."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """The prompts of a batch are admitted when it is asked for; nobody trains meanwhile."""

    max_staleness: int = 0
    whole_batches: ClassVar[bool] = True

    def batches(self, asked: int, handed_out: int) -> int:
        return asked


@dataclass(frozen=True)
class OneStepOff:
    """While one batch is trained, the next one is generated: its prompts are admitted together, when the one before is handed out."""

    max_staleness: int = 1
    whole_batches: ClassVar[bool] = True

    def batches(self, asked: int, handed_out: int) -> int:
        return handed_out + 1 if handed_out else asked


@dataclass(frozen=True)
class Asynchronous:
    """Prompts are admitted one by one as others end, as far ahead as their staleness allows: what has been admitted and not been trained
    never exceeds max_staleness + 1 batches. Bounded so, no group ever becomes too old: it trains in time, or is waited for.
    """

    max_staleness: int = 1
    whole_batches: ClassVar[bool] = False

    def batches(self, asked: int, handed_out: int) -> int:
        return asked + self.max_staleness if asked else 0


SUPPLIES: dict[str, type[Synchronous | OneStepOff | Asynchronous]] = {
    "sync": Synchronous,
    "one_step_off": OneStepOff,
    "async": Asynchronous,
}


@dataclass(frozen=True)
class Pacing:
    """How generation and training take turns."""

    supply: Supply = Synchronous()
    on_sync: OnSync = OnSync.PAUSE
    oversample: float = 1.0
    """So many times the prompts of a batch are admitted for the first one. Of a synchronous supply: the others generate ahead already, and
    what is more than their staleness has room for would be stale again and again."""


SYNCHRONOUS = Pacing()
