"""What is on the devices when: the one table that runs follow and `roll-lite check` draws.

The parts have the names of `StateGroup` and `EngineMemory`. A role with `offload: true` comes in for a phase with what the table says, and
leaves afterwards, in the order of the table: the engines' weights come in (beside the trainer's), the trainer sends, the trainer leaves,
room is made for keys and values, the engines generate, and leave with both. One without `offload` is there all the time, as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")

WEIGHTS = ("weights",)
TRAINING = ("weights", "gradients", "optimizer")
STORED = ("weights", "optimizer")
SERVING = ("weights", "kv_cache")


class Phase(StrEnum):
    SYNC_WEIGHTS = "sync_weights"
    GENERATE = "generate"
    LOG_PROBS = "log_probs"
    TRAIN = "train"
    CHECKPOINT = "checkpoint"
    FINAL_MODEL = "final_model"
    NEW_REFERENCE = "new_reference"


@dataclass(frozen=True)
class Presence:
    parts: Mapping[str, tuple[str, ...]]
    """Of every role that works in the phase, in the order in which turns are given out: whoever finds its devices free has one, also
    before another that waits for more of them. Several reward models, or judges, are one entry."""
    in_turns: bool = False
    """Roles that share a device and have `offload` are there one after the other; else they are there together."""
    of_step: bool = True
    """Once in every step."""


PHASES: Mapping[Phase, Presence] = {
    Phase.SYNC_WEIGHTS: Presence({"actor_train": WEIGHTS, "actor_infer": WEIGHTS}),
    Phase.GENERATE: Presence({"actor_infer": SERVING, "reward_models": WEIGHTS, "judges": SERVING}),
    Phase.LOG_PROBS: Presence({"reference": WEIGHTS, "actor_train": WEIGHTS, "critic": WEIGHTS}, in_turns=True),
    Phase.TRAIN: Presence({"actor_train": TRAINING, "critic": TRAINING}, in_turns=True),
    Phase.CHECKPOINT: Presence({"actor_train": STORED, "critic": STORED}, in_turns=True, of_step=False),
    Phase.FINAL_MODEL: Presence({"actor_train": WEIGHTS, "critic": WEIGHTS}, in_turns=True, of_step=False),
    Phase.NEW_REFERENCE: Presence({"actor_train": WEIGHTS, "reference": WEIGHTS}, in_turns=True, of_step=False),
}
WHOLE: Mapping[str, tuple[str, ...]] = {
    "actor_train": TRAINING,
    "critic": TRAINING,
    "reference": WEIGHTS,
    "reward_models": WEIGHTS,
    "actor_infer": SERVING,
    "judges": SERVING,
}
"""What is there of a role that stays."""


def startable(waiting: Sequence[T], present: Sequence[T], exclude: Callable[[T, T], bool]) -> list[T]:
    """In turns: those that need not wait for one that is there, nor for one that starts with them."""
    starting: list[T] = []
    for one in waiting:
        if not any(exclude(one, other) for other in (*present, *starting)):
            starting.append(one)
    return starting


def kind(role: str) -> str:
    """The role's entry in these tables."""
    return role.partition(".")[0]
