from __future__ import annotations

from typing import Any

import pytest
from support_cases import cases

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.text.exact import ExactReward


def item(answer: Any, response: str) -> RewardInput:
    return RewardInput("words", "prompt", response, answer, {}, "stop")


@pytest.mark.parametrize(("answer", "response", "args", "value"), cases("rewards/exact"))
def test_judgements(answer: Any, response: str, args: dict[str, bool], value: float) -> None:
    score = ExactReward(**args)(item(answer, response))
    assert score.value == value and score.correct is bool(value)


@pytest.mark.parametrize("answer", [None, True, {"a": 1}, [], ["a", None]])
def test_an_unusable_answer_is_a_failure(answer: Any) -> None:
    with pytest.raises(RewardFailed, match="reward exact: the answer"):
        ExactReward()(item(answer, "a"))


@pytest.mark.parametrize("answer", ["!", "??", " ... ", ["stone", "!"]])
@pytest.mark.parametrize("args", [{}, {"strip": False}, {"contains": True}])
def test_an_answer_of_punctuation_alone_cannot_be_compared_without_it(answer: Any, args: dict[str, bool]) -> None:
    for response in ("", "?", "stone"):
        with pytest.raises(RewardFailed, match="must have something in it that is compared"):
            ExactReward(ignore_punctuation=True, **args)(item(answer, response))
    assert ExactReward()(item("!", "!")).value == 1 and ExactReward()(item("!", "?")).value == 0


@pytest.mark.parametrize("answer", ["", " ", ["stone", ""]])
def test_nothing_is_contained_in_everything(answer: Any) -> None:
    with pytest.raises(RewardFailed, match="must have something in it"):
        ExactReward(contains=True, ignore_punctuation=True)(item(answer, "a"))
