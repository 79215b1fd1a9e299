"""What the configuration can name has an entry in the maths' tables, with the settings as its keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import pytest

from roll_lite.algorithms.losses import POLICY_LOSSES
from roll_lite.config.schema.losses import AdvantageConfig, CustomLossConfig, PolicyLossConfig
from roll_lite.workers.credit import ESTIMATORS

ADVANTAGES, LOSSES = map(get_args, (AdvantageConfig, PolicyLossConfig))


def keywords(function: Callable[..., Any]) -> set[str]:
    """All parameters but the first, which is what is worked on."""
    return set(list(inspect.signature(function).parameters)[1:])


@pytest.mark.parametrize("config", ADVANTAGES)
def test_every_estimator_takes_its_settings(config: Any) -> None:
    assert keywords(ESTIMATORS[config.model_fields["name"].default]) == config.model_fields.keys() - {"name"}


@pytest.mark.parametrize("config", [one for one in LOSSES if one is not CustomLossConfig])
def test_every_policy_loss_takes_its_settings(config: Any) -> None:
    assert keywords(POLICY_LOSSES[config.model_fields["name"].default]) == config.model_fields.keys() - {"name"}


def test_no_entry_is_out_of_reach() -> None:
    assert len(ADVANTAGES) == len(ESTIMATORS) and len(LOSSES) - 1 == len(POLICY_LOSSES)
