r"""Units behind numbers: where one begins, and whether two are the same. 12 m is 1200 cm and no 12 cm; 12 apples is whatever 12 is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from roll_lite.rewards.answer_extraction import HAN

LENGTH = {
    "mm millimeter millimetre 毫米": Fraction(1, 1000),
    "cm centimeter centimetre 厘米": Fraction(1, 100),
    "dm decimeter decimetre 分米": Fraction(1, 10),
    "m meter metre 米": Fraction(1),
    "km kilometer kilometre 千米 公里": Fraction(1000),
    "in inch inche": Fraction(254, 10000),
    "ft foot feet": Fraction(3048, 10000),
    "yd yard": Fraction(9144, 10000),
    "mi mile": Fraction(1609344, 1000),
}
TIME = {
    "ms millisecond": Fraction(1, 1000),
    "s sec second 秒": Fraction(1),
    "min minute 分钟": Fraction(60),
    "h hr hour 小时": Fraction(3600),
    "day 天 日": Fraction(86400),
    "week 周 星期": Fraction(604800),
}
CALENDAR = {"month 月 个月": Fraction(1), "yr year 年": Fraction(12)}
MASS = {
    "mg milligram": Fraction(1, 1000),
    "g gram 克": Fraction(1),
    "kg kilogram 千克 公斤": Fraction(1000),
    "oz ounce": Fraction(45359237, 1600000),
    "lb pound": Fraction(45359237, 100000),
}
VOLUME = {"ml milliliter millilitre 毫升": Fraction(1, 1000), "l liter litre 升": Fraction(1)}
GALLONS = {"cup": Fraction(1), "pint pt": Fraction(2), "quart qt": Fraction(4), "gallon gal": Fraction(16)}
DOLLARS = {"$ dollar usd": Fraction(1), "¢ cent": Fraction(1, 100)}
PREFIXES = {"n": "nano", "µ": "micro", "m": "milli", "c": "centi", "k": "kilo", "M": "mega", "G": "giga", "T": "tera", "": ""}
PREFIX_SIZES = dict(zip(PREFIXES.values(), (Fraction(10) ** power for power in (-9, -6, -3, -2, 3, 6, 9, 12, 0)), strict=True))
SYMBOLS = {"Pa": "pascal", "Hz": "hertz", "eV": "electronvolt", "W": "watt", "J": "joule", "N": "newton", "V": "volt", "mol": "mole"}
SYMBOL = re.compile(rf"(?<![A-Za-zµ])({'|'.join(sorted(filter(None, PREFIXES)))})?({'|'.join(SYMBOLS)})(?![A-Za-zµ])")
"""With a prefix, in which M and m are not the same."""
PHYSICS = {name: {f"{prefix}{name}": size for prefix, size in PREFIX_SIZES.items()} for name in SYMBOLS.values()}
OTHERS = {name: {name: Fraction(1)} for name in ("€ euro eur", "£ gbp", "¥ yen 元", "₹ rupee", "°c", "°f", "degree deg ° 度", "radian rad")}
DIMENSIONS = {
    "length": LENGTH,
    "time": TIME,
    "calendar": CALENDAR,
    "mass": MASS,
    "volume": VOLUME,
    "gallons": GALLONS,
    "dollars": DOLLARS,
    **PHYSICS,
    **OTHERS,
}
KNOWN = {name: (dimension, size) for dimension, units in DIMENSIONS.items() for names, size in units.items() for name in names.split()}
COMPOUND = {"mph": "mile/hour", "kmh": "km/hour", "kmph": "km/hour", "kph": "km/hour", "cc": "cm^3", "sqft": "ft^2"}
SCALES: dict[str, int | Fraction] = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "百": 10**2,
    "千": 10**3,
    "万": 10**4,
    "百万": 10**6,
    "亿": 10**8,
    "half": Fraction(1, 2),
    "halve": Fraction(1, 2),
    "quarter": Fraction(1, 4),
    "tenth": Fraction(1, 10),
    "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000),
}
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety"
NO_UNITS = {
    *("squared", "cubed", "factorial", "sin", "cos", "tan", "log", "exp", "sqrt", "pi"),
    *("and", "or", "nor", "not", "but", "plus", "minus", "times", "over", "divided", "out", "than", "either", "maybe", "perhaps"),
    "mod",
    *("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"),
    *NUMBER_WORDS.split(),
}
"""Behind a number they change what it is worth, or say that it is not meant."""

CURRENCY = r"\\?[$€£¥₹¢]"
SPACE = r"(?:\\[,;:! ]|~|\s)"
TEXT = r"\\(?:text|mathrm|textrm|textbf|textit|textnormal|mbox|operatorname|rm)\s*\{([^{}]*)\}"
DEGREE = r"(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degree)\s*[CF]?(?![A-Za-z])"
POWER = r"(?:\^\s*\{?-?\d\}?|[²³])"
WORD = rf"(?:{TEXT}|{DEGREE}|{CURRENCY}|\\[Cc]elsius|[A-Za-zµ]++\.?|[{HAN}]++)"
UNIT = re.compile(rf"(?P<space>{SPACE}*)(?P<unit>{WORD}{POWER}?(?:(?:{SPACE}|/|\\cdot)*+{WORD}{POWER}?)*+)\s*")
PIECE = re.compile(
    r"(?P<per>/|\bper\b)|(?P<area>\b(?:square|sq)\b)|(?P<cube>\b(?:cubic|cu)\b)"
    rf"|(?P<name>°\s*[cf]?|[$€£¥₹¢]|[a-zµ]+|[{HAN}]+)(?:\^(-?\d))?"
)
LAST = re.compile(rf"[A-Za-zµ{HAN}}}°²³$€£¥₹¢.]\s*\Z|\^\s*-?\d\s*\Z")
"""How a text ends that may end with a unit."""
LONGEST = 100
"""Characters of a unit."""


@dataclass(frozen=True)
class Unit:
    text: str
    scale: int | Fraction = 1
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
    scale: int | Fraction = 1
    size, times, per = Fraction(1), 1, 1
    exponent: dict[str, int] = {}
    known = PIECE.sub("", plain).strip(" .") == ""
    for piece in PIECE.finditer(plain):
        if piece["per"]:
            per = -1
        elif piece["area"] or piece["cube"]:
            times = 2 if piece["area"] else 3
        elif (factor := _scale(piece["name"])) is not None:
            scale *= factor
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


def _scale(name: str) -> int | Fraction | None:
    return SCALES.get(name, SCALES.get(name.removesuffix("s")))


def _known(name: str) -> tuple[str, Fraction] | None:
    name = name.replace(" ", "")
    return KNOWN.get(name) or (KNOWN.get(name.removesuffix("s")) if len(name) > 2 else None)


def _plain(text: str) -> str:
    text = re.sub(TEXT, r" \1 ", text.translate({ord("²"): "^2", ord("³"): "^3"}))
    text = SYMBOL.sub(lambda one: PREFIXES[one[1] or ""] + SYMBOLS[one[2]], text)
    text = re.sub(rf"(?<=[{HAN}])?([百千]?万|亿)(?=[{HAN}])", r" \1 ", text)
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
    inside = " ".join(re.findall(TEXT, text))
    if re.search(r"\d|[()]", inside) or any(word in NO_UNITS for word in re.findall("[a-z]+", inside.lower())):
        return False
    words = re.findall(r"[A-Za-zµ]+", SYMBOL.sub(lambda one: PREFIXES[one[1] or ""] + SYMBOLS[one[2]], bare))
    return all(_names_a_unit(word.lower(), apart or index > 0) for index, word in enumerate(words))


def _names_a_unit(word: str, apart: bool) -> bool:
    if _known(word) is not None or word in COMPOUND or _scale(word) is not None:
        return True
    return apart and len(word) > 2 and word not in NO_UNITS and word.removesuffix("s") not in NO_UNITS
