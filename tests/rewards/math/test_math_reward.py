"""The reward `math`: verdicts made by hand (cases.jsonl), searches for responses that score without solving, and limits."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards.math.odd_responses import NUMBERS, ODD_ANSWERS, ODD_REFERENCES, OTHERS, chains, mixtures

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.boxes import plain_boxes
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.math.answers import Extract
from roll_lite.rewards.math.quantities import plain_number, quantity, tidy
from roll_lite.rewards.math.reward import NOT_A_NUMBER, MathReward
from roll_lite.rewards.running.batch_scorer import BatchScorer

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text().splitlines()]
"""Reference, response, whether they are equal (null: the reference cannot be read), arguments."""


def item(answer: Any, response: str) -> RewardInput:
    return RewardInput("maths", "prompt", response, answer, {}, "stop")


def verdict_of(answer: Any, response: str, **args: Any) -> str:
    score = MathReward(**args)(item(answer, response))
    assert score.value == float(bool(score.correct)) == float(score.details["verdict"] == "equal")
    return str(score.details["verdict"])


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    MathReward().warm()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} | {case[1]:.60}")
def test_cases(case: list[Any]) -> None:
    reference, response, equal, *args = case
    if equal is None:
        with pytest.raises(RewardFailed, match="reward math: the reference answer"):
            MathReward(**(args[0] if args else {}))(item(reference, response))
    else:
        assert (verdict_of(reference, response, **(args[0] if args else {})) == "equal") is equal


def right_for(reward: MathReward, response: str, references: list[str]) -> list[str]:
    """References that the response is right for; of those that are equal by rule, such as 12 and 12 cm, one."""
    right = [reference for reference in references if reward(item(reference, response)).correct]
    return right[:1] if all(reward(item(one, rf"\boxed{{{other}}}")).correct for one in right for other in right) else right


def test_no_chain_is_right_for_two_references() -> None:
    for response in chains():
        assert len(right_for(MathReward(cpu_limit_s=1.0), response, ["0", "7", "14", "3%"])) <= 1, response


def test_no_mixture_is_right_for_two_references() -> None:
    for number, response in enumerate(mixtures(60, seed=1)):
        references = NUMBERS[:12] + OTHERS[number % len(OTHERS) :: len(OTHERS) // 3]
        assert len(right_for(MathReward(cpu_limit_s=1.0), response, references)) <= 1, response


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_thousands_of_mixtures_are_right_for_one_reference_at_most(seed: int) -> None:
    reward = MathReward(cpu_limit_s=1.0)
    for response in mixtures(500, seed=seed + 100):
        assert len(right_for(reward, response, NUMBERS + OTHERS)) <= 1, response


def questions(count: int) -> list[tuple[str, str]]:
    """Exercises with answers that sympy computed: what has to be computed, and what it is."""
    dice, x, made = random.Random(3), sympy.Symbol("x"), []
    for number in range(count):
        polynomial = sum(dice.randint(1, 9) * x**power for power in range(dice.randint(2, 4)))
        a, b = dice.randint(2, 9), dice.randint(2, 9)
        one, other = (sympy.Matrix(2, 2, [dice.randint(1, 9) for _ in range(4)]) for _ in range(2))
        latex = sympy.latex(polynomial)
        matrices = "".join(sympy.latex(matrix, mat_str="pmatrix", mat_delim="") for matrix in (one, other))
        made.append(
            (
                (rf"\int {latex} \, dx", sympy.latex(sympy.integrate(polynomial, x))),
                (rf"\frac{{d}}{{dx}}\left({latex}\right)", sympy.latex(sympy.diff(polynomial * x, x))),
                (rf"\sum_{{k=1}}^{{n}} {a}k", rf"\frac{{{a}n(n+1)}}{{2}}"),
                (rf"\lim_{{t \to 0}} \left({latex} + t\right)", latex),
                (matrices, sympy.latex(one * other, mat_str="pmatrix", mat_delim="")),
                (rf"({a}x-{b})({a}x+{b})", rf"{a * a}x^2-{b * b}"),
                (rf"{a}\sqrt{{2}}+{b}\sqrt{{2}}", rf"{a + b}\sqrt{{2}}"),
                (rf"{a}x+{b} < {a * 10 + b}", "x < 10"),
                (rf"[0,{a + b}]\cap[{a},{a + b + 1}]", f"[{a},{a + b}]"),
                (rf"{a}x+{b}x", f"{a + b}x"),
                (sympy.latex(sympy.expand((x + a) ** 2)), f"(x+{a})^2"),
                (rf"(x-{a})(x-{b})(x-1)", sympy.latex(sympy.expand((x - a) * (x - b) * (x - 1)))),
                (rf"x^{a} x^{b}", rf"x^{{{a + b}}}"),
                (rf"\pi\cdot{a}\cdot{b}", rf"{a * b}\pi"),
                (rf"[0,{a}]\cup[{a},{a + b}]", f"[0,{a + b}]"),
                (f"{a}" + sympy.latex(one, mat_str="pmatrix", mat_delim=""), sympy.latex(a * one, mat_str="pmatrix", mat_delim="")),
                (rf"\frac{{\mathrm{{d}}}}{{\mathrm{{d}}x}}\left({latex}\right)", sympy.latex(sympy.diff(polynomial, x))),
                (rf"\frac{{{{\rm d}}}}{{{{\rm d}}x}}x^{a}", rf"{a}x^{{{a - 1}}}"),
                (rf"\int {latex} \, \mathrm{{d}}x", sympy.latex(sympy.integrate(polynomial, x))),
                (rf"\begin{{vmatrix}}x&{a}\\{b}&x\end{{vmatrix}}", rf"x^2-{a * b}"),
                (rf"(x^{a})^{b}", rf"x^{{{a * b}}}"),
                (rf"(e^x)^{a}", rf"e^{{{a}x}}"),
                (rf"({a}^{{60}})^{{{b}}}", rf"{a}^{{{60 * b}}}"),
                (rf"{a}^{{50}} {a}^{{{b}}}", rf"{a}^{{{50 + b}}}"),
                (rf"x^2-{a * a - a}={a}", f"x={a}"),
                (rf"x+{b}={a}", f"x={a}"),
            )[number % 26]
        )
    return made


def test_no_question_is_its_own_answer() -> None:
    for question, answer in questions(104):
        for extract, written in (("boxed", r"\boxed{{{}}}"), ("auto", "The answer is ${}$.")):
            assert verdict_of(answer, written.format(question), extract=extract) != "equal", question
        assert verdict_of(answer, rf"\boxed{{{answer}}}") == "equal", answer


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("5" * 3000, False),
        ("(" * 300 + "5" + ")" * 300, True),
        (r"\boxed{" * 200 + "5" + "}" * 200, True),
        ("{" * 500, False),
        (r"\frac{" * 100, False),
        (" ".join(str(number) for number in range(2000)), False),
        (r"\frac{" * 3000, False),
        ("$" * 3001 + "5", False),
    ],
)
def test_long_responses(response: str, right: bool) -> None:
    assert MathReward()(item(5, response)).correct is right


@pytest.mark.parametrize(
    "response", ["", "   ", "???", "five", "\\boxed{", "\\boxed{}", "$$", "\x00", "\ud800", "}{", "\\frac{1}{", "=" * 500, "\\" * 500]
)
@pytest.mark.parametrize("extract", ["auto", "boxed", "tagged"])
def test_odd_responses_are_wrong_and_say_so(response: str, extract: Extract) -> None:
    assert verdict_of(5, response, extract=extract) in ("no answer found", "not readable as mathematics", NOT_A_NUMBER)


@pytest.mark.parametrize("answer", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_no_reference(answer: float) -> None:
    with pytest.raises(RewardFailed, match="reward math: the reference answer"):
        MathReward()(item(answer, "72"))


@pytest.mark.parametrize("response", [r"\boxed{9^{9^{9^{9}}}}", "(9^9^9^9)", r"\boxed{\sum_{n=1}^{10000000} \frac{1}{n^2}}"])
def test_endless_comparisons_are_stopped(response: str) -> None:
    started = time.process_time()
    assert MathReward(cpu_limit_s=0.3)(item(5, response)).value == 0
    assert MathReward(cpu_limit_s=0.3)(item(5.5, response)).value == 0
    assert MathReward(cpu_limit_s=0.3)(item(r"\sqrt{5}", response)).value == 0
    assert time.process_time() - started < 5


@pytest.mark.parametrize("run", [". ", r"\, .", r" \quad"])
def test_a_long_run_of_blanks_and_dots_takes_no_time(run: str) -> None:
    assert verdict_of("12", 20_000 * run + "The answer is 12.", cpu_limit_s=1.0) == "equal"


def test_no_odd_answer_is_a_failure() -> None:
    dice = random.Random(7)
    for _ in range(60):
        reference, answers = dice.choice(ODD_REFERENCES), dice.choices(ODD_ANSWERS, k=dice.choice((1, 1, 2)))
        said = dice.choice(("+", r"\approx ", ", ", "=", "-", r"\cdot ", " ")).join(answers)
        response = dice.choice((r"\boxed{%s}", "%s", "The answer is $%s$.", "<answer>%s</answer>")) % said
        assert MathReward(cpu_limit_s=1.0)(item(reference, response)).value in (0, 1), (reference, response)


@pytest.mark.parametrize("reference", ["5", "0.5", r"\sqrt{2}", r"\pi", r"\frac13\approx0.33"])
def test_what_cannot_be_computed_is_a_wrong_answer(reference: str) -> None:
    for answer in (*ODD_ANSWERS[:7], *ODD_ANSWERS[-5:]):
        assert MathReward(cpu_limit_s=1.0)(item(reference, rf"\boxed{{{answer}}}")).value == 0, answer


def test_a_reference_that_cannot_be_compared_with_itself_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any) -> bool:
        raise ValueError("at a pole")

    monkeypatch.setattr("roll_lite.rewards.math.equality.same_expression", breaks)
    with pytest.raises(RewardFailed, match="reference answer 'x' cannot be compared: .*at a pole"):
        MathReward()(item("x", "y"))


def test_an_endless_reference_is_a_failure() -> None:
    with pytest.raises(RewardFailed, match=r"cannot be read: more than 0\.1 s of computing"):
        MathReward(cpu_limit_s=0.1)(item(r"\sqrt{" * 400 + "5" + "}" * 400, "5"))


def test_an_expensive_response_is_wrong_however_little_of_the_machine_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample's limit by the clock ends while an answer is still compared: the machine was busy, and the score is the same."""

    def on_a_busy_machine(*args: Any) -> bool:
        time.sleep(0.5)
        return False

    monkeypatch.setattr("roll_lite.rewards.math.equality.same_expression", on_a_busy_machine)
    scorer, _ = BatchScorer.of(RewardConfig(name="math", args={"cpu_limit_s": 0.1}, timeout_s=0.2), "reward")
    outcome, scored = scorer.one(item("x", r"\boxed{y}"))
    assert isinstance(outcome, Score) and outcome.value == 0 and not scored.interrupted


NUMBER_TEXTS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.integers(-(10**7), 10**7).map(lambda number: f"{number:,}"),
    st.decimals(-1000, 1000, places=3).map(str),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.tuples(st.integers(1, 99), st.integers(0, 9)).map(lambda pair: rf"{pair[0]} \times 10^{{{pair[1]}}}"),
)


@settings(max_examples=150, deadline=None)
@given(NUMBER_TEXTS, NUMBER_TEXTS)
def test_exact_arithmetic_and_the_library_say_the_same(reference: str, response: str) -> None:
    from math_verify import parse, verify

    for answer in (response, reference):
        by_library = verify(parse(f"${reference}$"), parse(f"${answer}$"))
        assert MathReward()(item(reference, rf"\boxed{{{answer}}}")).correct is by_library, (reference, answer)


@settings(max_examples=150, deadline=None)
@given(NUMBER_TEXTS)
def test_numbers_are_found_in_every_wrapping(number: str) -> None:
    value = plain_number(number)
    assert value is not None
    for wrapped in (f" {number} ", f"${number}$", rf"\({number}\)", f"**{number}**", rf"{number}\text{{ apples}}"):
        assert quantity(wrapped) == value
    for response, extract in ((rf"then \boxed{{x = {number}}}", "boxed"), (f"a <answer>{number}</answer> b", "tagged")):
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
    assert extract != "number" or str(score.details["extracted"]) in plain_boxes(tidy(response))


def test_the_same_every_time() -> None:
    for answer, response, equal, *_ in CASES[::40]:
        if equal is not None:
            first = MathReward()(item(answer, response))
            assert all(MathReward()(item(answer, response)) == first for _ in range(3))


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


@pytest.mark.parametrize(
    ("response", "extract", "extracted"),
    [
        ("5", "auto", "5"),
        ("it is 5, or 1/2", "auto", "5, 1/2"),
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


def test_a_vote_that_cannot_be_computed_is_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(text: str) -> str:
        raise MemoryError

    def endless(text: str) -> str:
        while True:
            pass

    for vote in (too_large, endless):
        monkeypatch.setattr("roll_lite.rewards.math.reward.without_form", vote)
        score = MathReward(cpu_limit_s=0.3)(item("5", r"\boxed{7}"))
        assert (score.value, score.answer) == (0, "7")


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
    votes = [MathReward()(item("6", answer)).answer for answer in answers]
    assert all(votes) and (len(set(votes)) == 1) is equal, votes


def test_a_response_without_an_answer_does_not_vote() -> None:
    assert MathReward()(item("6", "I do not know")).answer == ""
