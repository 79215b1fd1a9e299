from __future__ import annotations

import pytest

from roll_lite.config.problems import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("wrong\n  and why"), "wrong"), (ValueError("\n late"), "late"), (TimeoutError(), "TimeoutError"), (KeyError("a"), "'a'")],
    ids=str,
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line
