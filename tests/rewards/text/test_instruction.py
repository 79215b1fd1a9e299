"""The instruction families of IFEval: cases made by hand for each."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import cases, records

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.text.instruction import InstructionReward, Mode
from roll_lite.rewards.text.instruction_checks import CHECKS, IFEVAL
from roll_lite.rewards.text.instruction_checks.parts import sentences

CASES = records("rewards/ifeval")


def item(asked: Any, arguments: Any, response: str) -> RewardInput:
    return RewardInput("ifeval", "prompt", response, None, {"instruction_id_list": asked, "kwargs": arguments}, "stop")


@pytest.mark.parametrize(("name", "arguments", "response", "followed"), cases("rewards/ifeval"))
def test_cases(name: str, arguments: dict[str, Any], response: str, followed: bool) -> None:
    for mode in ("strict", "loose"):
        if mode == "loose" and name in ("detectable_format:number_bullet_lists", "length_constraints:number_paragraphs"):
            continue  # a line less may make it right
        assert InstructionReward(mode=mode)(item([name], [arguments], response)).correct is followed  # type: ignore[arg-type]


def test_every_family_has_a_case_that_follows_and_one_that_does_not() -> None:
    assert len(IFEVAL) == 25
    for name in IFEVAL:
        assert {case["followed"] for case in CASES if case["name"] == name} == {True, False}


@pytest.mark.parametrize(
    ("mode", "response", "correct"),
    [
        ("strict", "Sure, here it is:\nNo such thing", False),
        ("loose", "Sure, here it is:\nNo such thing", True),
        ("loose", "No such thing\nGood, bye", True),
        ("loose", "Sure, yes\nNo such thing\nGood, bye", True),
        ("loose", "Sure\nNo, such thing\nBye", False),
        ("loose", "a, b", False),
        ("strict", "", False),
        ("loose", " \n ", False),
    ],
)
def test_loose_takes_first_and_last_lines_away(mode: Mode, response: str, correct: bool) -> None:
    assert InstructionReward(mode=mode)(item(["punctuation:no_comma"], [{}], response)).correct is correct


def test_loose_takes_asterisks_away() -> None:
    row = item(["startend:end_checker"], [{"end_phrase": "the end"}], "It is **the end**")
    assert (InstructionReward()(row).value, InstructionReward(mode="loose")(row).value) == (0.0, 1.0)


def test_all_or_a_fraction() -> None:
    row = item(["punctuation:no_comma", "startend:quotation"], [{}, {"keyword": None}], "no comma")
    assert InstructionReward()(row).value == 0.0
    score = InstructionReward(score="fraction")(row)
    assert (score.value, score.correct) == (0.5, False)
    assert score.details == {"followed": 1.0, "instructions": 2.0, "missed": "startend:quotation"}
    assert InstructionReward()(item('["punctuation:no_comma"]', ['{"num_words": null}'], "x")).correct is True


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("No mark at all", 1),
        ("One. Two. Three.", 3),
        ("He said: 'Go!' Then he left.", 2),
        ("Dr. Who lives in the U.S. He likes it.", 1),
        ("It costs 3.50 dollars. Really?!", 2),
        ("Wait... what? Yes.", 3),
        ("all in small letters. it is three sentences. as the original counts.", 3),
        ("one thing, i.e. this. and e.g. that.", 2),
        ("See www.example.com for more. Bye.", 2),
        ("- one\n- two", 1),
        ("...", 0),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert len(sentences(text)) == count


@pytest.mark.parametrize("piece", [".", "\n", "[", "<<", ". ", "A.", "- \n", "*"])
@pytest.mark.parametrize("name", ["length_constraints:number_sentences", "detectable_format:number_bullet_lists"])
def test_degenerate_texts_take_no_time(name: str, piece: str) -> None:
    arguments = {"num_sentences": 3, "relation": "less than"} if "sentences" in name else {"num_bullets": 2}
    started = time.thread_time()
    InstructionReward()(item([name, "detectable_content:number_placeholders"], [arguments, {"num_placeholders": 2}], piece * 30_000))
    assert time.thread_time() - started < 3


def test_a_check_that_takes_too_long_is_named_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(response: str) -> bool:
        while True:
            pass

    monkeypatch.setitem(CHECKS, "punctuation:no_comma", endless)
    score = InstructionReward(score="fraction", cpu_limit_s=0.1)(item(["punctuation:no_comma", "startend:quotation"], [{}, {}], '"a"'))
    assert score.value == 0.5 and score.details["too_long"] == "punctuation:no_comma"


def test_thinking_is_not_judged() -> None:
    asked = item(["keywords:existence"], [{"keywords": ["tea cup"]}], "<think>tea cup</think> coffee")
    assert InstructionReward()(asked).value == 0
    assert InstructionReward()(item(["punctuation:no_comma"], [{}], "<think>cut off")).value == 0


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200), st.sampled_from([case for case in CASES if not case["name"].startswith(("language", "change_case:english"))]))
def test_any_response_can_be_checked(response: str, case: dict[str, Any]) -> None:
    row = item([case["name"]], [case["arguments"]], response)
    strict, loose = (InstructionReward(mode=mode)(row).value for mode in ("strict", "loose"))  # type: ignore[arg-type]
    assert strict <= loose
