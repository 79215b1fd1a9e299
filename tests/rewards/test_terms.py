"""Terms that combine with any reward: length, repetition, format."""

from __future__ import annotations

from typing import Any

import pytest
from support_cases import cases
from support_rewards import score_of

from roll_lite.config.schema.domains import RewardConfig, RewardTermConfig
from roll_lite.data.samples import RewardInput
from roll_lite.rewards.registry import build_reward
from roll_lite.rewards.terms import LengthReward, RepetitionReward
from roll_lite.rewards.text.format import FormatReward


def item(response: str, answer: Any = None) -> RewardInput:
    return RewardInput("toy", "prompt", response, answer, {}, "stop")


@pytest.mark.parametrize(
    ("response", "args", "value"),
    [
        ("x" * 50, {"target": 50, "width": 10}, 1.0),
        ("x" * 53, {"target": 50, "width": 10}, 0.7),
        ("x" * 45, {"target": 50, "width": 10}, 0.5),
        ("x" * 90, {"target": 50, "width": 10}, 0.0),
        ("x" * 50, {"limit": 50}, 1.0),
        ("", {"limit": 50}, 1.0),
        ("x" * 75, {"limit": 50}, 0.75),
        ("a b c d", {"limit": 2, "width": 4, "unit": "words"}, 0.5),
        ("x" * 25, {}, 0.25),
        ("x" * 250, {}, 1.0),
    ],
)
def test_length(response: str, args: dict[str, Any], value: float) -> None:
    assert LengthReward(**args)(item(response)).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("response", "args", "value"),
    [
        ("a b c d e f", {"n": 2}, 0.0),
        ("a b a b a b", {"n": 2}, 3 / 5),
        ("A b a B", {"n": 1}, 0.5),
        ("a a a a", {"n": 1, "free": 0.5}, 0.5),
        ("a b a", {"n": 1, "free": 0.5}, 0.0),
        ("aaaa", {"n": 2, "unit": "characters"}, 2 / 3),
        ("a b", {"n": 4}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_repetition(response: str, args: dict[str, Any], value: float) -> None:
    assert RepetitionReward(**args)(item(response)).value == pytest.approx(value)


@pytest.mark.parametrize(("preset", "response", "value"), cases("rewards/format_presets"))
def test_presets(preset: Any, response: str, value: int) -> None:
    assert FormatReward(preset=preset)(item(response)).value == value


def test_patterns() -> None:
    assert FormatReward(pattern="^a.b$")(item("a\nb")).value == 1
    assert FormatReward(pattern="^a.b$")(item("ab")).value == 0


def test_terms_combine_with_any_reward() -> None:
    config = RewardConfig(
        name="exact",
        terms=[
            RewardTermConfig(name="length", args={"limit": 3, "width": 4}, weight=0.5),
            RewardTermConfig(name="repetition", args={"n": 1, "unit": "characters"}, weight=-1.0),
            RewardTermConfig(name="format", args={"pattern": "^[a-z]+$"}, weight=0.25),
            RewardTermConfig(name="format", args={"preset": "boxed"}, weight=2.0),
        ],
    )
    score = score_of(build_reward(config), item("aab", "aab"))
    assert score.correct is True
    assert score.value == pytest.approx(1 + 0.5 - 1 / 3 + 0.25)
    assert score.details["base"] == 1.0 and score.details["extracted"] == "aab"
    assert (score.details["length"], score.details["format"], score.details["format_2"]) == (1.0, 1.0, 0.0)
    assert score.details["length.characters"] == 3.0
    wrong = score_of(build_reward(config), item("ab", "aab"))
    assert wrong.correct is False and wrong.value == pytest.approx(0.75)
    with pytest.raises(ValueError, match=r"reward\.terms\.0\.args\.limt = 3: .*did you mean 'limit'"):
        build_reward(RewardConfig(name="exact", terms=[RewardTermConfig(name="length", args={"limt": 3})]))


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("repetition", {"n": 0}, "reward.args.n = 0: expected integer >= 1"),
        ("repetition", {"free": 1.0}, "reward.args.free = 1.0: expected number >= 0 and < 1"),
        ("format", {"pattern": "("}, 'reward.args.pattern = "(": not a regular expression'),
        ("format", {}, "reward.args: give either pattern or preset"),
        ("format", {"pattern": "x", "preset": "boxed"}, "reward.args: give either pattern or preset"),
        ("length", {"width": 0}, "reward.args.width = 0: expected integer >= 1"),
        ("length", {"target": -1}, "reward.args.target = -1: expected integer >= 0 or null"),
        ("length", {"target": 5, "limit": 5}, "reward.args.limit = 5: length takes target or limit, not both"),
        ("choice", {"letters": 99}, "reward.args.letters = 99: expected integer >= 1 and <= 26"),
        ("choice", {"letters": 0}, "reward.args.letters = 0: expected integer >= 1 and <= 26"),
    ],
)
def test_arguments_out_of_range_are_told_before_a_sample_is_scored(name: str, args: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as error:
        build_reward(RewardConfig(name=name, args=args))
    assert str(error.value).startswith(told)
