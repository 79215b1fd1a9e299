r"""Units behind numbers: where one begins, and whether two are the same. 12 m is 1200 cm and no 12 cm; 12 apples is whatever 12 is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

LENGTH = {
    "mm millimeter millimetre": Fraction(1, 1000),
    "cm centimeter centimetre": Fraction(1, 100),
    "dm decimeter decimetre": Fraction(1, 10),
    "m meter metre": Fraction(1),
    "km kilometer kilometre": Fraction(1000),
    "in inch inche": Fraction(254, 10000),
    "ft foot feet": Fraction(3048, 10000),
    "yd yard": Fraction(9144, 10000),
    "mi mile": Fraction(1609344, 1000),
}
TIME = {
    "ms millisecond": Fraction(1, 1000),
    "s sec second": Fraction(1),
    "min minute": Fraction(60),
    "h hr hour": Fraction(3600),
    "day": Fraction(86400),
    "week": Fraction(604800),
}
CALENDAR = {"month": Fraction(1), "yr year": Fraction(12)}
MASS = {
    "mg milligram": Fraction(1, 1000),
    "g gram": Fraction(1),
    "kg kilogram": Fraction(1000),
    "oz ounce": Fraction(45359237, 1600000),
    "lb pound": Fraction(45359237, 100000),
}
VOLUME = {"ml milliliter millilitre": Fraction(1, 1000), "l liter litre": Fraction(1)}
GALLONS = {"cup": Fraction(1), "pint pt": Fraction(2), "quart qt": Fraction(4), "gallon gal": Fraction(16)}
DOLLARS = {"$ dollar usd": Fraction(1), "¢ cent": Fraction(1, 100)}
OTHERS = {name: {name: Fraction(1)} for name in ("€ euro eur", "£ gbp", "¥ yen", "₹ rupee", "°c", "°f", "degree deg °", "radian rad")}
DIMENSIONS = {
    "length": LENGTH,
    "time": TIME,
    "calendar": CALENDAR,
    "mass": MASS,
    "volume": VOLUME,
    "gallons": GALLONS,
    "dollars": DOLLARS,
    **OTHERS,
}
KNOWN = {name: (dimension, size) for dimension, units in DIMENSIONS.items() for names, size in units.items() for name in names.split()}
COMPOUND = {"mph": "mile/hour", "kmh": "km/hour", "kmph": "km/hour", "kph": "km/hour", "cc": "cm^3", "sqft": "ft^2"}
SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NO_UNITS = {"squared", "cubed", "factorial", "sin", "cos", "tan", "log", "exp", "sqrt", "and", "plus", "minus", "times"}

CURRENCY = r"\\?[$€£¥₹¢]"
SPACE = r"(?:\\[,;:! ]|~|\s)"
TEXT = r"\\(?:text|mathrm|textrm|textbf|textit|mbox|operatorname|rm)\s*\{([^{}]*)\}"
DEGREE = r"(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degree)\s*[CF]?(?![A-Za-z])"
POWER = r"(?:\^\s*\{?-?\d\}?|[²³])"
WORD = rf"(?:{TEXT}|{DEGREE}|{CURRENCY}|\\[Cc]elsius|[A-Za-zµ]++\.?)"
UNIT = re.compile(rf"(?P<space>{SPACE}*)(?P<unit>{WORD}{POWER}?(?:(?:{SPACE}|/|\\cdot)*+{WORD}{POWER}?)*+)\s*")
PIECE = re.compile(
    r"(?P<per>/|\bper\b)|(?P<area>\b(?:square|sq)\b)|(?P<cube>\b(?:cubic|cu)\b)"
    r"|(?P<name>°\s*[cf]?|[$€£¥₹¢]|[a-zµ]+)(?:\^(-?\d))?"
)
LAST = re.compile(r"[A-Za-zµ}°²³$€£¥₹¢.]\s*\Z|\^\s*-?\d\s*\Z")
"""How a text ends that may end with a unit."""
LONGEST = 100
"""Characters of a unit."""


@dataclass(frozen=True)
class Unit:
    text: str
    scale: int = 1
    """Of words such as million."""
    dimensions: frozenset[tuple[str, int]] | None = None
    """What it measures, with exponents; None where it is no unit of measurement that is known here, apples for instance."""
    size: Fraction = Fraction(1)
    """In units of its dimensions."""


NO_UNIT = Unit("")


def split_unit(text: str) -> tuple[str, Unit]:
    """What stands before the unit, and the unit; all of the text where it has none, or is nothing but words."""
    if LAST.search(text, max(0, len(text) - 10)) is None:
        return text, NO_UNIT
    for start in range(max(0, len(text) - LONGEST), len(text)):
        if start and text[start - 1].isalpha() and text[start].isalpha():
            continue
        found = UNIT.fullmatch(text, start)
        if found is not None and _stands_behind_a_value(text[:start]) and _is_unit(found["unit"], bool(found["space"])):
            return text[:start].rstrip(), unit_of(found["unit"])
    return text, NO_UNIT


@lru_cache(maxsize=4096)
def unit_of(text: str) -> Unit:
    plain = _plain(text)
    scale, size, times, per = 1, Fraction(1), 1, 1
    exponent: dict[str, int] = {}
    known = PIECE.sub("", plain).strip(" .") == ""
    for piece in PIECE.finditer(plain):
        if piece["per"]:
            per = -1
        elif piece["area"] or piece["cube"]:
            times = 2 if piece["area"] else 3
        elif piece["name"] in SCALES:
            scale *= SCALES[piece["name"]]
        else:
            unit = _known(piece["name"])
            if unit is None:
                known = False
                continue
            power = int(piece[5] or times) * per
            exponent[unit[0]] = exponent.get(unit[0], 0) + power
            size *= unit[1] ** power
            times = 1
    dimensions = frozenset((name, power) for name, power in exponent.items() if power)
    return Unit(text, scale, dimensions if known and exponent else None, size if known else Fraction(1))


def ratio(one: Unit, other: Unit) -> Fraction | None:
    """How many of the other one of the first is: 1 where either says nothing about it, None where they measure different things."""
    if one.dimensions is None or other.dimensions is None:
        return Fraction(1)
    return one.size / other.size if one.dimensions == other.dimensions else None


def _known(name: str) -> tuple[str, Fraction] | None:
    name = name.replace(" ", "")
    return KNOWN.get(name) or (KNOWN.get(name.removesuffix("s")) if len(name) > 2 else None)


def _plain(text: str) -> str:
    text = re.sub(TEXT, r" \1 ", text.translate({ord("²"): "^2", ord("³"): "^3"}))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "°", text)
    text = re.sub(r"\\celsius", "°c", text, flags=re.IGNORECASE)
    text = re.sub(r"\\[,;:! ]|~|\\cdot|\\", " ", text)
    text = re.sub(r"\s*\^\s*\{?(-?\d)\}?", r"^\1", text).lower()
    text = re.sub(r"degrees? (c|f)(?:elsius|ahrenheit)\b", r"°\1", text)
    for name, meaning in COMPOUND.items():
        text = re.sub(rf"\b{name}\b", meaning, text)
    return re.sub(r"\b([a-z]+) (squared|cubed)\b", lambda one: f"{one[1]}^{2 if one[2] == 'squared' else 3}", text)


def _stands_behind_a_value(before: str) -> bool:
    """Of a text that is nothing but words, the last ones are no unit."""
    return before != "" and before[-1] in "0123456789}).%] \t\n" and re.search(r"[\dA-Za-z]", re.sub(TEXT, "", before)) is not None


def _is_unit(text: str, apart: bool) -> bool:
    r"""Not the letters of a product: 2t, 5xy and 3 pi are terms, 2 m, 5cm, 3 apples and 3\text{ t} have units."""
    bare = re.sub(rf"{TEXT}|{DEGREE}|{CURRENCY}|{POWER}|\\[Cc]elsius|\\cdot|\\", " ", text)
    if text.count("\\text") and any(re.search(r"\d|[()]", inside) for inside in re.findall(TEXT, text)):
        return False
    words = re.findall(r"[A-Za-zµ]+", bare)
    return all(_names_a_unit(word.lower(), apart or index > 0) for index, word in enumerate(words))


def _names_a_unit(word: str, apart: bool) -> bool:
    if _known(word) is not None or word in COMPOUND or word in SCALES:
        return True
    return apart and len(word) > 2 and word not in NO_UNITS
