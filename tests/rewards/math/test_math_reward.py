"""The reward `math`: a table of judgements made by hand, and what odd responses and references do."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards.math.math_pairs import ODD_ANSWERS, ODD_REFERENCES, PAIRS, WORTH

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.answer_extraction import plain_boxes
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.math import MathReward
from roll_lite.rewards.math.answers import Extract
from roll_lite.rewards.math.equality import same_number
from roll_lite.rewards.math.notation import tidy
from roll_lite.rewards.math.numbers import plain_number, quantity, unnamed
from roll_lite.rewards.math.parsing import library, parse_whole
from roll_lite.rewards.math.reward import NOT_A_NUMBER

EQUAL: list[tuple[Any, str]] = [
    (7, "7"),
    (7, "The answer is 7."),
    (7, "7.0"),
    (-4, "-4"),
    (0, "-0"),
    ("07", "7"),
    ("1/2", "0.5"),
    ("1/2", r"\frac{2}{4}"),
    ("0.5", r"so we get \boxed{\frac12}"),
    (0.5, "$1/2$"),
    (1e5, "100000"),
    ("1e5", "100,000"),
    (1e-7, "10^{-7}"),
    ("1,000", "1000"),
    ("1 000", "1000"),
    ("$1,234.50", "1234.5"),
    ("50%", r"\boxed{50\%}"),
    ("50%", "0.5"),
    ("1 1/2", "1.5"),
    ("-1 1/2", "-1.5"),
    (r"1\frac{1}{2}", "3/2"),
    ("1/3", "0.333333"),
    (r"2\sqrt{3}", r"therefore $\sqrt{12}$"),
    (r"2\sqrt{3}", r"2\sqrt{3}"),
    ("sqrt(2)", r"\sqrt{2}"),
    (r"3\pi", "9.42477796"),
    ("2**10", "1024"),
    ("x+1", "1+x"),
    ("x^2-1", "(x-1)(x+1)"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("x^2y^2", "y^2x^2"),
    ("2^{3^2}", "512"),
    ("x=5", "5"),
    (5, "x = 5"),
    (5, "first 3, then 5"),
    (r"90^\circ", "90"),
    ("12 cm", r"\boxed{12\text{ cm}}"),
    (r"\infty", r"\infty"),
    (r"$\frac{3}{4}$", "3/4"),
    (r"\boxed{7}", "7"),
]
DIFFERENT: list[tuple[Any, str]] = [
    (7, "8"),
    (-4, "4"),
    (0, "1"),
    ("1/3", "0.33"),
    ("0.3333", "1/3"),
    (2, r"2\sqrt{3}"),
    ("1 1/2", "1"),
    (12, "3 4"),
    (5, "55"),
    (10, "3+8"),
    ("x+1", "x + 2"),
    ("x", "y"),
    ("(1,2)", "(2,1)"),
    (5, r"\boxed{3} or \boxed{5}"),
    (5, r"\boxed{5}, \boxed{3}"),
    (5, "The final answer is 3 or 5"),
    (5, "5 or 3"),
    (1000001, "1000000"),
    ("10000000000000000000000001", "10000000000000000000000000"),
    (5, "1/0"),
]


def item(answer: Any, response: str) -> RewardInput:
    return RewardInput("maths", "prompt", response, answer, {}, "stop")


def verdict_of(answer: Any, response: str, **args: Any) -> str:
    score = MathReward(**args)(item(answer, response))
    assert score.value == float(bool(score.correct)) == float(score.details["verdict"] == "equal")
    return str(score.details["verdict"])


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    MathReward().warm()


@pytest.mark.parametrize(("answer", "response"), EQUAL)
def test_equal(answer: Any, response: str) -> None:
    score = MathReward()(item(answer, response))
    assert (score.value, score.correct, score.details["verdict"]) == (1.0, True, "equal")


@pytest.mark.parametrize(("answer", "response"), DIFFERENT)
def test_different(answer: Any, response: str) -> None:
    score = MathReward()(item(answer, response))
    assert (score.value, score.correct) == (0.0, False)


@pytest.mark.parametrize(
    "response", ["", "   ", "???", "five", "\\boxed{", "\\boxed{}", "$$", "\x00", "\ud800", "}{", "\\frac{1}{", "=" * 500, "\\" * 500]
)
@pytest.mark.parametrize("extract", ["auto", "boxed", "tagged"])
def test_odd_responses_are_wrong_and_say_so(response: str, extract: Extract) -> None:
    assert verdict_of(5, response, extract=extract) in ("no answer found", "not readable as mathematics", NOT_A_NUMBER)


@pytest.mark.parametrize(
    ("extract", "response", "value"),
    [
        ("boxed", "5", 0.0),
        ("boxed", r"\boxed{5}", 1.0),
        ("boxed", r"\boxed{3}, no, \boxed{5}", 1.0),
        ("boxed", r"\boxed{5}, no, \boxed{3}", 0.0),
        ("boxed", r"\boxed{5} and \boxed{3", 1.0),
        ("boxed", r"\boxed{\frac{10}{2}}", 1.0),
        ("boxed", r"\boxed{the 5}", 0.0),
        ("tagged", "5", 0.0),
        ("tagged", "<answer>5</answer>", 1.0),
        ("tagged", "<answer>3</answer> <answer>\n$x=5$\n</answer>", 1.0),
        ("tagged", "<answer>5</answer> <answer>3</answer>", 0.0),
        ("tagged", "5 <answer>5", 0.0),
    ],
)
def test_extract(extract: Extract, response: str, value: float) -> None:
    assert MathReward(extract=extract)(item(5, response)).value == value


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "  ",
        "???",
        r"\frac{1}{",
        "1/0",
        "0/0",
        "#### ",
        "The answer is",
        "1 2",
        "2**3**2",
        "2^3^2",
        None,
        True,
        [1],
        {"a": 1},
        float("nan"),
        float("inf"),
    ],
)
def test_an_unreadable_reference_is_a_failure_never_a_zero(answer: Any) -> None:
    with pytest.raises(RewardFailed, match="reward math: the reference answer"):
        MathReward()(item(answer, "72"))


@pytest.mark.parametrize("response", [r"\boxed{9^{9^{9^{9}}}}", "(9^9^9^9)", r"\boxed{\sum_{n=1}^{10000000} \frac{1}{n^2}}"])
def test_endless_comparisons_are_stopped(response: str) -> None:
    started = time.process_time()
    verdict = verdict_of(5, response, accept="value", cpu_limit_s=0.3)
    stopped = "comparison takes too long"
    assert verdict in {"(": ("not readable as mathematics",), r"\boxed{9": (stopped,)}.get(
        response[:8] if response[0] != "(" else "(", (stopped, "different")
    )
    assert MathReward(cpu_limit_s=0.3)(item(5, response)).value == 0
    assert time.process_time() - started < 5


@pytest.mark.parametrize("reference", ["5", "0.5", r"\sqrt{2}", r"\pi", r"\frac13\approx0.33"])
@pytest.mark.parametrize("answer", ODD_ANSWERS[:7])
def test_what_cannot_be_computed_is_a_wrong_answer(reference: str, answer: str) -> None:
    assert MathReward()(item(reference, rf"\boxed{{{answer}}}")).value == 0


@pytest.mark.parametrize("args", [{}, {"accept": "value"}, {"profile": "strict"}, {"rounded": True}, {"profile": "math_verify"}])
def test_no_odd_answer_is_a_failure(args: dict[str, Any]) -> None:
    dice = random.Random(7)
    for _ in range(150):
        reference, answers = dice.choice(ODD_REFERENCES), dice.choices(ODD_ANSWERS, k=dice.choice((1, 1, 2)))
        said = dice.choice(("+", r"\approx ", ", ", "=", "-", r"\cdot ", " ")).join(answers)
        response = dice.choice((r"\boxed{%s}", "%s", "The answer is $%s$.", "<answer>%s</answer>")) % said
        assert MathReward(cpu_limit_s=1.0, **args)(item(reference, response)).value in (0, 1), (reference, response)


def test_a_reference_that_cannot_be_compared_with_itself_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any) -> bool:
        raise ValueError("at a pole")

    monkeypatch.setattr("roll_lite.rewards.math.reward.same_expression", breaks)
    with pytest.raises(RewardFailed, match="reference answer 'x' cannot be compared: .*at a pole"):
        MathReward()(item("x", "y"))


@pytest.mark.parametrize(
    "ordinal",
    [
        "12th",
        "12^{th}",
        r"12^\text{th}",
        r"12^{\text{th}}",
        r"12^{\text{ th }}",
        r"12\textsuperscript{th}",
        "12^th",
        "12 th",
        r"\text{12th}",
    ],
)
def test_an_ordinal_is_its_number_and_leaves_the_braces_around_it(ordinal: str) -> None:
    for reference in (ordinal, "12"):
        for response in (ordinal, rf"\boxed{{{ordinal}}}", rf"The answer is \boxed{{{ordinal}}}.", "12"):
            assert verdict_of(reference, response) == "equal"
    assert verdict_of("13", rf"\boxed{{{ordinal}}}") == "different"
    assert verdict_of("12, 3", rf"\boxed{{{ordinal}}} and \boxed{{3}}") == "equal"
    assert verdict_of("3", rf"\boxed{{{ordinal}}} and \boxed{{3}}") == NOT_A_NUMBER


def test_an_endless_reference_is_a_failure() -> None:
    with pytest.raises(RewardFailed, match=r"cannot be read: more than 0\.1 s of computing"):
        MathReward(cpu_limit_s=0.1)(item("(" * 2000 + "5" + ")" * 2000, "5"))


@pytest.mark.parametrize(("reference", "response", "equal"), PAIRS)
def test_pairs(reference: str, response: str, equal: bool) -> None:
    started = time.process_time()
    assert (verdict_of(reference, response) == "equal") is equal
    assert time.process_time() - started < 7


def test_there_are_many_pairs() -> None:
    assert len(PAIRS) >= 150


@pytest.mark.parametrize(("reference", "response", "equal"), WORTH)
def test_pairs_by_value(reference: str, response: str, equal: bool) -> None:
    assert (verdict_of(reference, response, accept="value") == "equal") is equal


@pytest.mark.parametrize(
    ("response", "extract", "extracted"),
    [
        ("5", "auto", "5"),
        ("it is 5, or 1/2", "auto", "1/2"),
        (r"so \boxed{\frac{1}{2}} it is", "auto", r"\frac{1}{2}"),
        ("<answer> 7 </answer> 8", "auto", "7"),
        (r"<answer>\boxed{7}</answer>", "tagged", "7"),
        (r"\boxed{x} and \boxed{ y }", "boxed", "y"),
        ("from 3 to -1,234.5 km", "number", "-1,234.5"),
        ("10-3", "number", "3"),
        ("50% of 1/2", "number", "1/2"),
        ("none", "number", ""),
        ("none", "auto", ""),
    ],
)
def test_what_was_extracted_is_shown(response: str, extract: Extract, extracted: str) -> None:
    assert MathReward(extract=extract)(item(5, response)).details["extracted"] == extracted


NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.integers(-(10**7), 10**7).map(lambda number: f"{number:,}"),
    st.decimals(-1000, 1000, places=3).map(str),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.tuples(st.integers(1, 99), st.integers(0, 9)).map(lambda pair: rf"{pair[0]} \times 10^{{{pair[1]}}}"),
)


@settings(max_examples=150, deadline=None)
@given(NUMBERS, NUMBERS)
def test_exact_arithmetic_and_the_library_say_the_same(reference: str, response: str) -> None:
    gold = quantity(reference)
    for answer in (response, reference):
        found = quantity(answer)
        assert gold is not None and found is not None
        slow = library().verify(parse_whole(reference), parse_whole(answer), timeout_seconds=None)
        assert same_number(gold, found, rounded=False) is slow, (reference, answer)


@settings(max_examples=150, deadline=None)
@given(NUMBERS)
def test_numbers_are_found_in_every_wrapping(number: str) -> None:
    value = plain_number(number)
    assert value is not None
    for wrapped in (f" {number} ", f"${number}$", rf"\({number}\)", f"**{number}**", f"x = {number}", rf"{number}\text{{ cm}}"):
        found = quantity(unnamed(wrapped))
        assert found is not None and found.number == value
    assert plain_number(f"${number}$") == value
    for response, extract in ((rf"then \boxed{{{number}}}", "boxed"), (f"a <answer>{number}</answer> b", "tagged")):
        assert MathReward(extract=extract)(item(number, response)).correct is True  # type: ignore[arg-type]
    assert quantity(f"{number}+{number}") is None and quantity(f"{number}*") is None


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=200) | st.text("\\boxed{}<>answer/ 0123456789.,+-*=$^%()", max_size=80),
    st.sampled_from(["auto", "boxed", "tagged", "number"]),
)
def test_any_response_has_a_verdict(response: str, extract: Extract) -> None:
    score = MathReward(extract=extract, cpu_limit_s=1.0)(item(5, response))
    assert score.value in (0.0, 1.0) and score.details["verdict"]
    assert extract == "auto" or str(score.details["extracted"]) in plain_boxes(tidy(response))


def test_the_same_every_time() -> None:
    for answer, response in [*EQUAL[::5], *DIFFERENT[::5]]:
        first = MathReward()(item(answer, response))
        assert all(MathReward()(item(answer, response)) == first for _ in range(3))


@pytest.mark.parametrize(
    ("reference", "response", "plain", "strict"),
    [
        ("1/2", "1/2", True, True),
        ("1/2", "2/4", True, False),
        ("1/2", "0.5", True, True),
        ("0.5", "50%", True, False),
        ("12 m", "1200 cm", True, False),
        ("12 m", "12", True, True),
        (r"2\sqrt{3}", r"\sqrt{12}", True, False),
        (r"2\sqrt{3}", r"2 \sqrt 3", True, True),
        ("3", "6/2", True, False),
        ("2:3", "2 : 3", True, True),
        ("2:3", "4:6", True, False),
        ("4:6", "2:3", True, False),
    ],
)
def test_strictly_the_form_counts_as_well(reference: str, response: str, plain: bool, strict: bool) -> None:
    assert MathReward()(item(reference, response)).correct is plain
    assert MathReward(profile="strict")(item(reference, response)).correct is strict


@pytest.mark.parametrize(
    ("reference", "response", "equal"),
    [("5", r"\boxed{5}", True), ("5", "5 tenths", True), (r"\frac{1}{2}", "$0.5$", True), ("5", "4", False)],
)
def test_what_the_library_alone_says(reference: str, response: str, equal: bool) -> None:
    from math_verify import parse, verify

    assert verify(parse(f"${reference}$"), parse(response)) is equal
    assert MathReward(profile="math_verify")(item(reference, response)).correct is equal


@pytest.mark.parametrize(("response", "equal"), [("0.33", True), ("1/3", True), ("0.334", True), ("0.3351", False), ("0.34", False)])
def test_a_rounded_reference_stands_for_what_rounds_to_it(response: str, equal: bool) -> None:
    assert MathReward(rounded=True)(item("0.33", response)).correct is equal
    assert MathReward()(item("0.33", response)).correct is (response == "0.33")


def test_all_boxes_as_a_list() -> None:
    assert MathReward(boxes="all")(item("3, 5", r"$x=\boxed{3}$. Then $x=\boxed{5}$")).correct is True
    assert MathReward()(item("3, 5", r"$x=\boxed{3}$. Then $x=\boxed{5}$")).correct is False


@pytest.mark.parametrize(
    ("answers", "equal"),
    [
        ([r"\boxed{6}", "the answer is 6.0", r"\boxed{\frac{12}{2}}"], True),
        ([r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{x = \frac{1}{2}}"], True),
        ([r"\boxed{12\text{ cm}}", r"\boxed{120\text{ mm}}"], True),
        ([r"\boxed{x + 1}", r"\boxed{x+1}"], True),
        ([r"\boxed{5}", r"\boxed{-5}"], False),
        ([r"\boxed{12\text{ cm}}", r"\boxed{12\text{ m}}"], False),
    ],
)
def test_votes_are_for_what_an_answer_is_worth(answers: list[str], equal: bool) -> None:
    votes = [MathReward()(RewardInput("maths", "p", answer, "6", {}, "stop")).answer for answer in answers]
    assert all(votes) and (len(set(votes)) == 1) is equal, votes


def test_a_response_without_an_answer_does_not_vote() -> None:
    assert MathReward()(RewardInput("maths", "p", "I do not know", "6", {}, "stop")).answer == ""
    library_alone = MathReward(profile="math_verify")
    said = [library_alone(RewardInput("maths", "p", text, "1/2", {}, "stop")).answer for text in ("$0.5$", r"$\frac{1}{2}$", "$7$", "no")]
    assert said[0] == said[1] == "1/2" and said[2] == "7" and said[3] == ""
