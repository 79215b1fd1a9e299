"""Readers of instruction arguments as data sets write them; ValueError for a bad one."""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any

from roll_lite.rewards.text.instruction_checks.parts import words

AROUND = 0.1
"""Tolerance of the quantifier "around": this share of the number, but at least 1."""


def whole(number: Any, *, least: int = 0) -> int:
    """Return a count; ValueError for text, floats, and numbers below `least`."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise ValueError(f"a count must be a whole number, got {number!r}")
    if number < least:
        raise ValueError(f"a count must be at least {least} here, got {number}")
    return int(number)


def phrase(name: str, value: Any) -> str:
    """Strip a text. ValueError if nothing is left, since every response contains the empty text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text with something in it, got {value!r}")
    return value.strip()


def phrases(name: str, each: str, value: Any) -> list[str]:
    """Check a list of texts and strip each. ValueError for an empty list, or for a string, which would pass as a list of letters."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a list of words, got {value!r}")
    values = list(value)
    if not values:
        raise ValueError(f"{name} must hold at least one word")
    return [phrase(each, one) for one in values]


def one_phrase(name: str, value: Any) -> str:
    """Check and strip a text, given alone or as the only item of a list: data sets have both."""
    values = value if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    return phrase(name, values[0] if isinstance(values, list) and len(values) == 1 else values)


def options(value: Any) -> list[str]:
    """Options from a list, or from a text with "/", "or" or commas between them."""
    if not isinstance(value, str):
        return phrases("options", "an option", value)
    separator = next((one for one in ("/", r"\bor\b") if re.search(one, value)), ",")
    return phrases("options", "an option", [one for one in re.split(separator, phrase("options", value)) if one.strip()])


def letter_of(value: Any) -> str:
    if len(letter := phrase("letter", value)) != 1:
        raise ValueError(f"letter must be one character, got {value!r}")
    return letter


def words_of(name: str, value: Any) -> list[str]:
    """Words of a text, which may be the only item of a list. ValueError if there are none."""
    wanted = words(one_phrase(name, value))
    if not wanted:
        raise ValueError(f"{name} must hold a word, got {value!r}")
    return wanted


def share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 100:
        raise ValueError(f"percentage must be a number from 0 to 100, got {value!r}")
    return float(value)


def holds(count: int, relation: str, number: int) -> bool:
    whole(number)
    if relation == "at least":
        return count >= number
    if relation == "less than":
        return count < number
    raise ValueError(f"relation must be 'at least' or 'less than', got {relation!r}")


def quantified(count: int, quantifier: str, number: int, off: int | None = None) -> bool:
    """True if `count` is "at least", "at most" or "around" the number. `off`: tolerance of "around"; None: a tenth of the number, at
    least 1."""
    off = max(round(whole(number) * AROUND), 1) if off is None else off
    if quantifier == "at least":
        return count >= number
    if quantifier == "at most":
        return count <= number
    if quantifier == "around":
        return abs(count - number) <= off
    raise ValueError(f"quantifier must be 'at least', 'at most' or 'around', got {quantifier!r}")
