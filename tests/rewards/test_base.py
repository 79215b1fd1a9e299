"""What becomes of what reward functions return."""

from __future__ import annotations

from typing import Any

import pytest

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed, RewardFunction, to_score

HUGE = 10**400
"""More than a float can hold."""


@pytest.mark.parametrize("result", [HUGE, -HUGE, {"value": HUGE}])
def test_a_number_beyond_floats_is_a_failure_as_infinity_is(result: Any) -> None:
    function = RewardFunction("mine", lambda _: result, {})
    with pytest.raises(RewardFailed, match="which is not finite"):
        function(RewardInput("maths", "prompt", "response", "answer", {}, "stop"))


def test_a_huge_number_among_the_details_is_infinite() -> None:
    assert to_score({"value": 1, "details": {"length": -HUGE}}, "mine").details == {"length": float("-inf")}
