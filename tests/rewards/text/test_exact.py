from __future__ import annotations

from typing import Any

import pytest

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.text.exact import ExactReward


def item(answer: Any, response: str) -> RewardInput:
    return RewardInput("words", "prompt", response, answer, {}, "stop")


@pytest.mark.parametrize(
    ("answer", "response", "args", "value"),
    [
        ("stone", "stone", {}, 1.0),
        ("stone", " stone\n", {}, 1.0),
        (" stone", "stone", {}, 1.0),
        ("stone", " stone", {"strip": False}, 0.0),
        ("stone", "Stone", {}, 0.0),
        ("straße", "STRASSE", {"ignore_case": True}, 1.0),
        ("a  b", "a b", {}, 0.0),
        ("a  b", "a\nb", {"collapse_spaces": True}, 1.0),
        ("stone", "stones", {}, 0.0),
        (7, "7", {}, 1.0),
        (7, "7.0", {}, 0.0),
        (0.5, "0.5", {}, 1.0),
        (["yes", "y"], "y", {}, 1.0),
        (["yes", "y"], "n", {}, 0.0),
        ("", "", {}, 1.0),
        ("it's so", "Its so!", {"ignore_punctuation": True, "ignore_case": True}, 1.0),
        ("its so", "it's so", {}, 0.0),
        ("stone", "a stone, I think", {"contains": True}, 1.0),
        ("stone", "a Stone, I think", {"contains": True}, 0.0),
        ("北京", "首都是北京。", {"contains": True}, 1.0),
        ("5", "it is 5.", {"contains": True}, 1.0),
        ("5", "it is 15", {"contains": True}, 0.0),
        ("5", "it is -5", {"contains": True}, 0.0),
        ("5", "it is 5.2", {"contains": True}, 0.0),
        ("5", "-5", {"ignore_punctuation": True}, 0.0),
        ("-5", "(-5)!", {"ignore_punctuation": True}, 1.0),
        ("3.14", "314", {"ignore_punctuation": True}, 0.0),
        ("3.14", "3.14.", {"ignore_punctuation": True}, 1.0),
        ("a < b", "a > b", {"ignore_punctuation": True}, 0.0),
        ("a < b", "a < b.", {"ignore_punctuation": True}, 1.0),
        ("5", "$5", {"ignore_punctuation": True}, 1.0),
        ("stone", "<think>stone", {}, 0.0),
        ("stone", "<think>no</think>stone", {}, 1.0),
    ],
)
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
        with pytest.raises(RewardFailed, match="cannot be read: without punctuation nothing is left"):
            ExactReward(ignore_punctuation=True, **args)(item(answer, response))
    assert ExactReward()(item("!", "!")).value == 1 and ExactReward()(item("!", "?")).value == 0


@pytest.mark.parametrize("answer", ["", " ", ["stone", ""]])
def test_nothing_is_contained_in_everything(answer: Any) -> None:
    with pytest.raises(RewardFailed, match="must have something in it"):
        ExactReward(contains=True, ignore_punctuation=True)(item(answer, "a"))
