from __future__ import annotations

import collections
import decimal
import fractions
import math
import re
from typing import Any, Literal

Compare = Literal["auto", "exact", "lines", "numeric"]
INTEGER = re.compile(r"[+-]?\d+")
LISTS = (list, tuple, range, collections.deque)
NUMBERS = (int, float, decimal.Decimal, fractions.Fraction)
A_HUNDREDTH = 0.01
LEAST = 1e-12
"""Difference that rounding alone may cause, as in math.sin(math.pi)."""


def same_output(expected: str, printed: str, compare: Compare, tolerance: float) -> bool:
    """Return True if the output is as expected.

    exact: equal in every character. lines: equal by line, without white space at line ends and empty lines at the end. numeric: equal word
    by word, numbers within `tolerance` (see CodeReward); two integers must be equal. auto: as lines, but lines whose expected text has a
    decimal point are compared as numeric, with an absolute error of at most a hundredth of the expected number.
    """
    if compare == "exact":
        return expected == printed
    if compare == "numeric":
        return _same_words(expected, printed, tolerance, math.inf)
    wanted, found = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (expected, printed))
    if compare == "lines" or len(wanted) != len(found):
        return wanted == found
    return all(
        one == other or ("." in one and _same_words(one, other, tolerance, A_HUNDREDTH)) for one, other in zip(wanted, found, strict=True)
    )


def _same_words(expected: str, printed: str, tolerance: float, share: float) -> bool:
    wanted, found = expected.split(), printed.split()
    return len(wanted) == len(found) and all(_same_word(one, other, tolerance, share) for one, other in zip(wanted, found, strict=True))


def _same_word(wanted: str, found: str, tolerance: float, share: float) -> bool:
    if wanted == found:
        return True
    if INTEGER.fullmatch(wanted) and INTEGER.fullmatch(found):
        return wanted.lstrip("+") == found.lstrip("+")
    try:
        number = float(wanted)
        absolute = min(tolerance, abs(number) * share) if number else tolerance
        return _close(number, float(found), LEAST if INTEGER.fullmatch(wanted) else tolerance, absolute)
    except ValueError:
        return False


def _close(wanted: float, found: float, relative: float, absolute: float) -> bool:
    return (math.isnan(wanted) and math.isnan(found)) or math.isclose(wanted, found, rel_tol=relative, abs_tol=absolute)


def same_value(expected: Any, found: Any, tolerance: float) -> bool:
    """Compare values as JSON (sequences as lists, keys as strings). `tolerance`: maximum relative error if the expected number is no
    integer."""
    if isinstance(expected, LISTS) and isinstance(found, LISTS):
        pairs = zip(expected, found, strict=False)
        return len(expected) == len(found) and all(same_value(one, other, tolerance) for one, other in pairs)
    if isinstance(expected, dict) and isinstance(found, dict):
        wanted, had = ({str(key): value for key, value in one.items()} for one in (expected, found))
        return wanted.keys() == had.keys() and all(same_value(wanted[key], had[key], tolerance) for key in wanted)
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, NUMBERS) and isinstance(found, NUMBERS):
        if isinstance(expected, int) and isinstance(found, int):
            return expected == found
        # An expected integer is exact: n*n/2 must not pass for the sum of 1 to n.
        relative = min(tolerance, LEAST) if isinstance(expected, int) else tolerance
        try:
            return _close(float(expected), float(found), relative, min(tolerance, LEAST))
        except OverflowError:
            return False
    if isinstance(expected, set | frozenset) and isinstance(found, set | frozenset):
        return expected == found
    return type(expected) is type(found) and bool(expected == found)
