"""Reference answers as responses: what each type takes for right."""

from __future__ import annotations

from typing import Any

import pytest
from support_rewards import score_of

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import written
from roll_lite.rewards.code.reward import CodeReward
from roll_lite.rewards.registry import build_reward, typed_reward
from roll_lite.rewards.terms import RepetitionReward
from roll_lite.rewards.text.instruction import InstructionReward


@pytest.mark.parametrize(
    ("reward", "args", "answer", "response"),
    [
        ("math", {}, r"\frac{1}{2}", r"\frac{1}{2}"),
        ("math", {"extract": "boxed"}, "2", r"\boxed{2}"),
        ("math", {"extract": "tagged"}, 0.5, "<answer>0.5</answer>"),
        ("exact", {}, ["yes", "Yes"], "yes"),
        ("exact", {}, 12, "12"),
        ("exact", {}, "{braces} stay", "{braces} stay"),
        ("code", {"mode": "expression"}, "3 ", "3 "),
        ("code", {"mode": "expression"}, "aaa", "'aaa'"),
        ("code", {"mode": "expression"}, [1, "a"], "[1, 'a']"),
        ("code", {"mode": "expression"}, True, "True"),
    ],
)
def test_answers_as_responses(reward: str, args: dict[str, Any], answer: Any, response: str) -> None:
    typed = typed_reward(reward, args, "reward")
    assert typed.response_for(answer) == response
    score = score_of(build_reward(RewardConfig(name=reward, args=args)), RewardInput("d", "p", response, answer, {}, "stop"))
    assert score.is_correct


@pytest.mark.parametrize("answer", [None, True, {}, [], [["1"]]])
def test_answers_that_are_no_text(answer: Any) -> None:
    assert written(answer) is None


def test_types_whose_answers_are_no_responses() -> None:
    for reward in (CodeReward(), CodeReward(mode="expression", must_contain=("+",)), InstructionReward(), RepetitionReward()):
        assert reward.response_for("7") is None
