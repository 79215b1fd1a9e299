r"""Reward `math`: the response's answer is mathematically equal to the reference answer, by the library math-verify."""

from __future__ import annotations

import logging
import math as floats
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import after_thinking, all_boxed, last_boxed, last_tagged, plain_boxes
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.notation import as_latex, tidy
from roll_lite.rewards.numbers import DIGITS, PlainNumber, Quantity, numeral, plain_number, quantity, unnamed, unwrapped
from roll_lite.rewards.time_limit import TimeLimitExceeded, limited
from roll_lite.rewards.units import NO_UNIT, Unit, ratio, split_unit
from roll_lite.rewards.words import in_words

Extract = Literal["auto", "boxed", "tagged", "number"]
Accept = Literal["simplified", "value"]
Parsed = list[Any]
"""What math-verify makes of a text: sympy expressions, and strings that it could not read."""

DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
AMBIGUOUS = re.compile(r"\d\s+\d|(?:\*\*|\^)\s*(?:\d+|[A-Za-z])\s*(?:\*\*|\^)")
"""1 2 would be read as a product, 2^3^2 as (2^3)^2."""
WORDS = re.compile(r"[A-Za-z]{2,}")
NO_WORDS = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|\b(?:sqrt|sin|cos|tan|log|ln|exp|pi)\b")
LAST_NUMBER = re.compile(rf"(?:(?<![\d.)\]}}])[+-])?{DIGITS}(?:/\d+)?(?:\s*\\?%)?")
STATED = re.compile(r"(?:^\s*#{4}|\banswer\b[\s*`]*+(?:\bis\b)?[\s*`]*+[:=]?)[\s*`]*+([^\n]+)", re.IGNORECASE | re.MULTILINE)
"""GSM8K's #### 72, and: The answer is 72."""
ALTERNATIVES, EITHER = re.compile(r"\s*,?\s*\b(?:or|and)\b\s*"), re.compile(r"^(?:either|both)\s+", re.IGNORECASE)
"""3 or 5 are two answers."""
ONE_OR_OTHER = re.compile(rf"([+-]?{DIGITS}(?:/\d+)?(?:\s*\\?%)?)\s+or\s+\Z")
LABEL = re.compile(r"\A\s*A:\s+(?=\S)")
"""As behind Q: in examples."""
REFERENCE = re.compile(
    r"\A(?:.*####|(?:so,?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:\bis\b\s*:?|[:=]))\s*", re.DOTALL | re.IGNORECASE
)
"""In front of the answer in columns with whole solutions."""
REMARK = re.compile(r"\s*(?:\(|[.!](?=\s)|\b(?:an?|in|for|on|at|by|with|from|because|since|when|after|each|every|per)\b)")
"""Behind a quantity: what follows says more about it."""
SIZES, TIMES = re.compile(r"\\(?:left|right)(?![A-Za-z])"), re.compile(r"(?<=[\d)}!])\s*(?=\()|(?<=\))\s*(?=\d)")
"""2(9) is a product, which math-verify does not know."""
MIXED = re.compile(r"\d\s*\\frac")
ARITHMETIC = re.compile(r"(?:[\d\s.,+\-*/^(){}!]|\\(?:frac|sqrt|cdot|times|div)(?![A-Za-z]))+")
GOES_ON = re.compile(r"[√π^!][^\s,;]*")
"""Signs that math-verify's search in running text does not know."""
EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)")
SEVERAL = re.compile(r";|,(?!\d{3}(?!\d))|\b(?:or|and)\b")
"""In front of an equals sign: what is behind it is one of several answers."""

EQUAL, DIFFERENT, NOTHING = "equal", "different", "no answer found"
NOT_A_NUMBER = "an expression, where a number was asked for"
OTHER_UNIT = "another unit"
FALSE_EQUATION = "an equation that does not hold"
UNREADABLE = "not readable as mathematics"
LONGEST_SHOWN = 200
LONGEST_FORMULA = 2000
LONGEST_NUMBER = 60
CLOSE, ROUNDED = Fraction(1, 10_000), 6
"""A decimal may differ by this share of itself, where both are the same to this many decimal places."""
LOOSE = Fraction(1, 100)
"""Two sides of an equation with decimals may differ by this share: people round as they go."""
PRECISION = 30
"""Digits of a decimal."""


def math(
    sample: RewardInput, *, extract: Extract = "auto", accept: Accept = "simplified", cpu_limit_s: Annotated[float, Field(gt=0)] = 5.0
) -> Score:
    r"""1 where the answers are equal, else 0.

    extract: where the response's answer stands, behind the last </think>. auto: the response itself where it is one bare formula, the
    last <answer></answer>, the only \boxed{} or several as a set, what is behind the last "####" or "the answer is" where that is
    nothing but a formula or begins with a quantity, else math-verify searches: the last formula or number. boxed: in the last \boxed{}.
    tagged: in the last <answer></answer>. number: the last number.
    accept: matters where the reference is a plain number. simplified: the answer has to be a number too (integer, decimal, fraction,
    mixed number, percentage, power of ten, with or without a unit; for a decimal an irrational constant such as \sqrt{2}/2 as well), or
    an equation with a number on its right side, such as 45+25=70, that holds. value: any term that is worth it, such as 45+25 for 70.

    A unit may be missing on either side; units of measurement and currencies that both have must fit: 12 m is 1200 cm, not 12 cm.
    50% is 0.5, and 50 as well. Numerals such as 1001_2 are equal to themselves only. A response without an answer, or one that takes
    longer than cpu_limit_s, is wrong; a reference answer that cannot be read is a failure. Of a reference with "####", as GSM8K has
    them, what is behind it counts; one in words, such as no solution, is compared as text, without regard to case. `extracted` in the
    details is what was compared.
    """
    gold = _reference(_reference_text(sample.answer), cpu_limit_s)
    answer = Answer("")

    def judge() -> str:
        nonlocal answer
        response = tidy(after_thinking(sample.response))
        answer = _answer_in_words(response, extract) if gold.words else _answer(response, extract)
        return _verdict(gold, answer, accept)

    try:
        verdict = limited(cpu_limit_s, judge)
    except TimeLimitExceeded:
        verdict = "comparison takes too long"
    except (RecursionError, MemoryError):
        verdict = "answer too large"
    correct = verdict == EQUAL
    return Score(float(correct), correct, {"extracted": answer.text[:LONGEST_SHOWN], "verdict": verdict})


def warm_math() -> None:
    """Import sympy and the parser and fill their tables: most of a second that the first samples would pay."""
    gold = _read_reference(r"2\sqrt{3}")
    for response in (r"the answer is $\frac{x + 1}{2}$", r"\boxed{\sqrt{12}}", "it is 5"):
        _verdict(gold, _answer(response, "auto"), "simplified")


@dataclass(frozen=True)
class Answer:
    text: str
    """As it stands in the response; empty where there is none."""
    parsed: Parsed | None = None
    """What math-verify's search made of it; None where the text is one formula that was not parsed yet."""
    exclaims: bool = False
    """It ends a sentence: a ! behind it need not be a factorial."""


@dataclass(frozen=True)
class Reference:
    quantity: Quantity | None
    """Where it is a plain number, with or without a unit."""
    numeral: tuple[str, int] | None
    unit: Unit
    parsed: Parsed
    """Without the unit."""
    brackets: str = ""
    """Those of a set or of a tuple, which math-verify takes for each other."""
    words: str | None = None
    """Where it is words and no formula."""


def _verdict(gold: Reference, answer: Answer, accept: Accept) -> str:
    if not answer.text:
        return NOTHING
    if gold.words is not None:
        return EQUAL if in_words(answer.text) == gold.words else DIFFERENT
    based = numeral(unnamed(answer.text))
    if based is not None or gold.numeral is not None:
        return EQUAL if based == gold.numeral else DIFFERENT
    if gold.quantity is None:
        return _expression_verdict(gold, answer.text, answer.parsed)
    whole = answer.text.removesuffix("!") if answer.exclaims else answer.text
    text = _right_side(whole)
    found = quantity(text)
    if found is not None:
        return _number_verdict(gold.quantity, found) if _holds(whole) else FALSE_EQUATION
    if accept == "value":
        return _expression_verdict(gold, text, answer.parsed)
    if gold.quantity.number.exact:
        return NOT_A_NUMBER
    parsed = _parse_whole(split_unit(unwrapped(text))[0])
    return _expression_verdict(gold, text, parsed) if _irrational(parsed) else NOT_A_NUMBER


def _number_verdict(gold: Quantity, found: Quantity) -> str:
    """By exact arithmetic, with room for the rounding of decimals."""
    factor = ratio(found.unit, gold.unit)
    if factor is None:
        return OTHER_UNIT
    right, value = gold.number.value, found.number.value * factor
    hundredth = gold.number.percent != found.number.percent
    if value == right or (hundredth and right in (value * 100, value / 100)):
        return EQUAL
    if gold.number.exact and found.number.exact:
        return DIFFERENT
    close = abs(right - value) <= max(abs(right), abs(value)) * CLOSE
    return EQUAL if close and round(right, ROUNDED) == round(value, ROUNDED) else DIFFERENT


def _expression_verdict(gold: Reference, text: str, parsed: Parsed | None) -> str:
    text, unit = split_unit(unwrapped(text))
    if ratio(unit, gold.unit) != 1:
        return OTHER_UNIT
    if {gold.brackets, _brackets(text)} == {"{", "("}:
        return DIFFERENT
    if parsed is None or unit is not NO_UNIT:
        parsed = _parse_whole(text)
    if not _expressions(parsed):
        return UNREADABLE
    return EQUAL if _library().verify(gold.parsed, parsed, allow_set_relation_comp=True, timeout_seconds=None) else DIFFERENT


def _right_side(text: str) -> str:
    """Of an equation what is said to be equal, as 70 in 45+25=70 and x=70."""
    return unnamed(_sides(text)[-1])


def _sides(text: str) -> list[str]:
    """Of an equation; the whole text where it is none, or one of several answers."""
    text = unwrapped(text)
    equals = [one for one in EQUALS.finditer(text) if text.count("{", 0, one.end()) == text.count("}", 0, one.end())]
    if not equals or SEVERAL.search(text, 0, equals[-1].end()):
        return [text]
    places = [0, *(place for one in equals for place in one.span()), len(text)]
    return [text[start:end] for start, end in zip(places[::2], places[1::2], strict=True)]


def _holds(text: str) -> bool:
    """False where sides that are nothing but numbers differ: 17=18."""
    values = [value for value in map(_worth, _sides(text)) if value is not None]
    room = LOOSE if "." in text else CLOSE**3
    scales = (1, 100, Fraction(1, 100)) if "%" in text else (1,)

    def same(one: Fraction, other: Fraction) -> bool:
        return any(abs(one - other * scale) <= max(abs(one), abs(other * scale)) * room for scale in scales)

    return all(same(values[-1], value) for value in values[:-1])


def _worth(side: str) -> Fraction | None:
    """Of a number or arithmetic without letters and units."""
    side = unwrapped(side.replace("\\$", ""))
    number = plain_number(side)
    if number is not None:
        return number.value
    side = SIZES.sub("", side)
    if not ARITHMETIC.fullmatch(side) or MIXED.search(side):
        return None
    parsed = _expressions(_parse_whole(TIMES.sub(r"\\cdot ", side)))
    if len(parsed) != 1 or not getattr(parsed[0], "is_comparable", False):
        return None
    value = parsed[0].evalf(PRECISION)
    return Fraction(str(value)) if value.is_Float or value.is_Integer else None


def _irrational(parsed: Parsed) -> bool:
    return any(expression.is_comparable and expression.doit().is_rational is False for expression in _expressions(parsed))


def _answer(response: str, extract: Extract) -> Answer:
    response = plain_boxes(response)
    if extract == "tagged":
        return _said(_inside_boxed(last_tagged(response) or ""))
    if extract == "boxed":
        return _said(last_boxed(response) or "")
    if extract == "number":
        numbers = LAST_NUMBER.findall(response)
        return Answer(numbers[-1] if numbers else "")
    response = LABEL.sub("", response)
    if _is_answer(response):
        return Answer(response.strip())
    tagged = last_tagged(response)
    if tagged is not None:
        return _said(_inside_boxed(tagged))
    if boxes := list(dict.fromkeys(box.strip() for box in reversed(all_boxed(response)))):
        return _said(boxes[0]) if len(boxes) == 1 else Answer(", ".join(boxes))
    stated = STATED.findall(response)
    found = _alternatives(stated[-1]) or _leading(stated[-1]) if stated else _alternatives(response)
    return found or _searched(response)


def _said(text: str) -> Answer:
    """What stands in a place for the answer: a formula, or a sentence around it."""
    text = LABEL.sub("", text).strip()
    if _is_answer(text):
        return Answer(text)
    stated = STATED.findall(text)
    if stated and _is_answer(stated[-1].strip("*` .!\r\t")):
        return Answer(stated[-1].strip("*` .!\r\t"))
    return _leading(stated[-1] if stated else text) or Answer(text)


def _alternatives(text: str) -> Answer | None:
    """Of a text that is formulas only, with words between them; the same number twice is one."""
    text = text.strip("*` .\r\n\t")
    parts = ALTERNATIVES.split(EITHER.sub("", text))
    if not all(map(_is_answer, parts)):
        return None
    different = {_key(part): part for part in reversed(parts)}
    return Answer(", ".join(map(unwrapped, reversed(different.values()))) if len(different) > 1 else parts[0], exclaims=len(parts) == 1)


def _key(text: str) -> Any:
    """Answers with the same are the same: 0.5 and 50%."""
    found = quantity(text)
    return (found.number.value, found.unit) if found is not None else text


def _leading(text: str) -> Answer | None:
    """The quantity that the text begins with, 42 apples of: 42 apples in 3 days."""
    text = text.strip("*` .!\r\n\t")
    remark = REMARK.search(text)
    if remark is None or SEVERAL.search(text, remark.start()) or quantity(text[: remark.start()]) is None:
        return None
    return Answer(text[: remark.start()].strip())


def _answer_in_words(response: str, extract: Extract) -> Answer:
    """Where the reference is words, which no search for formulas would find."""
    if extract == "number":
        return _answer(response, extract)
    response = plain_boxes(response)
    place = last_boxed(response) if extract == "boxed" else last_tagged(response)
    if extract == "auto" and place is None:
        boxes = set(all_boxed(response))
        place = ", ".join(sorted(boxes)) if boxes else response
    text = _inside_boxed(place or "")
    stated = STATED.findall(text)
    return Answer((stated[-1] if stated else text).strip())


def _searched(response: str) -> Answer:
    """Where math-verify finds something in running text."""
    parsed = _library().parse(response.replace("\\$", ""), [_latex(), _plain_text()], parsing_timeout=None)
    if not parsed:
        return Answer("")
    text = next((part for part in parsed if isinstance(part, str)), "") or str(parsed[0])
    beyond = GOES_ON.match(response, response.rfind(text) + len(text)) if text in response else None
    if beyond is not None:
        return Answer(text + beyond[0].rstrip("."))
    percent = not isinstance(parsed[0], str) and _library().grader.get_pct_val(parsed[0]) is not None
    text = f"{text}%" if percent and not text.endswith("%") else text
    end = max(0, response.rfind(text))
    other = ONE_OR_OTHER.search(response, max(0, end - LONGEST_NUMBER), end)
    if other is not None and _key(other[1]) != _key(text):
        return Answer(f"{other[1]}, {text}")
    return Answer(text, parsed)


def _inside_boxed(text: str) -> str:
    r"""Tags around a \boxed{}."""
    boxed = last_boxed(text)
    return text if boxed is None else boxed.strip()


def _is_answer(text: str) -> bool:
    """Nothing but mathematics, without words or delimiters around it, or a number with its unit."""
    text = text.strip()
    if not text or len(text) > LONGEST_FORMULA or "\n" in text or "#" in text:
        return False
    plain = unwrapped(text)
    return not (DELIMITED.search(plain) or WORDS.search(NO_WORDS.sub(" ", plain))) or quantity(text) is not None


def _parse_whole(text: str) -> Parsed:
    r"""The text as one formula. math-verify's search would take the 2 out of a bare `2\sqrt{3}`."""
    text = as_latex(unwrapped(_inside_boxed(text)))
    number = plain_number(text)
    if number is not None:
        return _parsed_number(number)
    if not DELIMITED.search(text):
        if AMBIGUOUS.search(text):
            return []
        text = f"${text.replace('**', '^')}$"
    return _library().parse(text, [_latex()], parsing_timeout=None)


def _parsed_number(number: PlainNumber) -> Parsed:
    """For comparisons with what is no plain number. A percentage is its value, and the number in front of the sign."""
    import sympy  # type: ignore[import-untyped]

    value = sympy.Rational(number.value.numerator, number.value.denominator)
    exact = [value, 100 * value] if number.percent else [value]
    return exact if number.exact else [sympy.Float(one, PRECISION) for one in exact]


def _expressions(parsed: Parsed) -> Parsed:
    """What was read as mathematics and is defined (1/0 is not)."""
    import sympy

    return [part for part in parsed if not isinstance(part, str) and not part.has(sympy.nan, sympy.zoo)]


def _reference_text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or (isinstance(answer, float) and not floats.isfinite(answer)):
        raise RewardFailed(f"reward math: the reference answer must be a number or a string, got {answer!r:.200}")
    return str(answer)


@lru_cache(maxsize=8192)
def _reference(text: str, cpu_limit_s: float) -> Reference:
    """The samples of a group share their reference: it is parsed once."""
    try:
        return limited(cpu_limit_s, lambda: _read_reference(text))
    except (TimeLimitExceeded, RecursionError, MemoryError) as error:
        raise RewardFailed(f"reward math: the reference answer {text!r:.200} cannot be read: {error}") from error


def _read_reference(text: str) -> Reference:
    inner = unwrapped(_inside_boxed(plain_boxes(REFERENCE.sub("", tidy(text.strip())))))
    if words := in_words(inner):
        return Reference(None, None, NO_UNIT, [], words=words)
    based, number = numeral(unnamed(inner)), quantity(inner)
    body, unit = (inner, number.unit) if number is not None else split_unit(inner)
    parsed = _parsed_number(number.number) if number is not None else _parse_whole(body)
    if based is None and not _expressions(parsed):
        raise RewardFailed(f"reward math: the reference answer {text!r:.200} is no mathematical expression that math-verify can read")
    return Reference(number, based, unit, parsed, _brackets(body))


def _brackets(text: str) -> str:
    return "{" if text.startswith(("\\{", "\\left\\{")) else "(" if text.startswith(("(", "\\left(")) else ""


@lru_cache(maxsize=1)
def _latex() -> Any:
    """It would take the letters of 2t, 5m and 3c for units."""
    library = _library()
    settings = library.LatexExtractionConfig()
    return replace(settings, normalization_config=replace(settings.normalization_config, units=False))


@lru_cache(maxsize=1)
def _plain_text() -> Any:
    return _library().ExprExtractionConfig()


@lru_cache(maxsize=1)
def _library() -> Any:
    import math_verify

    # Its own time limits count whole seconds of wall-clock time; they are off in favour of ours, and it would warn about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
