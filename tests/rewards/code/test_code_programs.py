"""Programs of the kinds that public data sets hold: what is right passes however it reads, writes and ends, and what is wrong does not."""

from __future__ import annotations

from typing import Any

import pytest
from rewards.code.test_code_asserts import verdict
from support_cases import cases

MUCH = {"at once": ("print('\\n'.join(map(str, range(100_000))))", 100_000), "bit by bit": ("for i in range(30_000): print(i)", 30_000)}


@pytest.mark.parametrize(("program", "stdin", "stdout"), cases("rewards/programs_printing"))
def test_it_prints_what_it_has_to(program: str, stdin: str, stdout: str) -> None:
    assert verdict(f"```python\n{program}\n```", [{"stdin": stdin, "stdout": stdout}]) == "passed"


@pytest.mark.parametrize("how", MUCH)
def test_it_prints_much(how: str) -> None:
    program, numbers = MUCH[how]
    assert verdict(f"```python\n{program}\n```", [{"stdin": "", "stdout": "\n".join(map(str, range(numbers)))}]) == "passed"


@pytest.mark.parametrize(("program", "tests"), cases("rewards/programs_returning"))
def test_it_returns_what_it_has_to(program: str, tests: list[dict[str, Any]]) -> None:
    assert verdict(program, tests, {"fn_name": "f"}) == "passed"


@pytest.mark.parametrize(("program", "tests"), cases("rewards/programs_wrong"))
def test_it_returns_something_else(program: str, tests: list[dict[str, Any]]) -> None:
    said = verdict(program, tests, {"fn_name": "f"}, test_s=1.0)
    assert said != "passed" and not said.startswith("cause"), said
