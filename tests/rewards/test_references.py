"""Reference answers as responses: what each type takes for right."""

from __future__ import annotations

from typing import Any

import pytest

from roll_lite.config.schema import RewardConfig
from roll_lite.data.samples import RewardInput
from roll_lite.rewards.references import no_response, reference_response
from roll_lite.rewards.registry import build_reward


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
        ("code", {"mode": "expression", "must_contain": ["+"]}, "113", "113+0"),
        ("code", {"mode": "expression", "must_contain": ["*", "-"]}, -2.5, "-2.5*1-0"),
    ],
)
def test_answers_as_responses(reward: str, args: dict[str, Any], answer: Any, response: str) -> None:
    assert no_response(reward, args) is None and reference_response(args, answer) == response
    score = build_reward(RewardConfig(type=reward, args=args))(RewardInput("d", "p", response, answer, {}, "stop"))
    assert score.is_correct


@pytest.mark.parametrize("answer", [None, True, {}, [], [["1"]]])
def test_answers_that_are_no_text(answer: Any) -> None:
    assert reference_response({}, answer) is None


def test_types_whose_answers_are_no_responses() -> None:
    assert no_response("code", {}) == "tests" and no_response("instruction", {}) == "constraints"
    assert no_response("code", {"mode": "expression"}) is None
    asked_for = "values, and a response is an expression with '+' and without '0' that is worth one"
    assert no_response("code", {"mode": "expression", "must_contain": ["+"], "forbid": ["0"]}) == asked_for
    assert no_response("package.module.function", {}) is None
