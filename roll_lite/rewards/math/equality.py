"""Is an answer worth what the reference is? Numbers by exact arithmetic, constants at high precision, all else by math-verify."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from roll_lite.rewards.math.answers import SEVERAL
from roll_lite.rewards.math.numbers import Quantity, plain_number, unnamed, unwrapped
from roll_lite.rewards.math.parsing import PRECISION, Parsed, expressions, library, parse_whole
from roll_lite.rewards.math.units import NO_UNIT, Unit, ratio, split_unit

T = TypeVar("T")
U = TypeVar("U")

EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)")
APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])|≈")
SIZES, TIMES = re.compile(r"\\(?:left|right)(?![A-Za-z])"), re.compile(r"(?<=[\d)}!])\s*(?=\()|(?<=\))\s*(?=\d)")
"""2(9) is a product, which math-verify does not know."""
MIXED = re.compile(r"\d\s*\\frac")
ARITHMETIC = re.compile(r"(?:[\d\s.,+\-*/^(){}!]|\\(?:frac|sqrt|cdot|times|div)(?![A-Za-z]))+")
VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?(?:\s|~|\\ |\\text\s*\{|\\,)*(?:([ap])\.?\s?m\.?)?\s*\}?", re.IGNORECASE)
PROPORTION = re.compile(r"\d+(?:\.\d+)?(?: *: *\d+(?:\.\d+)?)+")

CLOSE, ROUNDED = Fraction(1, 10_000), 6
"""A decimal may differ by this share of itself, where both are the same to this many decimal places."""
LOOSE = Fraction(1, 100)
"""Two sides of an equation with decimals may differ by this share: people round as they go."""
DIGITS_OF_CONSTANTS = 60
MOST_DIGITS = 5000
ALL_DIGITS_BUT = 15
"""Of the digits that are computed, those that rounding may have spoiled."""


def same_number(gold: Quantity, found: Quantity, rounded: bool) -> bool | None:
    """By exact arithmetic, with room for the rounding of decimals; None where the units do not fit. `rounded`: the reference is a decimal
    that stands for all that rounds to it."""
    factor = ratio(found.unit, gold.unit)
    if factor is None:
        return None
    right, value = gold.number.value, found.number.value * factor
    if value == right:
        return True
    if gold.number.percent != found.number.percent and right == (value * 100 if found.number.percent else value / 100):
        return True  # the number in front of the sign
    if rounded and (places := gold.number.places) is not None and abs(right - value) * 10**places * 2 <= 1:
        return True
    return not (gold.number.exact and found.number.exact) and _close(right, value)


def _close(one: Fraction, other: Fraction) -> bool:
    return abs(one - other) <= max(abs(one), abs(other)) * CLOSE and round(one, ROUNDED) == round(other, ROUNDED)


# ---------------------------------------------------------------- expressions


def same_expression(gold: Parsed, found: Parsed) -> bool:
    """math-verify takes what is tiny for nothing and what is huge for the same: constants are compared here."""
    pairs = [(one, other) for one in expressions(gold) for other in expressions(found)]
    known = [same for same in (_same_constants(one, other) for one, other in pairs) if same is not None]
    if len(known) == len(pairs):
        return any(known)
    return bool(library().verify(gold, found, allow_set_relation_comp=True, timeout_seconds=None))


def _same_constants(one: Any, other: Any) -> bool | None:
    """None where one of the two is neither a constant nor a set or tuple of them."""
    import sympy  # type: ignore[import-untyped]

    for kind, same in ((sympy.FiniteSet, same_items), (sympy.Tuple, _same_in_order)):
        if isinstance(one, kind) and isinstance(other, kind):
            return same(one.args, other.args, _same_constant) if all(map(_is_constant, (*one.args, *other.args))) else None
    return _same_constant(one, other) if _is_constant(one) and _is_constant(other) else None


def same_items(wanted: Sequence[T], found: Sequence[U], same: Callable[[T, U], bool]) -> bool:
    """In whatever order, each as often as in the other."""
    left = list(found)
    for one in wanted:
        place = next((place for place, other in enumerate(left) if same(one, other)), None)
        if place is None:
            return False
        left.pop(place)
    return not left


def _same_in_order(wanted: Sequence[T], found: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    return len(wanted) == len(found) and all(map(same, wanted, found))


def _is_constant(expression: Any) -> bool:
    import sympy

    return isinstance(expression, sympy.Expr) and bool(expression.is_number) and expression.is_finite is not False


def _same_constant(one: Any, other: Any) -> bool:
    import sympy

    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    if one.has(sympy.Float) or other.has(sympy.Float):
        return _both(one, other, PRECISION, lambda a, b: _close(*(Fraction(str(part)) for part in (a, b))))
    digits = DIGITS_OF_CONSTANTS
    if one.is_rational and other.is_rational:  # to the last digit of an integer
        digits += max(0, min(MOST_DIGITS, *(int(sympy.log(abs(part) + 1, 10).evalf(10)) for part in (one, other))))
    return _both(one, other, digits, lambda a, b: bool(abs(a - b) <= max(abs(a), abs(b)) * sympy.Float(10) ** (ALL_DIGITS_BUT - digits)))


def _both(one: Any, other: Any, digits: int, same: Callable[[Any, Any], bool]) -> bool:
    """Real parts and imaginary parts are the same."""
    values = [expression.evalf(digits).as_real_imag() for expression in (one, other)]
    return all(a.is_Number and b.is_Number and (a == b or same(a, b)) for a, b in zip(*values, strict=True))


def irrational(parsed: Parsed) -> bool:
    """A real constant that is no fraction; matrices, relations and sums without an end are none."""
    import sympy

    constants = [one for one in expressions(parsed) if isinstance(one, sympy.Expr) and one.is_comparable]
    return any(one.doit().is_rational is False for one in constants if not one.has(sympy.Sum, sympy.Product, sympy.Integral))


# ---------------------------------------------------------------- equations, units, clocks, lists


def right_side(text: str) -> str:
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


def approximated(text: str) -> tuple[str, str] | None:
    r"""\frac{1}{3} and 0.333 of \frac{1}{3} \approx 0.333; a name in front of the sign is none of two values."""
    found = APPROXIMATELY.search(unnamed(text))
    if found is None:
        return None
    text = unnamed(text)
    return text[: found.start()].strip(), text[found.end() :].strip()


def holds(text: str, room: Fraction | None = None) -> bool:
    """False where sides that are nothing but numbers differ: 17=18."""
    return agree([value for value in map(worth, _sides(text)) if value is not None], text, room)


def agree(values: Sequence[Fraction], text: str, room: Fraction | None = None) -> bool:
    """`text`: where the values stand, which says how far people may have rounded."""
    share = room or (LOOSE if "." in text else CLOSE**3)
    scales = (1, 100, Fraction(1, 100)) if "%" in text else (1,)

    def same(one: Fraction, other: Fraction) -> bool:
        return any(abs(one - other * scale) <= max(abs(one), abs(other * scale)) * share for scale in scales)

    return all(same(values[-1], value) for value in values[:-1])


def worth(side: str) -> Fraction | None:
    """Of a number or arithmetic without letters and units."""
    side = unwrapped(side.replace("\\$", ""))
    number = plain_number(side)
    if number is not None:
        return number.value
    side = SIZES.sub("", side)
    if not ARITHMETIC.fullmatch(side) or MIXED.search(side):
        return None
    parsed = expressions(parse_whole(TIMES.sub(r"\\cdot ", side)))
    if len(parsed) != 1 or not getattr(parsed[0], "is_comparable", False):
        return None
    value = parsed[0].evalf(PRECISION)
    return Fraction(str(value)) if value.is_Float or value.is_Integer else None


def without_unit(text: str) -> tuple[str, Unit]:
    r"""Of a formula. Behind variables a bare letter is one more of them: x+3m has none, x+3\text{ m} has."""
    body, unit = split_unit(text)
    if unit is NO_UNIT or not VARIABLE.search(re.sub(r"\\[A-Za-z]+(?:\s*\{[A-Za-z ]*\})?", " ", body)):
        return body, unit
    return (body, unit) if unit.text.lstrip().startswith(("\\", "$", "°", "^")) else (text, NO_UNIT)


def clock(text: str) -> tuple[str, ...] | None:
    """Hours, minutes, seconds and a or p of 10:30 or 9:05:30 p.m."""
    found = CLOCK.fullmatch(unwrapped(text))
    return (found[1].lstrip("0") or "0", found[2], found[3] or "00", (found[4] or "").lower()) if found else None


def proportion(text: str) -> tuple[Fraction, ...] | None:
    """The parts of 2:3 or 1:2:5. It is worth a fraction, but whoever asks for one form does not mean the other."""
    plain = unwrapped(text).replace("{:}", ":").replace("\\colon", ":")
    return tuple(map(Fraction, plain.replace(" ", "").split(":"))) if PROPORTION.fullmatch(plain) else None


def same_proportion(one: tuple[Fraction, ...], other: tuple[Fraction, ...]) -> bool:
    if len(one) != len(other) or not any(one) or not any(other):
        return one == other
    return all(a * sum(other) == b * sum(one) for a, b in zip(one, other, strict=True))


def same_time(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """20:34 is 8:34 p.m.; without a or p 8:34 may be either."""
    if "" not in (one[3], other[3]):
        return one == other
    return one[:3] == other[:3] or _of_the_day(one) == _of_the_day(other)


def _of_the_day(time: tuple[str, ...]) -> tuple[str, ...]:
    hours = {"p": int(time[0]) % 12 + 12, "a": int(time[0]) % 12}.get(time[3], int(time[0]))
    return str(hours), *time[1:3]


SEPARATOR = re.compile(r"\s*(?:(?<!\\),(?!\d{3}(?!\d))|(?<!\\);|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")
PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])|±")
AND = re.compile(r"^(?:\\text\s*\{\s*(?:and|or)\s*\}|and\b|or\b)\s*")


def list_of(text: str) -> list[str]:
    r"""The items of 3, 5 or $x=3$ and $x=5$ or \pm 3; one for what is no list, brackets and thousands included."""
    text = unwrapped(text)
    items: list[str] = []
    start = depth = 0
    place = 0
    while place < len(text):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        found = SEPARATOR.match(text, place) if depth == 0 else None
        if found is not None:
            items.append(text[start:place])
            start = place = found.end()
        else:
            place += 1
    items.append(text[start:])
    items = [item for item in (AND.sub("", unwrapped(item)) for item in items) if item]
    return [one for item in items for one in _both_signs(item)]


def _both_signs(text: str) -> list[str]:
    if len(PLUS_MINUS.findall(text)) != 1:
        return [text]
    return [PLUS_MINUS.sub(sign, text) for sign in ("+", "-")]
