"""Readers of instructions' arguments as data sets hold them; ValueError if one does not fit."""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any

AROUND = 0.1
"""Share of a number that "around" it may be off, and one at the least."""


def whole(number: Any, *, least: int = 0) -> int:
    """Text is equal to no count."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise ValueError(f"a count must be a whole number, got {number!r}")
    if number < least:
        raise ValueError(f"a count must be at least {least} here, got {number}")
    return int(number)


def phrase(name: str, value: Any) -> str:
    """The empty text is in every response."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text with something in it, got {value!r}")
    return value.strip()


def phrases(name: str, each: str, value: Any) -> list[str]:
    """A string would pass for the list of its letters, and an empty list asks for nothing."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a list of words, got {value!r}")
    values = list(value)
    if not values:
        raise ValueError(f"{name} must hold at least one word")
    return [phrase(each, one) for one in values]


def one_phrase(name: str, value: Any) -> str:
    """A text, or a list of one: the data have both."""
    values = value if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    return phrase(name, values[0] if isinstance(values, list) and len(values) == 1 else values)


def options(value: Any) -> list[str]:
    """A list, or a text that puts "/", "or" or commas between them."""
    if not isinstance(value, str):
        return phrases("options", "an option", value)
    separator = next((one for one in ("/", r"\bor\b") if re.search(one, value)), ",")
    return phrases("options", "an option", [one for one in re.split(separator, phrase("options", value)) if one.strip()])


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
    """off: how far "around" may be from the number; a tenth of it otherwise."""
    off = max(round(whole(number) * AROUND), 1) if off is None else off
    if quantifier == "at least":
        return count >= number
    if quantifier == "at most":
        return count <= number
    if quantifier == "around":
        return abs(count - number) <= off
    raise ValueError(f"quantifier must be 'at least', 'at most' or 'around', got {quantifier!r}")
