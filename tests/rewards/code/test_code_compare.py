"""What counts as the same output: by mode, what was expected, what a program printed."""

from __future__ import annotations

import pytest
from support_cases import cases

from roll_lite.rewards.code.compare import Compare, same_output


@pytest.mark.parametrize(("compare", "expected", "printed", "same"), cases("rewards/output"))
def test_outputs(compare: Compare, expected: str, printed: str, same: bool) -> None:
    assert same_output(expected, printed, compare, 1e-6) is same
