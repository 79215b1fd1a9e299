r"""One way to write what people write in several: dashes, spaces, fractions and the signs of mathematics that Unicode has."""

from __future__ import annotations

import re
import unicodedata

from roll_lite.rewards.answer_extraction import narrow

SIMPLE = str.maketrans({**dict.fromkeys("−–‐‑‒﹣－", "-"), **dict.fromkeys("\u00a0\u2007\u2009\u202f", " "), "％": "%"})
VULGAR = re.compile(r"(?:(?<=\d)\s*)?([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")
SUFFIX = r"\s*(?:st|nd|rd|th)(?![A-Za-z])"
UPRIGHT = rf"\\(?:text|mathrm|textrm|textsuperscript)\s*\{{{SUFFIX}\s*\}}"
ORDINAL = re.compile(rf"(?<=\d)\s*\^?\s*(?:{UPRIGHT}|\{{(?:\s*{UPRIGHT}|{SUFFIX})\s*\}}|{SUFFIX})")
r"""12th, 12^{th} or 12^{\text{th}}, with the braces that belong to it."""
NEST = r"\{(?:[^{}]|\{[^{}]*\})*\}"
HALF_BRACED = re.compile(
    rf"\\frac\s*(?:({NEST})\s*([A-Za-z0-9])|([A-Za-z0-9])\s*({NEST})"
    r"|\s([A-Za-z0-9])\s*([A-Za-z0-9])|([A-Za-z])([A-Za-z0-9])(?![A-Za-z]))"
)
BARE_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
BARE_NAME = re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|cot|sec|csc|ln|log|exp)(?![A-Za-z])")
FRACTION_NAME = re.compile(r"\\[dtc]frac(?![A-Za-z])")
SIGNS = str.maketrans(
    {
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": r"\div ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
    }
)
EMPTY = re.compile(r"\\varnothing(?![A-Za-z])")
LOGARITHM = re.compile(r"\\log_\s*\{?(\w+)\}?\s+(\w+)")
ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[A-Za-z]))")
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
RAISED_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
LOWERED_DIGITS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")


def tidy(text: str) -> str:
    r"""For any text: one minus, one blank, 1/2 for a half in one character, \frac for its sizes."""
    text = ORDINAL.sub("", FRACTION_NAME.sub(r"\\frac", text))
    if text.isascii():
        return text
    return VULGAR.sub(_fraction, narrow(text).translate(SIMPLE))


def as_latex(text: str) -> str:
    """For a formula: LaTeX in place of Unicode's signs, and one name for the empty set."""
    text = LOGARITHM.sub(r"\\log_{\1}(\2)", EMPTY.sub(r"\\emptyset", HALF_BRACED.sub(_braced, text)))
    text = BARE_NAME.sub(r"\\\1 ", BARE_ROOT.sub(r"\\sqrt{\1}", text))
    if text.isascii():
        return text
    text = RAISED.sub(lambda one: f"^{{{one[0].translate(RAISED_DIGITS)}}}", text)
    text = LOWERED.sub(lambda one: f"_{{{one[0].translate(LOWERED_DIGITS)}}}", text)
    text = ROOT.sub(lambda one: rf"\sqrt{{{one[1] or one[2] or one[3] or ''}}}", text)
    return text.translate(SIGNS)


def _braced(found: re.Match[str]) -> str:
    upper, lower = (one if one.startswith("{") else f"{{{one}}}" for one in found.groups() if one is not None)
    return rf"\frac{upper}{lower}"


def _fraction(found: re.Match[str]) -> str:
    upper, _, lower = unicodedata.normalize("NFKC", found[1]).partition("⁄")
    before = found.string[: found.start()]
    return f"{' ' if before[-1:].isdigit() else ''}{upper}/{lower}"
