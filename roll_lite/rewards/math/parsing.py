"""Mathematics as sympy expressions, by the library math-verify: one formula as a whole, or what stands in running text."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from roll_lite.rewards.answer_extraction import HAN, last_boxed
from roll_lite.rewards.math.notation import as_latex
from roll_lite.rewards.math.numbers import PlainNumber, numeral, plain_number, quantity, unwrapped

Parsed = list[Any]
"""What math-verify makes of a text: sympy expressions, and strings that it could not read."""

DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
AMBIGUOUS = re.compile(r"\d\s+\d|(?:\*\*|\^)\s*(?:\d+|[A-Za-z])\s*(?:\*\*|\^)")
"""1 2 would be read as a product, 2^3^2 as (2^3)^2."""
POWERS = re.compile(r"((?:\^|\*\*)\s*(?:\d+|\{[^{}]*\}))\s+(?=\d)")
"""2^6 3^5 is a product."""
WORDS = re.compile(rf"[A-Za-z]{{2,}}|[{HAN}]")
NO_WORDS = re.compile(
    r"\\text\{[^{}]*\}|\\(?:begin|end)\{[a-z]+\*?\}|\\[A-Za-z]+|(?<![A-Za-z])(?:sqrt|sin|cos|tan|log|ln|exp|pi)(?![A-Za-z])"
)
IN_DOLLARS = re.compile(r"\$[^$\n]*[\w)}]\*\*[\w({-][^$\n]*\$")
"""A formula with powers as Python writes them."""
LONGEST_FORMULA = 2000
PRECISION = 30
"""Digits of a decimal."""


def is_formula(text: str) -> bool:
    """Nothing but mathematics, without words or delimiters around it, or a number with its unit."""
    text = text.strip()
    if not text or len(text) > LONGEST_FORMULA or "\n" in text or "#" in text:
        return False
    plain = unwrapped(text)
    return (
        not (DELIMITED.search(plain) or WORDS.search(NO_WORDS.sub(" ", plain))) or quantity(text) is not None or numeral(text) is not None
    )


def parse_whole(text: str) -> Parsed:
    r"""The text as one formula. math-verify's search would take the 2 out of a bare `2\sqrt{3}`."""
    text = as_latex(unwrapped(inside_boxed(text)))
    number = plain_number(text)
    if number is not None:
        return parsed_number(number)
    if not DELIMITED.search(text):
        text = POWERS.sub(r"\1\\cdot ", text)
        if AMBIGUOUS.search(text):
            return []
        text = f"${text.replace('**', '^')}$"
    return library().parse(text, [_latex()], parsing_timeout=None)


def parsed_number(number: PlainNumber) -> Parsed:
    """For comparisons with what is no plain number. A percentage is its value, and the number in front of the sign."""
    import sympy  # type: ignore[import-untyped]

    value = sympy.Rational(number.value.numerator, number.value.denominator)
    exact = [value, 100 * value] if number.percent else [value]
    return exact if number.exact else [sympy.Float(one, PRECISION) for one in exact]


def searched(text: str) -> tuple[str, Parsed]:
    """What math-verify finds in running text, as it stands there and as it reads it; ("", []) where it finds nothing."""
    text = IN_DOLLARS.sub(lambda one: one[0].replace("**", "^"), text.replace("\\$", ""))
    parsed = library().parse(text, [_latex(), _plain_text()], parsing_timeout=None)
    if not parsed:
        return "", []
    return next((part for part in parsed if isinstance(part, str)), "") or str(parsed[0]), parsed


def is_percentage(parsed: Parsed) -> bool:
    return not isinstance(parsed[0], str) and library().grader.get_pct_val(parsed[0]) is not None


def expressions(parsed: Parsed) -> Parsed:
    """What was read as mathematics and is defined (1/0 is not)."""
    import sympy

    return [part for part in parsed if not isinstance(part, str) and not part.has(sympy.nan, sympy.zoo)]


def inside_boxed(text: str) -> str:
    r"""Tags around a \boxed{}."""
    boxed = last_boxed(text)
    return text if boxed is None else boxed.strip()


@lru_cache(maxsize=1)
def library() -> Any:
    import math_verify

    # Its own time limits count whole seconds of wall-clock time; they are off in favour of ours, and it would warn about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


@lru_cache(maxsize=1)
def _latex() -> Any:
    """It would take the letters of 2t, 5m and 3c for units."""
    settings = library().LatexExtractionConfig()
    return replace(settings, normalization_config=replace(settings.normalization_config, units=False))


@lru_cache(maxsize=1)
def _plain_text() -> Any:
    return library().ExprExtractionConfig()
