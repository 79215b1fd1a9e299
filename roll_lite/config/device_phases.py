"""Tensors (weights, optimizer, KV cache, ...) of each role on its devices in each phase.

Before generation, engines load weights beside the trainer's; the trainer sends and offloads its own; then engines allocate the KV cache.
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
    """{role: names of its tensors on the device}, in the order of loading. A role whose devices are taken waits while later roles load."""
    in_turns: bool = False
    """True: roles with `offload` that share a device take turns on it: load, work, offload."""
    of_step: bool = True


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


def startable(waiting: Sequence[T], present: Sequence[T], exclude: Callable[[T, T], bool]) -> list[T]:
    """Choose `waiting` roles that can be loaded beside the `present` ones and each other. `exclude`: True for two roles that cannot."""
    starting: list[T] = []
    for one in waiting:
        if not any(exclude(one, other) for other in (*present, *starting)):
            starting.append(one)
    return starting


def kind(role: str) -> str:
    return role.partition(".")[0]
