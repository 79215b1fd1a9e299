"""What instructions ask for, by the ids and arguments of the data sets that hold them. Each check tells whether a response follows one;
arguments that do not fit are a TypeError or a ValueError."""

from __future__ import annotations

from collections.abc import Callable

from roll_lite.rewards.text.instruction_checks.if_train import IF_TRAIN
from roll_lite.rewards.text.instruction_checks.ifbench_custom import IFBENCH_CUSTOM
from roll_lite.rewards.text.instruction_checks.ifbench_format import IFBENCH_FORMAT
from roll_lite.rewards.text.instruction_checks.ifbench_words import IFBENCH_WORDS
from roll_lite.rewards.text.instruction_checks.ifeval import IFEVAL
from roll_lite.rewards.text.instruction_checks.rlvr_ifeval import RLVR_IFEVAL

IFBENCH = {**IFBENCH_WORDS, **IFBENCH_FORMAT, **IFBENCH_CUSTOM}
CHECKS: dict[str, Callable[..., bool]] = {**IFEVAL, **RLVR_IFEVAL, **IF_TRAIN, **IFBENCH}

__all__ = ["CHECKS", "IFBENCH", "IFEVAL", "IF_TRAIN", "RLVR_IFEVAL"]
