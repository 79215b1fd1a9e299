from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import cases

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.running.time_limit import limited
from roll_lite.rewards.text.choice import ChoiceReward, Extract

COLOURS = ["red", "dark blue", "blue", "a green one"]
CITIES = ["Paris", "Rome", "Berlin", "Oslo"]


def item(answer: Any, response: str, options: Any = None) -> RewardInput:
    return RewardInput("quiz", "prompt", response, answer, {} if options is None else {"options": options}, "stop")


@pytest.mark.parametrize(("response", "chosen"), cases("rewards/choice_letters"))
def test_letters(response: str, chosen: str) -> None:
    """`chosen`: by a careful reader; "" for none or several."""
    score = ChoiceReward(letters=4)(item("C", response))
    assert score.details["extracted"] == chosen
    assert score.correct is (chosen == "C") and score.value == float(chosen == "C")


@pytest.mark.parametrize(("options", "response", "chosen"), cases("rewards/choice_options"))
def test_texts_of_options(options: list[str], response: str, chosen: str) -> None:
    """By the option's letter, and by its text beside options with letters."""
    assert ChoiceReward()(item("C", response, options)).details["extracted"] == chosen
    assert ChoiceReward()(item(options[2], response, dict(zip("ABCDE", options, strict=False)))).details["extracted"] == chosen


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("C. Berlin", CITIES),
        ("(C) Berlin", CITIES),
        ("C. Berlin", None),
        ("Berlin", CITIES),
        (2, CITIES),
        ("C", {"text": CITIES, "label": list("ABCD")}),
        ("Berlin", {"label": list("ABCD"), "text": CITIES}),
        ("3", {"text": CITIES, "label": list("1234")}),
        (3, {"text": CITIES, "label": list("1234")}),
        ("C", {"text": CITIES, "label": list("1234")}),
        ("3", dict(zip("1234", CITIES, strict=True))),
    ],
)
def test_options_and_answers_as_common_data_sets_have_them(answer: Any, options: Any) -> None:
    responses = ("C", "The answer is C.", "The answer is D.")
    assert [ChoiceReward()(item(answer, response, options)).value for response in responses] == [1, 1, 0]


def test_labels_need_not_begin_with_a() -> None:
    score = ChoiceReward()(item("G", "The answer is G.", {"text": ["red", "blue"], "label": ["F", "G"]}))
    assert (score.value, score.details["extracted"]) == (1.0, "G")


@pytest.mark.parametrize(
    ("extract", "response", "value"),
    [
        ("boxed", "C", 0.0),
        ("boxed", r"\boxed{A} \boxed{C}", 1.0),
        ("tagged", r"\boxed{C}", 0.0),
        ("tagged", "<answer>A</answer><answer>C</answer>", 1.0),
    ],
)
def test_extract(extract: Extract, response: str, value: float) -> None:
    assert ChoiceReward(extract=extract)(item("C", response)).value == value


def test_ambiguity_is_told() -> None:
    assert ChoiceReward()(item("A", "A or B")).details["verdict"] == "ambiguous: A, B"


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("E", COLOURS),
        (None, None),
        (3, None),
        ("yellow", COLOURS),
        ("A", "red"),
        ("A", 3),
        ("C. Berlin", COLOURS),
        (4, COLOURS),
        (-1, COLOURS),
        (True, COLOURS),
        (2, None),
        (0, {"text": ["a"], "label": ["1"]}),
        ("A", {"text": ["a"], "label": []}),
        ("A", {"text": 1, "label": 2}),
    ],
)
def test_unusable_references_are_failures(answer: Any, options: Any) -> None:
    with pytest.raises(RewardFailed, match="reward choice: "):
        ChoiceReward()(item(answer, "A", options))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=100) | st.text("ABCabc ()answer:\\boxed{}.,", max_size=60))
def test_any_response_has_a_verdict(response: str) -> None:
    score = ChoiceReward()(item("A", response, COLOURS))
    assert score.value in (0.0, 1.0) and score.details["extracted"] in ("", "A", "B", "C", "D")


@pytest.mark.parametrize(
    "piece", ["A or ", "A, ", "answer ", "the answer is the option ", "answer: : ", "not ", "\\boxed{", "wait, ", " ", "("]
)
def test_no_response_takes_long_to_read(piece: str) -> None:
    limited(60.0, lambda: ChoiceReward()(item("A", "the answer is " + piece * 1000, COLOURS)))


@pytest.mark.parametrize("piece", ["answer ", "the answer is A ", "\\boxed{", "<answer>", "</think", "\\text{", "not ", "x", " ", "\n"])
@pytest.mark.parametrize("options", [COLOURS, None])
def test_a_response_of_any_length_is_read_at_once(piece: str, options: Any) -> None:
    limited(20.0, lambda: ChoiceReward()(item("A", (piece * 400_000)[:350_000], options)))


def test_what_counts_stands_at_the_end() -> None:
    assert ChoiceReward()(item("C", "x " * 200_000 + "The answer is C.")).value == 1
    assert ChoiceReward()(item("C", "The answer is C." + " x" * 200_000)).value == 0
