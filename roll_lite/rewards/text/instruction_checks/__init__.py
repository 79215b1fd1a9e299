"""Checks of whether a response follows an instruction. Ids and arguments have the data sets' names; bad arguments raise TypeError or
ValueError."""

from __future__ import annotations

from collections.abc import Callable

from roll_lite.rewards.text.instruction_checks.if_train import IF_TRAIN
from roll_lite.rewards.text.instruction_checks.ifbench import IFBENCH
from roll_lite.rewards.text.instruction_checks.ifeval import IFEVAL, RLVR_IFEVAL

CHECKS: dict[str, Callable[..., bool]] = {**IFEVAL, **RLVR_IFEVAL, **IF_TRAIN, **IFBENCH}

__all__ = ["CHECKS", "IFBENCH", "IFEVAL", "IF_TRAIN", "RLVR_IFEVAL"]
