r"""Plain numbers as people write them: 1,234.50, -3/4, 1 1/2, \frac{1}{2}, 1.5e3, 2 \times 10^5, 50%. What is one, and what is it worth?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from roll_lite.rewards.math.units import CURRENCY, NO_UNIT, Unit, split_unit, unit_of

LONGEST = 1000
"""Characters: a longer text is not looked at."""

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
PERCENT = r"\\?%|\\text\s*\{\s*percent\s*\}|percent\b"
NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*(?P<digits>{DIGITS})(?P<exponent>[eE][+-]?\d{{1,3}})?\s*(?P<percent>{PERCENT})?")
REPEATING = re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>\d*)\.(?P<first>\d*)\\overline\s*\{(?P<again>\d+)\}")
MONEY = re.compile(rf"([+-]?)\s*(?:\\text\s*\{{\s*({CURRENCY})\s*\}}|({CURRENCY}))\s*([+-]?)\s*(?=[\d.])")
NUMERAL = re.compile(r"([\dA-Z]*\d[\dA-Z]*)_\{?(\d{1,2}|[a-z]+)\}?")
LITERAL = re.compile(r"([+-]?)0([xX](?=[\da-fA-F])|[oO](?=[0-7])|[bB](?=[01]))0*([\da-fA-F]+)")
MIXED_NUMBER = re.compile(r"([+-]?\d+)\s+(\d+)/(\d+)")
FRACTION = re.compile(rf"([+-]?)({DIGITS})\s*/\s*([+-]?)({DIGITS})")
LATEX_FRACTION = re.compile(
    rf"([+-]?)\s*(\d*)\s*\\[dt]?frac\s*(?:\{{\s*(-?)\s*({DIGITS})\s*\}}\s*\{{\s*({DIGITS})\s*\}}|()\s*(\d)\s*(\d)|()\{{(\d+)\}}(\d)|()(\d)\{{(\d+)\}})"
)
POWER_OF_TEN = re.compile(
    rf"([+-]?)(?:({DIGITS})\s*(?:\\times|\\cdot|×|\*|x)\s*)?10\s*(?:\^|\*\*)\s*(?:\{{\s*([+-]?\d{{1,3}})\s*\}}|([+-]?\d{{1,3}}))"
)
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12}
BASES["sixteen"] = 16
WRAPPINGS = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("**", "**"),
    ("`", "`"),
    ("(", ")"),
    ("{", "}"),
    ("\\left(", "\\right)"),
    *((f"\\{name}{{", "}") for name in ("text", "textbf", "mathbf", "mathrm", "textrm", "mbox", "bf")),
)
DELIMITERS = WRAPPINGS[:6]
"""Those around any formula; the others are taken away from around a number only."""
THOUSANDS = re.compile(r",(?:\\!\s*|\\[,;: ])(?=\s*\d{3}(?!\d))\s*")
TUPLE = re.compile(r"\d\s*,\s*\d")
"""In brackets 1,200 is a point."""
NAME = re.compile(r"(?:(?:[A-Za-z]\w*|\\[A-Za-z]+)(?:_(?:\w+|\{\w+\}))?(?:\(\s*[A-Za-z]\s*\))?\s*)?(?:=|≈|\\approx|\\simeq|\\sim)(?!=)")
END = re.compile(r"\A(?:\\[,;:! ]|\s)+|(?:\\[,;:! \\]|(?<!\\)[.,;:\s])+\Z|\\\Z")


@dataclass(frozen=True)
class PlainNumber:
    value: Fraction
    percent: bool = False
    exact: bool = True
    """An integer or a fraction of integers, not a decimal that may have been rounded."""
    reduced: bool = True
    """False for a fraction that can be."""
    places: int | None = None
    """Decimal places of a decimal."""


@dataclass(frozen=True)
class Quantity:
    number: PlainNumber
    unit: Unit


def plain_number(text: str) -> PlainNumber | None:
    """The number, if the text is one and nothing else."""
    text = unwrapped(text, WRAPPINGS)
    if not text or len(text) > LONGEST:
        return None
    if whole := NUMBER.fullmatch(text):
        digits = _value(whole["digits"]) * Fraction(10) ** int((whole["exponent"] or "e0")[1:])
        percent = whole["percent"] is not None
        exact = "." not in whole["digits"].rstrip(".") and not whole["exponent"]
        places = None if exact or whole["exponent"] or percent else len(whole["digits"].partition(".")[2])
        return PlainNumber(_signed(whole["sign"], digits) / (100 if percent else 1), percent, exact, places=places)
    if mixed := MIXED_NUMBER.fullmatch(text):
        return _mixed("-" if mixed[1].startswith("-") else "", mixed[1].lstrip("+-"), mixed[2], mixed[3])
    if fraction := FRACTION.fullmatch(text):
        sign = "-" if (fraction[1] == "-") != (fraction[3] == "-") else ""
        return _mixed(sign, "", fraction[2], fraction[4])
    if latex := LATEX_FRACTION.fullmatch(text):
        inner, upper, lower = next(latex.groups()[i : i + 3] for i in (2, 5, 8, 11) if latex.groups()[i] is not None)
        if inner and latex[2]:
            return None
        return _mixed("-" if (latex[1] == "-") != (inner == "-") else "", latex[2], upper, lower)
    if power := POWER_OF_TEN.fullmatch(text):
        factor = _value(power[2]) if power[2] else Fraction(1)
        return PlainNumber(_signed(power[1], factor * Fraction(10) ** int(power[3] or power[4])), exact="." not in (power[2] or ""))
    if repeating := REPEATING.fullmatch(text):
        first, again = repeating["first"], repeating["again"]
        value = Fraction(int(first + again) - int(first or "0"), (10 ** len(again) - 1) * 10 ** len(first))
        return PlainNumber(_signed(repeating["sign"], int(repeating["whole"] or "0") + value))
    return None


def quantity(text: str) -> Quantity | None:
    """The number and its unit (12 cm, $5, 3 million), if the text is that and no arithmetic."""
    text = unwrapped(text, WRAPPINGS)
    if len(text) > LONGEST:
        return None
    if (number := plain_number(text)) is not None:
        return Quantity(number, NO_UNIT)
    money = MONEY.match(text)
    if money is not None:
        text = money[1] + money[4] + text[money.end() :]
    text, unit = split_unit(text)
    number = plain_number(text)
    if number is None:
        return None
    if money is not None:
        unit = replace(unit_of(money[2] or money[3]), scale=unit.scale)
    return Quantity(replace(number, value=number.value * unit.scale), replace(unit, scale=1))


def numeral(text: str) -> tuple[str, int] | None:
    r"""Digits and base of 1001_2, 2A_{\text{twelve}} or 0x2A. Worth a number, and whoever asks for one does not mean the other."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\s*\{\s*(\w+)\s*\}", r"\1", unwrapped(text, DELIMITERS))
    if literal := LITERAL.fullmatch(text):
        return literal[1].replace("+", "") + literal[3].upper(), {"x": 16, "o": 8, "b": 2}[literal[2].lower()]
    found = NUMERAL.fullmatch(re.sub(r"\((\w+)\)(?=_)", r"\1", text.replace(" ", "")))
    if found is None:
        return None
    base = int(found[2]) if found[2].isdigit() else BASES.get(found[2], 0)
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in found[1]):
        return None
    return found[1].lstrip("0") or "0", base


def unnamed(text: str) -> str:
    """Without a name before it: 5 of `x = 5`."""
    text = unwrapped(text)
    while name := NAME.match(text):
        text = unwrapped(text[name.end() :])
    return text


def unwrapped(text: str, wrappings: Sequence[tuple[str, str]] = DELIMITERS) -> str:
    """Without delimiters and a full stop at the end, and with one way to write thousands and small spaces."""
    text = THOUSANDS.sub(",", text.replace("{,}", ",")).replace("\\!", "").replace("\\displaystyle", "")
    text = END.sub("", re.sub(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ",", text)).strip()
    changed = True
    while changed:
        changed = False
        for left, right in wrappings:
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                inside = text[len(left) : -len(right)]
                if (left, right) in DELIMITERS and left in inside.replace("\\$", ""):
                    continue
                if right.endswith(")") and (left, right) not in DELIMITERS and TUPLE.search(inside):
                    continue
                text, changed = END.sub("", text[len(left) : -len(right)]).strip(), True
    return text


def _value(digits: str) -> Fraction:
    return Fraction(re.sub(r"[ ,]", "", digits).rstrip("."))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _mixed(sign: str, whole: str, upper: str, lower: str) -> PlainNumber | None:
    if not _value(lower):
        return None
    part = _value(upper) / _value(lower)
    reduced = part.denominator == _value(lower) != 1 and not (whole and part >= 1)
    return PlainNumber(_signed(sign, _value(whole or "0") + part), exact="." not in upper + lower, reduced=reduced)
