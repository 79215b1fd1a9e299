"""What the configuration knows of higher layers by name, without importing them, is what those layers know."""

from __future__ import annotations

import inspect
from importlib import import_module

from roll_lite.config.check_rewards import CLOCK, CODE_TOTAL_S, MATH_CPU_LIMIT_S
from roll_lite.config.reward_reference import BUILT_IN_REWARDS
from roll_lite.rewards import code as code_module
from roll_lite.rewards.code import code
from roll_lite.rewards.registry import REWARDS


def test_built_in_rewards_are_the_registrys() -> None:
    assert BUILT_IN_REWARDS.keys() == REWARDS.keys()
    for name, path in BUILT_IN_REWARDS.items():
        module, _, function = path.rpartition(".")
        assert getattr(import_module(module), function) is REWARDS[name]


def test_the_code_rewards_time_limits_are_known() -> None:
    assert inspect.signature(code).parameters["total_s"].default == CODE_TOTAL_S
    assert CLOCK == code_module.CLOCK


def test_the_math_rewards_time_limit_is_known() -> None:
    assert inspect.signature(import_module("roll_lite.rewards.math").math).parameters["cpu_limit_s"].default == MATH_CPU_LIMIT_S
