r"""Plain numbers as people write them: 1,234.50, -3/4, 1 1/2, \frac{1}{2}, 1.5e3, 2 \times 10^5, 50%. What is one, and what is it worth?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 1000
"""Characters: a longer text is not looked at."""

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
NUMBER = re.compile(rf"\\?[$€£]?\s*(?P<sign>[+-]?)\s*(?P<digits>{DIGITS})(?P<exponent>[eE][+-]?\d{{1,3}})?\s*(?P<percent>\\?%)?\.?")
MIXED_NUMBER = re.compile(r"([+-]?\d+)\s+(\d+)/(\d+)")
FRACTION = re.compile(rf"([+-]?)({DIGITS})\s*/\s*([+-]?)({DIGITS})")
LATEX_FRACTION = re.compile(
    rf"([+-]?)\s*(\d*)\s*\\[dt]?frac\s*(?:\{{\s*(-?)\s*({DIGITS})\s*\}}\s*\{{\s*({DIGITS})\s*\}}|()\s*(\d)\s*(\d)|()\{{(\d+)\}}(\d)|()(\d)\{{(\d+)\}})"
)
POWER_OF_TEN = re.compile(
    rf"([+-]?)(?:({DIGITS})\s*(?:\\times|\\cdot|×|\*|x)\s*)?10\s*(?:\^|\*\*)\s*(?:\{{\s*([+-]?\d{{1,3}})\s*\}}|([+-]?\d{{1,3}}))"
)
WRAPPINGS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
NAME = re.compile(r"(?:[A-Za-z]\w*|\\[A-Za-z]+)(?:_\{?\w+\}?)?(?:\(\s*[A-Za-z]\s*\))?\s*(?:=|≈|\\approx)(?!=)")
UNIT = re.compile(
    r"(?:\\[,;: ]|~|\s)*(?:(?:\\(?:text|mathrm|textrm|mbox|operatorname|rm|textbf)\s*\{[^{}]*\}|\^\s*\{?\s*\\circ\s*\}?|°|\\degree"
    r"|\\[Cc]elsius|[A-Za-zµ°²³%]+)(?:\^\s*\{?-?\d\}?)?(?:\s|/|\\[,;: ]|\\cdot|~|\.)*)+"
)


@dataclass(frozen=True)
class PlainNumber:
    value: Fraction
    percent: bool = False
    exact: bool = True
    """An integer or a fraction of integers, not a decimal that may have been rounded."""


def plain_number(text: str) -> PlainNumber | None:
    """The number, if the text is one and nothing else."""
    text = unwrapped(text)
    if not text or len(text) > LONGEST:
        return None
    if whole := NUMBER.fullmatch(text):
        digits = _value(whole["digits"]) * Fraction(10) ** int((whole["exponent"] or "e0")[1:])
        percent = whole["percent"] is not None
        exact = "." not in whole["digits"].rstrip(".") and not whole["exponent"]
        return PlainNumber(_signed(whole["sign"], digits) / (100 if percent else 1), percent, exact)
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
    return None


def is_number(text: str) -> bool:
    """A number, perhaps with a name before it (`x = 5`) and a unit behind it (`12 cm`), but no arithmetic."""
    text = unwrapped(text)
    if len(text) > LONGEST:
        return False
    while name := NAME.match(text):
        text = unwrapped(text[name.end() :])
    if plain_number(text) is not None:
        return True
    unit = re.search(r"(?<=[\d}.%])" + UNIT.pattern + r"$", text)
    return unit is not None and plain_number(text[: unit.start()]) is not None


def unwrapped(text: str) -> str:
    """Without delimiters, and with one way to write a minus, thousands and small spaces."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\!", "").replace("\\displaystyle", "").strip()
    text = re.sub(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ",", text)
    changed = True
    while changed:
        changed = False
        for left, right in WRAPPINGS:
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text, changed = text[len(left) : -len(right)].strip(), True
    return text


def _value(digits: str) -> Fraction:
    return Fraction(re.sub(r"[ ,]", "", digits).rstrip("."))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _mixed(sign: str, whole: str, upper: str, lower: str) -> PlainNumber | None:
    if not _value(lower):
        return None
    value = _value(whole or "0") + _value(upper) / _value(lower)
    return PlainNumber(_signed(sign, value), exact="." not in upper + lower)
