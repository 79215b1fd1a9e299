from __future__ import annotations

import time

import pytest

from roll_lite.config.checks.rewards import compile_format
from roll_lite.config.schema.domains import FormatConfig, RewardConfig
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.text import format as subject
from roll_lite.rewards.text.format import FormatCheck, format_check

RUNAWAY = r"(a+)+$"


def check(pattern: str, timeout_s: float = 30.0) -> FormatCheck:
    found = format_check(RewardConfig(type="exact", timeout_s=timeout_s, format=FormatConfig(pattern=pattern)))
    assert found is not None and format_check(RewardConfig(type="exact")) is None
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


def test_a_runaway_search_is_a_failure_with_its_cause_and_not_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FINDINGS 6.8, 6.9."""
    monkeypatch.setattr(subject, "FORMAT_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(RewardFailed, match=r"reward exact: time-out: format pattern '\(a\+\)\+\$': more than 0\.2 s of computing"):
        check(RUNAWAY)("a" * 60 + "b")
    assert time.monotonic() - started < 60
    assert check(RUNAWAY)("aaa") is True


def test_the_domains_own_limit_counts_where_it_is_shorter() -> None:
    for timeout_s, limit in ((0.4, "0.2"), (30.0, "1")):
        with pytest.raises(RewardFailed, match=f"more than {limit} s of computing"):
            check(RUNAWAY, timeout_s)("a" * 60 + "b")
