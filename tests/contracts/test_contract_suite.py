"""The suite's own promises: every engine is under it, and none drops out unseen."""

from __future__ import annotations

from importlib import metadata
from typing import get_args

import pytest
from engine_harness import DISTRIBUTIONS, Make, require

from roll_lite.config.schema.models import InferStrategyConfig

MAKES: tuple[Make, ...] = get_args(Make)


def without(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(
    ("ci", "outcome", "said"), [("", pytest.skip.Exception, ""), ("1", pytest.fail.Exception, ".*in CI its tests must not be skipped")]
)
def test_an_engine_that_is_missing_is_skipped_with_the_reason_and_in_ci_a_failure(
    make: Make, ci: str, outcome: type[BaseException], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", without)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=f"{make} is not installed{said}"):
        require(make)


def test_every_engine_of_the_schema_is_under_contract() -> None:
    names = {variant.model_fields["name"].default for variant in get_args(InferStrategyConfig)}
    assert names == set(MAKES) == set(DISTRIBUTIONS)
