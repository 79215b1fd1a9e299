r"""Where answers stand: nested and unfinished tags and boxes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support_cases import cases
from support_rewards import score_of

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput
from roll_lite.rewards.answer_extraction import after_thinking, complete, finished, last_boxes, last_tagged, without_thinking
from roll_lite.rewards.http.judge import JudgeReward
from roll_lite.rewards.placeholders import filling
from roll_lite.rewards.registry import build_reward
from roll_lite.rewards.running.time_limit import limited


def sample_of(response: str, finish_reason: str) -> RewardInput:
    return RewardInput("mine", "prompt", response, None, {}, finish_reason)


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{1} \boxed{\frac{2}{3}}", ["1", r"\frac{2}{3}"]),
        (r"\boxed{a \boxed{b}}", ["b"]),
        (r"\boxed{1} and \boxed{2", ["1"]),
        (r"\boxed{1} and \boxed{{2}", ["1"]),
        (r"} \boxed{\{1\}}", [r"\{1\}"]),
        (r"{ \boxed{1}", ["1"]),
        (r"\boxed{}", []),
        (r"fill \boxed{\phantom{00}} and \boxed{ ? } in: \boxed{7}", ["7"]),
        ("{1}", []),
    ],
)
def test_boxes(text: str, boxes: list[str]) -> None:
    assert last_boxes(text) == boxes


@pytest.mark.parametrize(
    ("text", "tagged"),
    [
        ("<answer>1</answer> <ANSWER>2</ANSWER>", "2"),
        ("I put it in <answer> tags: <answer>1</answer>", "1"),
        ("<answer>1</answer> as in </answer>", "1"),
        ("<answer>1</answer> <answer>2", "1"),
        ("</answer>1<answer>", None),
    ],
)
def test_tags(text: str, tagged: str | None) -> None:
    assert last_tagged(text) == tagged


def test_thinking() -> None:
    assert [without_thinking(text) for text in ("1", "1</think>2</thinking>3", "<think>1</think>2")] == ["1", "3", "2"]


@pytest.mark.parametrize("quote", "'\"`")
def test_a_tag_in_quotes_opens_no_thought(quote: str) -> None:
    assert without_thinking(f"1</think>s = {quote}<think>{quote}") == f"s = {quote}<think>{quote}"
    assert without_thinking(f"He said {quote}1{quote}</think>2") == "2"


def test_a_thought_that_was_not_closed_is_no_answer() -> None:
    assert [without_thinking(text) for text in ("<think>1", "<think>1</think>2<THINK>3", "a <thinking>1")] == ["", "", ""]
    assert without_thinking("1 but wait", prompt="Q\n<think>\n") == "" and without_thinking("1</think>2", prompt="Q<think>") == "2"
    assert without_thinking("1", prompt="<think>earlier</think> Q") == "1"


@pytest.mark.parametrize("piece", ["\\boxed{", "<answer>", "</think", "x", "{", "}"])
def test_unfinished_ones_take_no_time(piece: str) -> None:
    text = (piece * 400_000)[:350_000]
    limited(20.0, lambda: (without_thinking(text), last_tagged(text), last_boxes(text)))


@pytest.mark.parametrize(("response", "counts"), cases("rewards/cut_responses"))
def test_of_a_response_that_was_cut_counts_what_the_cut_cannot_have_shortened(response: str, counts: str) -> None:
    assert finished(sample_of(response, "length")) == counts
    assert complete(sample_of(response, "length")) == ""
    whole = after_thinking(sample_of(response, "stop"))
    assert whole == finished(sample_of(response, "stop")) == complete(sample_of(response, "stop"))


ANSWERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "math": ("12", {}, {}),
    "choice": ("C", {}, {}),
    "exact": ("12", {"contains": True}, {}),
    "code": (12, {"mode": "expression"}, {}),
}


@pytest.mark.parametrize(("type_", "response", "cut", "ended"), cases("rewards/cut_answers"))
def test_every_type_has_the_same_rule(type_: str, response: str, cut: int, ended: int) -> None:
    answer, args, columns = ANSWERS[type_]
    reward = build_reward(RewardConfig(name=type_, args=args))
    values = [score_of(reward, replace(sample_of(response, reason), answer=answer, columns=columns)).value for reason in ("length", "stop")]
    assert values == [cut, ended]


def test_what_looks_at_the_whole_response_finds_none_where_it_was_cut() -> None:
    exact = build_reward(RewardConfig(name="exact"))
    instruction = build_reward(RewardConfig(name="instruction"))
    asked = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    for reward, response in ((exact, "Paris\n"), (instruction, "No such mark here.\n")):
        for reason, value in (("stop", 1.0), ("length", 0.0)):
            score = score_of(reward, replace(sample_of(response, reason), answer="Paris", columns=asked))
            assert score.value == value and (score.details.get("verdict") == "cut at its limit of tokens") is (reason == "length")


def test_a_judge_is_told_of_the_cut_and_a_reward_model_reads_what_there_is() -> None:
    cut = sample_of("It is 1. The answer is 12", "length")
    judge = JudgeReward(server="main", template="[{response}]")
    assert judge.question_about(cut) == "[It is 1.\n[The response was cut at its limit of tokens.]]"
    assert judge.question_about(replace(cut, finish_reason="stop")) == "[It is 1. The answer is 12]"
    assert filling("response", cut) == cut.response
