r"""Reward `math`: the response's answer is mathematically equal to the reference answer."""

from __future__ import annotations

import math as floats
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from roll_lite.config.problems import Problem
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import finished, last_boxes, plain_boxes
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.math.answers import Answer, Boxes, Extract, find_answer, find_words
from roll_lite.rewards.math.equality import (
    LOOSE,
    PLUS_MINUS,
    agree,
    approximated,
    clock,
    holds,
    irrational,
    list_of,
    proportion,
    right_side,
    same_expression,
    same_items,
    same_number,
    same_proportion,
    same_time,
    without_unit,
    worth,
)
from roll_lite.rewards.math.notation import tidy
from roll_lite.rewards.math.numbers import Quantity, numeral, quantity, unnamed, unwrapped
from roll_lite.rewards.math.parsing import Parsed, expressions, is_formula, library, parse_whole, parsed_number
from roll_lite.rewards.math.units import NO_UNIT, Unit, ratio, split_unit
from roll_lite.rewards.math.words import in_words
from roll_lite.rewards.references import written
from roll_lite.rewards.reward_type import RewardType, too_slow
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited

T = TypeVar("T")
Accept = Literal["simplified", "value"]
Profile = Literal["default", "strict", "math_verify"]

REFERENCE = re.compile(
    r"\A(?:.*####|(?:so,?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:\bis\b\s*:?|[:=])|答案\s*(?:是|为)?\s*:?)\s*",
    re.DOTALL | re.IGNORECASE,
)
"""In front of the answer in columns with whole solutions."""
SET = re.compile(r"\A\s*(?:\\left)?\\?\{(.*?)(?:\\right)?\\?\}\s*\Z", re.DOTALL)

EQUAL, DIFFERENT, NOTHING = "equal", "different", "no answer found"
NOT_A_NUMBER = "an expression, where a number was asked for"
NOT_SIMPLIFIED = "equal, but not written as the reference is"
OTHER_UNIT = "another unit"
FALSE_EQUATION = "an equation that does not hold"
UNREADABLE = "not readable as mathematics"
BREAKS = "cannot be computed"
LONGEST_SHOWN = 200


class MathReward(RewardType):
    r"""The response's answer is mathematically equal to the reference answer: 1 where it is, else 0.

    A unit may be missing on either side; units of measurement and currencies that both have must fit: 12 m is 1200 cm, not 12 cm. 50% is
    0.5, and 50 as well. Several formulas in a reference are a list: all of them, as often as there, in any order. Numerals such as `1001_2`
    and 0x2F, and times such as 10:30, are equal to themselves only; 2:3 is 4:6, not 2/3. 5 less, 5 more and 5 fewer are 5; 5 less than 12
    is no number, nor is 5 squared or 5 and a half. A response without an answer, or one that takes longer than `cpu_limit_s`, is wrong; a
    reference answer that cannot be read is a failure. Of a reference with "####", as GSM8K has them, what is behind it counts; one in
    words, such as no solution, is compared as text, without regard to case. `extracted` in the details is what was compared.

    ```yaml
    reward:
      name: math
      args: {extract: boxed}
    ```
    """

    reads_answer_first = True

    extract: Extract = "auto"
    r"""Where the response's answer stands, behind the last `</think>`. auto: the response itself where it is one bare formula, the last
    `<answer></answer>`, a `\boxed{}`, what is behind the last "####", "the answer is" or 答案是 where that is nothing but a formula or
    begins with a quantity, else math-verify searches: the last formula or number. boxed: in a `\boxed{}`. tagged: in the last
    `<answer></answer>`. number: the last number."""
    boxes: Boxes = "last"
    """Which boxes count: the last, or all of them together as a list."""
    accept: Accept = "simplified"
    r"""Matters where the reference is a plain number. simplified: the answer has to be a number too (integer, decimal, fraction, mixed
    number, percentage, power of ten, with or without a unit; for a decimal an irrational constant such as `\sqrt{2}/2` as well), or an
    equation with a number on its right side, such as 45+25=70, that holds. value: any term that is worth it, such as 45+25 for 70."""
    profile: Profile = "default"
    r"""How strict the comparison is. strict also wants what the reference shows: fractions reduced, the same unit, no percentage for a
    decimal, neither `\sqrt{12}` for `2\sqrt{3}` nor 4:6 for 2:3. math_verify: what that library alone says of response and reference,
    whatever the other arguments but cpu_limit_s."""
    rounded: bool = False
    """A decimal reference, 0.33, stands for everything that rounds to it."""
    cpu_limit_s: Annotated[float, Field(gt=0)] = 5.0
    """Computing time for reading and comparing one answer, less than `timeout_s`; a response that takes longer is wrong."""

    def __call__(self, sample: RewardInput) -> Score:
        reference = _reference_text(sample.answer)
        if self.profile == "math_verify":
            return _by_the_library(reference, finished(sample), self.cpu_limit_s)
        gold = _reference(reference, self.cpu_limit_s)
        answer, vote = Answer(""), ""

        def decide() -> str:
            nonlocal answer, vote
            answer = (find_words if gold.words else find_answer)(tidy(finished(sample)), self.extract, self.boxes)
            verdict = _Comparison(self.accept, self.profile == "strict", self.rounded).verdict(gold, answer)
            vote = gold.text if verdict == EQUAL else _without_its_form(answer.text)
            return verdict

        verdict = _judged(reference, decide, lambda: _Comparison(self.accept).verdict(gold, Answer(gold.text)), self.cpu_limit_s)
        details: dict[str, float | str] = {"extracted": answer.text[:LONGEST_SHOWN], "verdict": verdict}
        return Score(float(verdict == EQUAL), verdict == EQUAL, details, answer=vote)

    def warm(self) -> None:
        """Import sympy and the parser and fill their tables: most of a second that the first samples would pay."""
        gold = _read_reference(r"2\sqrt{3}")
        for response in (r"the answer is $\frac{x + 1}{2}$", r"\boxed{\sqrt{12}}", "it is 5"):
            _Comparison().verdict(gold, find_answer(response, "auto"))

    def needs_answer(self) -> bool:
        return True

    def in_run(self, config: RunConfig, place: str, timeout_s: float) -> Iterator[Problem]:
        yield from too_slow(place, "cpu_limit_s", self.cpu_limit_s, self.cpu_limit_s, timeout_s)

    def response_for(self, answer: Any) -> str | None:
        return written(answer, self.extract)


def _judged(reference: str, decide: Callable[[], str], with_itself: Callable[[], str], cpu_limit_s: float) -> str:
    """The verdict on an answer. What makes the libraries raise is a wrong answer; RewardFailed where the reference alone does so too."""
    try:
        return limited(cpu_limit_s, decide)
    except TimeLimitExceeded:
        return "comparison takes too long"
    except (RecursionError, MemoryError):
        return "answer too large"
    except Exception:  # the policy writes what is read here: were it a failure, the policy could have a wrong answer left out
        try:
            limited(cpu_limit_s, with_itself)
        except Exception as error:  # as above
            raise RewardFailed(f"reward math: the reference answer {reference!r:.200} cannot be compared: {error!r:.200}") from error
        return BREAKS


def _by_the_library(reference: str, response: str, cpu_limit_s: float) -> Score:
    parse, verify = library().parse, library().verify

    def read() -> Parsed:
        return list(parse(f"${reference}$", parsing_timeout=None) or parse(reference, parsing_timeout=None))

    gold = _of_reference(reference, read, cpu_limit_s)
    if not gold:
        raise RewardFailed(f"reward math: math-verify cannot read the reference answer {reference!r:.200}")

    vote = ""

    def decide() -> str:
        nonlocal vote
        found = parse(response, parsing_timeout=None)
        is_equal = verify(gold, found, timeout_seconds=None)
        vote = reference if is_equal else str(found[0]) if found else ""
        return EQUAL if is_equal else DIFFERENT

    verdict = _judged(reference, decide, lambda: str(verify(gold, gold, timeout_seconds=None)), cpu_limit_s)
    return Score(float(verdict == EQUAL), verdict == EQUAL, {"extracted": "", "verdict": verdict}, answer=vote)


def _without_its_form(text: str) -> str:
    """Of a wrong answer, for majority votes: 1/2 and 0.5 are one, as are 12 cm and 120 mm."""
    found = quantity(right_side(text))
    if found is None:
        return "".join(text.split())
    unit = found.unit
    return f"{found.number.value * unit.size} {unit.text if unit.dimensions is None else sorted(unit.dimensions)}".strip()


@dataclass(frozen=True)
class Reference:
    text: str
    quantity: Quantity | None = None
    """Where it is a plain number, with or without a unit."""
    numeral: tuple[str, int] | None = None
    time: tuple[str, ...] | None = None
    unit: Unit = NO_UNIT
    parsed: Parsed | None = None
    """Without the unit."""
    brackets: str = ""
    """Those of a set or of a tuple, which math-verify takes for each other."""
    words: str | None = None
    """Where it is words and no formula."""
    items: tuple[Reference, ...] = ()
    """Where it is a list."""


@dataclass(frozen=True)
class _Comparison:
    """The settings under which an answer is held against a reference."""

    accept: Accept = "simplified"
    strict: bool = False
    rounded: bool = False

    def verdict(self, gold: Reference, answer: Answer) -> str:
        if not answer.text:
            return NOTHING
        if gold.words is not None:
            return EQUAL if in_words(answer.text) == gold.words else DIFFERENT
        if gold.items:
            return self._list(gold, answer.text)
        values = approximated(answer.text)
        if values is not None and all(values):
            return self._approximated(gold, *values)
        based, time = numeral(unnamed(answer.text)), clock(unnamed(answer.text))
        if based is not None or gold.numeral is not None:
            return EQUAL if based == gold.numeral else DIFFERENT
        if gold.time is not None or (time is not None and ":" not in gold.text):
            return EQUAL if gold.time is not None and time is not None and same_time(gold.time, time) else DIFFERENT
        parts = proportion(gold.text)
        if parts is not None:
            found = proportion(unnamed(answer.text))
            if found is None or not same_proportion(parts, found):
                return DIFFERENT
            return NOT_SIMPLIFIED if self.strict and found != parts else EQUAL
        if gold.quantity is None:
            return self._expression(gold, answer.text, answer.parsed)
        return self._number(gold, gold.quantity, answer)

    def _list(self, gold: Reference, text: str) -> str:
        text = unwrapped(text)
        text = SET.sub(r"\1", text)
        found = [Answer(item) for item in list_of(text)]
        same = same_items(gold.items, found, lambda one, other: self.verdict(one, other) == EQUAL)
        return EQUAL if same else DIFFERENT

    def _approximated(self, gold: Reference, exact: str, decimal: str) -> str:
        r"""\frac{1}{3} \approx 0.333: either may be what was asked for, as long as they agree."""
        verdicts = [self.verdict(gold, Answer(text)) for text in (exact, decimal)]
        if EQUAL not in verdicts:
            return verdicts[0]
        values = [value for value in map(worth, (right_side(exact), decimal)) if value is not None]
        return EQUAL if agree(values, decimal, LOOSE) else FALSE_EQUATION

    def _number(self, gold: Reference, wanted: Quantity, answer: Answer) -> str:
        whole = answer.text.removesuffix("!") if answer.exclaims else answer.text
        text = right_side(whole)
        found = quantity(text)
        if found is not None:
            if not holds(whole):
                return FALSE_EQUATION
            same = same_number(wanted, found, self.rounded)
            if same and self.strict and not _in_form(wanted, found):
                return NOT_SIMPLIFIED
            return OTHER_UNIT if same is None else EQUAL if same else DIFFERENT
        if self.accept == "value" and not self.strict:
            return self._expression(gold, text, answer.parsed)
        if wanted.number.exact:
            return NOT_A_NUMBER
        parsed = parse_whole(split_unit(unwrapped(text))[0])
        return self._expression(gold, text, parsed) if irrational(parsed) else NOT_A_NUMBER

    def _expression(self, gold: Reference, text: str, parsed: Parsed | None) -> str:
        text, unit = without_unit(unwrapped(text))
        if ratio(unit, gold.unit) != 1:
            return OTHER_UNIT
        if {gold.brackets, _brackets(text)} == {"{", "("}:
            return DIFFERENT
        if parsed is None or unit is not NO_UNIT:
            parsed = parse_whole(text)
        if not expressions(parsed):
            return UNREADABLE
        if not same_expression(gold.parsed or [], parsed):
            return DIFFERENT
        if self.strict and not any(one == other for one in gold.parsed or [] for other in expressions(parsed)):
            return NOT_SIMPLIFIED
        return EQUAL


def _in_form(wanted: Quantity, found: Quantity) -> bool:
    same_unit = wanted.unit.dimensions is None or found.unit.dimensions is None or wanted.unit.size == found.unit.size
    return found.number.reduced and wanted.number.percent == found.number.percent and same_unit


def _reference_text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or (isinstance(answer, float) and not floats.isfinite(answer)):
        raise RewardFailed(f"reward math: the reference answer must be a number or a string, got {answer!r:.200}")
    return str(answer)


@lru_cache(maxsize=8192)
def _reference(text: str, cpu_limit_s: float) -> Reference:
    """The samples of a group share their reference: it is parsed once."""
    return _of_reference(text, lambda: _read_reference(text), cpu_limit_s)


def _of_reference(text: str, read: Callable[[], T], cpu_limit_s: float) -> T:
    try:
        return limited(cpu_limit_s, read)
    except (TimeLimitExceeded, RecursionError, MemoryError) as error:
        raise RewardFailed(f"reward math: the reference answer {text!r:.200} cannot be read: {error}") from error


def _read_reference(text: str) -> Reference:
    plain = plain_boxes(REFERENCE.sub("", tidy(text.strip())))
    inner = unwrapped(", ".join(box.strip() for box in last_boxes(plain)) or plain)
    if words := in_words(inner):
        return Reference(inner, words=words)
    based, number, time = numeral(unnamed(inner)), quantity(inner), clock(inner)
    if time is not None:
        return Reference(inner, time=time)
    if based is None and number is None:
        items = list_of(SET.sub(r"\1", inner) if PLUS_MINUS.search(inner) else inner)
        if len(items) > 1 and all(map(is_formula, items)):
            return Reference(inner, items=tuple(_read_reference(item) for item in items))
    body, unit = (inner, number.unit) if number is not None else without_unit(inner)
    parsed = parsed_number(number.number) if number is not None else parse_whole(body)
    if based is None and not expressions(parsed):
        raise RewardFailed(f"reward math: the reference answer {text!r:.200} is no mathematical expression that math-verify can read")
    return Reference(inner, number, based, None, unit, parsed, _brackets(body))


def _brackets(text: str) -> str:
    return "{" if text.startswith(("\\{", "\\left\\{")) else "(" if text.startswith(("(", "\\left(")) else ""
