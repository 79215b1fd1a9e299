from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roll_lite.config.schema.domains import FormatConfig, RewardConfig
from roll_lite.config.text_templates import compile_format
from roll_lite.rewards.running.time_limit import limited
from roll_lite.rewards.text import format as subject
from roll_lite.rewards.text.format import FormatCheck, format_check

RUNAWAY = r"(a+)+$"


def check(pattern: str, timeout_s: float = 30.0) -> FormatCheck:
    found = format_check(RewardConfig(name="exact", timeout_s=timeout_s, format=FormatConfig(pattern=pattern)))
    assert found is not None and format_check(RewardConfig(name="exact")) is None
    return found


def test_patterns_match_anywhere_and_over_lines() -> None:
    thinks = check(r"<think>.*</think>")
    assert thinks("well <think>one\ntwo</think> 3") is True
    assert thinks("<think>one") is False
    assert check(r"^\d+$")("12") is True
    assert check(r"^\d+$")("x 12") is False


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "[z-a]", "*", "(?P<1>a)", "a{1,99999999999999999999}", ""])
def test_bad_patterns_are_found_before_anything_starts(pattern: str) -> None:
    with pytest.raises(ValueError, match="regular expression|matches every response"):
        compile_format(pattern)


def test_good_patterns_pass_the_check() -> None:
    assert compile_format(r"^<think>.*?</think>\s*\d+$")


@pytest.mark.parametrize(("timeout_s", "limit"), [(0.4, 0.2), (30.0, 1.0)])
def test_a_runaway_search_ends_at_the_shorter_of_two_limits(monkeypatch: pytest.MonkeyPatch, timeout_s: float, limit: float) -> None:
    limits = []

    def noted(seconds: float, call: Callable[[], Any]) -> Any:
        limits.append(seconds)
        return limited(0.1, call)

    monkeypatch.setattr(subject, "limited", noted)
    assert check(RUNAWAY, timeout_s)("a" * 60 + "b") is False
    assert check(RUNAWAY, timeout_s)("aaa") is True
    assert limits == [limit, limit]
