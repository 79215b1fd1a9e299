r"""Read numbers and quantities: 1,234.50, -3/4, 1 1/2, \frac12, 1.5e3, 2 \times 10^5, 50%, $5, 12 cm, 3 million."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from roll_lite.rewards.answer_extraction import HAN, QUAD, narrow

LONGEST = 1000
CLEANED = str.maketrans({**dict.fromkeys("−–‐‑‒﹣－", "-"), **dict.fromkeys("\u00a0\u2007\u2009\u202f", " "), "％": "%"})
SUFFIX = r"(?:\\(?:text|mathrm|textrm|textsuperscript)\s*\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)(?![A-Za-z]))"
ORDINAL = re.compile(rf"(?<=\d)\s*\^?\s*(?:\{{\s*{SUFFIX}\s*\}}|{SUFFIX})")
TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|textit|textnormal|mathbf|mbox|operatorname|rm|bf)\s*\{([^{}]*)\}")
DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
BRACKETS = (("(", ")"), ("{", "}"), ("\\left(", "\\right)"))
END = re.compile(rf"\A(?:\\[,;:! ]|{QUAD}|\s)+|(?<![.,;:\s])(?:\\[,;:! \\]|{QUAD}|(?<!\\)[.,;:\s])++\Z|\\\Z")

D = r"(?:\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
PLAIN = (
    (TEXT.pattern + r"\s*(\^)?", r" \1\2 "),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\[Cc]elsius", "°"),
    (r"\\([$%])", r"\1"),
    (r"\s*\^\s*\{?(-?\d)\}?(?!\d)", r"^\1"),
    (rf"\\[,;: ]|{QUAD}|~|\\cdot(?=\s*\\?[a-z]+\Z)", " "),
    (rf"\\frac(?:\s*\{{\s*(-?{D})\s*\}}|\s*(\d))(?:\s*\{{\s*({D})\s*\}}|\s*(\d)(?!\d))", r" \1\2/\3\4"),
    (r"\A([+-]?)\s*(?=10\s*(?:\^|\*\*))", r"\g<1>1*"),
    (r"\A\s*([+-]?)\s*([$€£¥₹¢])\s*([+-]?)(?=[\d.])(.*)\Z", r"\1\3\4 \2"),
)
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+(?={D}\s*/))?(?P<top>{D})(?:\s*/\s*(?P<below_sign>-?)\s*(?P<below>{D}))?"
    r"(?:[eE](?P<e>[+-]?\d{1,3})|\s*(?:\\times|\\cdot|[×·*x])\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<power>[+-]?\d{1,3})\s*\}?)?"
)
KINDS = {
    "^": "square sq=2, cubic cu=3",
    "/": "per /=1",
    "": "hundred=100, thousand=1000, million=1000000, billion=1000000000, trillion=1000000000000, dozen=12, tenth=1/10, hundredth=1/100"
    ", thousandth=1/1000, half halve=1/2, quarter=1/4",
    "length": "m meter metre=1, in inch inche=127/5000, ft foot feet=381/1250, yd yard=1143/1250, mi mile=201168/125",
    "time": "s sec second=1, min minute=60, h hr hour=3600, day=86400, week=604800",
    "calendar": "month=1, yr year=12",
    "mass": "g gram gm=1, oz ounce=45359237/1600000, lb pound=45359237/100000",
    "volume": "l liter litre=1",
    "gallons": "cup=1, pint pt=2, quart qt=4, gallon gal=16",
    "dollars": "$ dollar usd=1, ¢ cent=1/100",
    **{names: f"{names}=1" for names in ("€ euro", "£ gbp", "¥ yen yuan", "₹ rupee", "°c", "°f", "° degree deg", "radian rad")},
    **{names: f"{names}=1" for names in ("Pa pascal", "Hz hertz", "eV", "W watt", "J joule", "N newton", "V volt", "mol mole")},
}
KNOWN = {
    name: (kind, Fraction(size))
    for kind, units in KINDS.items()
    for names, size in (unit.split("=") for unit in units.split(", "))
    for name in names.split()
}
"""{name: (kind, size)} of units, such as ("length", size in base units). Three kinds mark words that are no units. "": scales, such as
million. "^": square and cubic; the size is the next unit's exponent. "/": per; exponents after it are negative."""
PREFIXES = {"n nano": -9, "µ micro": -6, "m milli": -3, "c centi": -2, "d deci": -1, "k kilo": 3, "M mega": 6, "G giga": 9, "T tera": 12}
METRIC = "m meter metre s second g gram l liter litre Pa pascal Hz hertz eV W watt J joule N newton V volt mol mole"
for _prefix, _power in PREFIXES.items():
    KNOWN |= {_prefix.split()[len(one) > 3] + one: (KNOWN[one][0], KNOWN[one][1] * Fraction(10) ** _power) for one in METRIC.split()}
SCALE = "(?:[百万亿萬億백천만억]|千(?![克米瓦卡焦升]))"  # not 千克, kilogram
NO_UNIT_WORD = re.compile(
    rf".*(?:{SCALE}|[半的の兆京仟打]|以[上下内]|分之|平方\Z|次方).*|"
    r"(?:squared|cubed|factorial|sin|cos|tan|log|exp|sqrt|pi|and|or|nor|not|but|plus|minus|times|over|divided|out|than|either|maybe|perhaps"
    r"|mod|(?:third|fif|four|six|seven|eigh|nin)(?:th)?s?|one|two|three|five|eight|nine|ten)",
    re.IGNORECASE,
)
LETTERS = rf"(?:[{HAN}]|(?![×÷])[A-Za-zµÀ-ɏ°$€£¥₹¢])"
UNIT = re.compile(rf"(?<=[\d)}}\].%\s])(\s*)((?:{LETTERS}++(?:\^-?\d|[²³])?[\s./]*+)++)\Z")
Unit = tuple[frozenset[tuple[str, int]] | None, Fraction]
"""(kinds, size). `kinds`: set of (kind, exponent), such as ("length", 2) for an area; None without a unit or if unknown (apples). `size`:
in base units."""
NO_UNIT: Unit = (None, Fraction(1))


@dataclass(frozen=True)
class Quantity:
    value: Fraction
    exact: bool = True
    """False for decimals, which may be rounded."""
    percent: bool = False
    unit: Unit = NO_UNIT


def tidy(text: str) -> str:
    r"""Normalize characters: ½ becomes 1/2, `\dfrac` becomes `\frac`, 3rd becomes 3."""
    text = ORDINAL.sub("", re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text))
    if text.isascii():
        return text
    text = re.sub(r"(\d?)\s*([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", lambda one: f"{one[1]} {unicodedata.normalize('NFKC', one[2])}", text)
    return narrow(text.replace("⁄", "/")).translate(CLEANED)


def unwrapped(text: str, brackets: bool = False) -> str:
    """Strip math and Markdown delimiters and final punctuation; turn LaTeX thousands separators into commas. `brackets`: also strip ( ) and
    { }."""
    text = re.sub(r"\{,\}|,\\!\s*|,\\[,;: ]\s*(?=\d{3}(?!\d))", ",", text).replace("\\!", "").replace("\\displaystyle", "")
    text = END.sub("", re.sub(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ",", text)).strip()
    for left, right in DELIMITERS + BRACKETS if brackets else DELIMITERS:
        inside = text[len(left) : -len(right)]
        if inside and text.startswith(left) and text.endswith(right):
            several = left in inside.replace("\\$", "") if (left, right) in DELIMITERS else re.search(r"\d\s*,\s*\d", inside)
            return text if several and right != "}" else unwrapped(inside, brackets)  # two formulas, or a point: (1,200)
    return text


def plain(text: str) -> str:
    for pattern, replacement in PLAIN:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def plain_number(text: str) -> Quantity | None:
    if len(text) > LONGEST:
        return None
    if text.isascii() and text.isdigit():
        return Quantity(Fraction(int(text)))
    text, is_percent = re.subn(r"\s*(?:%|percent)\s*\Z", "", plain(unwrapped(plain(text), brackets=True)))
    text = re.sub(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", _repeating, text)
    found = NUMBER.fullmatch(text)
    below = _decimal(found["below"] or "1") if found else 0
    if not found or not below or (found["below"] and (found["e"] or found["power"])):
        return None
    value = _decimal(found["whole"] or "0") + _decimal(found["top"]) / below * (-1 if found["below_sign"] else 1)
    if exponent := int(found["e"] or found["power"] or 0) - 2 * is_percent:
        value *= Fraction(10) ** exponent
    exact = "." not in found["top"].rstrip(".") + (found["below"] or "") and not found["e"]
    return Quantity(-value if found["sign"] == "-" else value, exact, bool(is_percent))


def _repeating(decimal: re.Match[str]) -> str:
    whole, start, period = decimal.groups()
    scale = 10 ** len(start)
    return f"{int(whole + start + period) - int(whole + start or '0')}/{(10 ** len(period) - 1) * scale}"


def _decimal(digits: str) -> Fraction:
    return Fraction(re.sub(r"[ ,]", "", digits).rstrip("."))


def quantity(text: str) -> Quantity | None:
    number = plain_number(text)
    if number is None and len(text) <= LONGEST:
        body, unit, scale = split_unit(unwrapped(text, brackets=True))
        number = plain_number(body)
        return number and replace(number, value=number.value * scale, unit=unit)
    return number


def split_unit(text: str) -> tuple[str, Unit, Fraction]:
    r"""Split a text into number, unit and scale factor (10^6 for "million").

    Known units (5cm) and words in \text (3\text{ t}) are units. Letters that may be variables are not: 2t and 3 pi have no unit.
    """
    bare, without_unit = plain(text), (text, NO_UNIT, Fraction(1))
    found = UNIT.search(bare, max(0, len(bare) - 100))
    before = bare[: found.start()].rstrip() if found else ""
    if found is None or not re.search(r"[\dA-Za-z]", before):
        return without_unit
    in_text = " ".join(TEXT.findall(text))
    for index, word in enumerate(re.findall(f"{LETTERS}+", found[2])):
        is_apart = ((index > 0 or found[1] != "") and len(word) > 2) or re.match(f"[{HAN}]", word)
        if not known(word) and (NO_UNIT_WORD.fullmatch(word) or not (is_apart or word in in_text)):
            return without_unit
    return before, *_unit_of(found[2])


@lru_cache(maxsize=4096)
def _unit_of(text: str) -> tuple[Unit, Fraction]:
    scale, size, times, sign = Fraction(1), Fraction(1), 1, 1
    exponents = Counter[str]()
    for name, power in re.findall(r"(/|[^\s/^.]+)(?:\^(-?\d))?", text.replace("²", "^2").replace("³", "^3")):
        kind, factor = known(name) or ("unknown", Fraction(1))
        if kind == "/":
            sign = -1
        elif kind == "^":
            times = int(factor)
        elif kind == "":
            scale *= factor
        else:
            exponent = int(power or times) * sign
            exponents[kind] += exponent
            size, times = size * factor**exponent, 1
    if not exponents or "unknown" in exponents:
        return NO_UNIT, scale
    return (frozenset((kind, power) for kind, power in exponents.items() if power), size), scale


def ratio(one: Unit, other: Unit) -> Fraction | None:
    """Factor from unit `one` to `other`: 1 if either is unknown, None if incompatible."""
    if one[0] is None or other[0] is None:
        return Fraction(1)
    return one[1] / other[1] if one[0] == other[0] else None


def known(name: str) -> tuple[str, Fraction] | None:
    low = name.lower()
    return KNOWN.get(name, KNOWN.get(low, KNOWN.get(low.removesuffix("s")) if len(low) > 2 else None))
