"""Reward `math`: the response's answer is mathematically equal to the reference answer, by the library math-verify."""

from __future__ import annotations

import logging
import math as floats
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.numbers import DIGITS, MIXED_NUMBER, NUMBER, PlainNumber, is_number, plain_number, unwrapped
from roll_lite.rewards.time_limit import TimeLimitExceeded, limited

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
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

EQUAL, DIFFERENT, NOTHING = "equal", "different", "no answer found"
NOT_A_NUMBER = "an expression, where a number was asked for"
UNREADABLE = "not readable as mathematics"
LONGEST_SHOWN = 200
MOST_BOXES = 20


def math(sample: RewardInput, *, extract: Extract = "auto", accept: Accept = "simplified", cpu_limit_s: float = 5.0) -> Score:
    r"""1 where the answers are equal, else 0.

    extract says where the response's answer stands. auto: the response itself where it is one bare formula, the last
    <answer></answer>, the only \boxed{}, else math-verify searches: several \boxed{} as a set, "the final answer is", then the last
    formula or number. boxed: in the last \boxed{}. tagged: in the last <answer></answer>. number: the last number.
    accept matters where the reference is a plain number. simplified: the answer has to be a number too (integer, decimal, fraction,
    mixed number, percentage, power of ten, with or without a unit; for a decimal an irrational constant such as \sqrt{2}/2 as well).
    value: any term that is worth it, such as 45+25 for 70.
    A response without an answer, or one that takes longer than cpu_limit_s to compare, is wrong; a reference answer that cannot be
    read is a failure. `extracted` in the details is what was compared.
    """
    text = _reference_text(sample.answer)
    gold = _reference(text, cpu_limit_s)
    answer = Answer("")
    try:
        answer = limited(cpu_limit_s, lambda: _answer(sample.response, extract))
        verdict = limited(cpu_limit_s, lambda: _verdict(gold, answer, accept))
    except TimeLimitExceeded:
        verdict = "comparison takes too long"
    except (RecursionError, MemoryError):
        verdict = "answer too large"
    correct = verdict == EQUAL
    return Score(float(correct), correct, {"extracted": answer.text[:LONGEST_SHOWN], "verdict": verdict})


def warm_math() -> None:
    """Import sympy and the parser and fill their tables: most of a second that the first samples would pay."""
    gold = Reference(None, _parse_whole(r"2\sqrt{3}"))
    for response in (r"the answer is $\frac{x + 1}{2}$", r"\boxed{\sqrt{12}}", "it is 5"):
        _verdict(gold, _answer(response, "auto"), "simplified")


@dataclass(frozen=True)
class Answer:
    text: str
    """As it stands in the response; empty where there is none."""
    parsed: Parsed | None = None
    """What math-verify's search made of it; None where the text is one formula that was not parsed yet."""


@dataclass(frozen=True)
class Reference:
    number: PlainNumber | None
    parsed: Parsed


def _verdict(gold: Reference, answer: Answer, accept: Accept) -> str:
    if not answer.text and not answer.parsed:
        return NOTHING
    simplified = accept == "simplified" and gold.number is not None
    if answer.parsed is None:
        known = _decided(gold.number, plain_number(answer.text))
        if known is not None:
            return known
    elif simplified:
        answer = Answer(answer.text.rpartition("=")[2] if "=" in answer.text else answer.text, answer.parsed)
    number = is_number(answer.text.strip("*"))
    if simplified and not number and gold.number is not None and gold.number.exact:
        return NOT_A_NUMBER
    parsed = _parse_whole(answer.text) if answer.parsed is None else answer.parsed
    if answer.parsed is None and not _expressions(parsed):
        return UNREADABLE
    if simplified and not number and not _irrational(parsed):
        return NOT_A_NUMBER
    return EQUAL if _library().verify(gold.parsed, parsed, timeout_seconds=None) else DIFFERENT


def _decided(gold: PlainNumber | None, found: PlainNumber | None) -> str | None:
    """The verdict where exact arithmetic has it. The rounding of decimals and the meaning of % are left to math-verify."""
    if gold is None or found is None or gold.percent or found.percent:
        return None
    if gold.value == found.value:
        return EQUAL
    both_exact = gold.exact and found.exact
    far = abs(gold.value - found.value) > max(abs(gold.value), abs(found.value)) / 100
    return DIFFERENT if both_exact or far else None


def _irrational(parsed: Parsed) -> bool:
    return any(expression.is_comparable and expression.doit().is_rational is False for expression in _expressions(parsed))


def _answer(response: str, extract: Extract) -> Answer:
    if extract == "tagged":
        tags = TAGGED.findall(response)
        return Answer(_inside_boxed(tags[-1].strip()) if tags else "")
    if extract == "boxed":
        return Answer((_last_boxed(response) or "").strip())
    if extract == "number":
        numbers = LAST_NUMBER.findall(response)
        return Answer(numbers[-1] if numbers else "")
    if _is_formula(response) or plain_number(response) is not None:
        return Answer(response.strip())
    if extract == "auto" and TAGGED.search(response):
        return _answer(response, "tagged")
    boxes = set(_boxes(response))
    if len(boxes) == 1:
        boxed = boxes.pop().strip()
        if plain_number(boxed) is not None or _expressions(_parse_whole(boxed)):
            return Answer(boxed)
    parsed = _library().parse(response, parsing_timeout=None)
    text = next((part for part in parsed if isinstance(part, str)), "")
    return Answer(text or str(parsed[0]), parsed) if parsed else Answer("")


def _inside_boxed(text: str) -> str:
    r"""Tags around a \boxed{}."""
    boxed = _last_boxed(text)
    return text if boxed is None else boxed.strip()


def _parse_whole(text: str) -> Parsed:
    r"""The text as one formula. math-verify's search would take the 2 out of a bare `2\sqrt{3}`, the 1 out of `1 1/2` or `1e5`."""
    text = text.strip()
    text = unwrapped(text) if plain_number(text) is not None else text
    number, mixed = NUMBER.fullmatch(text), MIXED_NUMBER.fullmatch(text)
    if number:
        digits = re.sub(r"[ ,]", "", number["digits"])
        plain = format(Decimal(number["sign"] + digits + (number["exponent"] or "")), "f")
        return _library().parse(plain + ("%" if number["percent"] else ""), parsing_timeout=None)
    if mixed:
        text = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if not DELIMITED.search(text):
        if AMBIGUOUS.search(text):
            return []
        text = f"${text.replace('**', '^')}$"
    return _library().parse(text, [_latex()], parsing_timeout=None)


def _is_formula(text: str) -> bool:
    """Nothing but mathematics, without words or delimiters around it."""
    return "\n" not in text.strip() and not DELIMITED.search(text) and not WORDS.search(NO_WORDS.sub(" ", text))


def _expressions(parsed: Parsed) -> Parsed:
    """What was read as mathematics and is defined (1/0 is not)."""
    import sympy  # type: ignore[import-untyped]

    return [part for part in parsed if not isinstance(part, str) and not part.has(sympy.nan, sympy.zoo)]


def _last_boxed(text: str) -> str | None:
    r"""Contents of the last \boxed{} whose braces are closed."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for position in range(start + len("\\boxed"), len(text)):
            character = text[position]
            if character in "{}" and text[position - 1] != "\\":
                depth += 1 if character == "{" else -1
                if depth == 0:
                    return text[start + len("\\boxed{") : position]
        start = text.rfind("\\boxed{", 0, start)
    return None


def _boxes(text: str) -> list[str]:
    r"""Contents of all \boxed{}, the last first."""
    found: list[str] = []
    while "\\boxed{" in text and len(found) < MOST_BOXES:
        last = _last_boxed(text)
        if last is None:
            break
        found.append(last)
        text = text[: text.rfind("\\boxed{" + last)]
    return found


def _reference_text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or (isinstance(answer, float) and not floats.isfinite(answer)):
        raise RewardFailed(f"reward math: the reference answer must be a number or a string, got {answer!r:.200}")
    return str(answer)


def _reference(text: str, cpu_limit_s: float) -> Reference:
    try:
        return _parsed_reference(text, cpu_limit_s)
    except (TimeLimitExceeded, RecursionError, MemoryError) as error:
        raise RewardFailed(f"reward math: the reference answer {text!r:.200} cannot be read: {error}") from error


@lru_cache(maxsize=8192)
def _parsed_reference(text: str, cpu_limit_s: float) -> Reference:
    """The samples of a group share their reference: it is parsed once."""
    inner = _inside_boxed(text.strip())
    parsed = limited(cpu_limit_s, lambda: _parse_whole(text))
    if not _expressions(parsed):
        raise RewardFailed(f"reward math: the reference answer {text!r:.200} is no mathematical expression that math-verify can read")
    return Reference(plain_number(inner), parsed)


@lru_cache(maxsize=1)
def _latex() -> Any:
    return _library().LatexExtractionConfig()


@lru_cache(maxsize=1)
def _library() -> Any:
    import math_verify

    # Its own time limits count whole seconds of wall-clock time; they are off in favour of ours, and it would warn about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
