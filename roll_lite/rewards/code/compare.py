"""Is this what was expected? Decided in the trusted process, on plain data."""

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
"""Values that are closer than this are rounding noise about zero, such as math.sin(math.pi)."""


def same_output(expected: str, printed: str, compare: Compare, tolerance: float) -> bool:
    """exact: every character. lines: white space at the ends of lines and empty lines at the end do not count. numeric: word by word,
    integers exactly, other numbers with an absolute or relative error within the tolerance, as contests put it. auto: line by line, and
    where a line has decimals numerically, as the judges of the public sets do: 0.50000 is 0.5. There an absolute error may be at most a
    hundredth of the number: contests would take 0.000000002 for 0.000000001."""
    if compare == "exact":
        return expected == printed
    if compare == "numeric":
        return _same_words(expected, printed, tolerance, math.inf)
    wanted, found = _lines(expected), _lines(printed)
    if compare == "lines" or len(wanted) != len(found):
        return wanted == found
    return all(
        one == other or ("." in one and _same_words(one, other, tolerance, A_HUNDREDTH)) for one, other in zip(wanted, found, strict=True)
    )


def _same_words(expected: str, printed: str, tolerance: float, share: float) -> bool:
    """`share`: of a number other than 0 that an absolute error may be."""
    wanted, found = expected.split(), printed.split()
    return len(wanted) == len(found) and all(_same_word(one, other, tolerance, share) for one, other in zip(wanted, found, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


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
    """As JSON would have it: what has an order is a list, keys are strings. Where an integer is expected, a float may differ by its last
    digits only; where a float is, the relative error may be the tolerance."""
    if isinstance(expected, LISTS) and isinstance(found, LISTS):
        pairs = zip(expected, found, strict=False)
        return len(expected) == len(found) and all(same_value(one, other, tolerance) for one, other in pairs)
    if isinstance(expected, dict) and isinstance(found, dict):
        wanted, had = ({str(key): value for key, value in one.items()} for one in (expected, found))
        return wanted.keys() == had.keys() and all(same_value(wanted[key], had[key], tolerance) for key in wanted)
    if isinstance(expected, bool) or isinstance(found, bool):
        return isinstance(expected, bool) and isinstance(found, bool) and expected == found
    if isinstance(expected, NUMBERS) and isinstance(found, NUMBERS):
        if isinstance(expected, int) and isinstance(found, int):
            return expected == found
        # n*n/2 is no substitute for the sum of 1 to n, which is an integer.
        relative = min(tolerance, LEAST) if isinstance(expected, int) else tolerance
        try:
            return _close(float(expected), float(found), relative, min(tolerance, LEAST))
        except OverflowError:
            return False
    if isinstance(expected, set | frozenset) and isinstance(found, set | frozenset):
        return expected == found
    return type(expected) is type(found) and bool(expected == found)
