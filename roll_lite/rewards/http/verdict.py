"""Reads a judge's verdict, as a number, from its text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_lite.rewards.answer_extraction import without_thinking
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited
from roll_lite.rewards.text.format import FORMAT_SECONDS

NUMBER = r"[-+]?\d+(?:\.\d+)?"
KEYS = ("verdict", "score", "rating", "grade", "judgment", "judgement", "answer")
"""Keys of a JSON verdict. The first one present counts, since `answer` may repeat the response's answer."""
NAMES = rf"(?:{'|'.join(KEYS)})"
OBJECT = r"(?:\A|\n)[ \t]*(?:```\w*\s*)?(?P<value>\{.*\})\s*(?:```)?\Z"
LINE = (
    rf"(?:\A|\n)[ \t*_`#(\[]*(?:(?:(?:the|my|final|overall)[*_ ]+)*{NAMES}[*_ ]*(?:\([^()\n]*\)[*_ ]*)?(?:[:=]|\bis\b)[*_ ]*:?)?"
    r"[\s*_`(\[]*(?P<value>{value})[\s*_`)\].!]*\Z"
)
INTRODUCTION = re.compile(rf"(?:\A|\n)\W*(?:here(?:['’]s| is) )?(?:(?:the|my|final|overall) )*{NAMES}\W*\Z", re.IGNORECASE)
"""Line that announces the judge's own verdict. Other lines ending with a colon announce a quotation."""
UNFINISHED = re.compile(r"[^\W\d_\u0e00-\u0eff]\Z|[,;、，；—–(\[{]\Z")
"""End of a line in mid-sentence: the next line may be a quotation. Thai and Lao have no full stop: their letters do not count."""
PIECE = re.compile(r"\s*(?:#|[-+*•]\s|(?:\d+|\w)[.)]\s|\*\*(?!.*\*\*))")
"""Heading or list item, which needs no full stop. A bold heading's last asterisks are already stripped."""
QUOTE, QUOTE_END = re.compile(r"‘|(?<![^\s(\[{])'"), re.compile(r"(?<=\S)['’](?!\w)")
"""Opening and closing single quotes, not apostrophes."""
YES_OR_NO = {"yes": 1.0, "no": 0.0}


@dataclass(frozen=True)
class Verdict:
    value: float
    extracted: str


@dataclass(frozen=True)
class VerdictParser:
    """Reads a judge's own verdict, not a quoted one: the last line ("Verdict: yes", "yes") or a final JSON object ({"verdict": "yes"}). A
    last line after an unfinished sentence counts as quoted.

    With `pattern`, the verdict is the first group of its last match, or the whole match. It is looked up in `choices`, or is a number,
    which `scale` maps to 0..1. A text that takes too long to search has no verdict.
    """

    pattern: str | None = None
    choices: Mapping[str, float] | None = field(default=None, hash=False)
    scale: tuple[float, float] | None = None

    def __call__(self, text: str) -> Verdict | None:
        """Verdict in a judge's text, after its thinking, or None."""
        text = without_thinking(text).strip()
        choices = YES_OR_NO if (self.choices, self.pattern, self.scale) == (None, None, None) else self.choices
        known = None if choices is None else {choice.strip().casefold(): float(value) for choice, value in choices.items()}
        try:
            found = limited(FORMAT_SECONDS, lambda: self._found(text, known))
        except TimeLimitExceeded:
            return None
        try:
            value = None if found is None else known.get(found.strip().casefold()) if known is not None else float(found)
        except ValueError:
            return None
        low, high = self.scale or (-math.inf, math.inf)
        if found is None or value is None or (known is None and not (math.isfinite(value) and low <= value <= high)):
            return None
        return Verdict((value - low) / (high - low) if self.scale is not None else value, found.strip())

    def _found(self, text: str, known: Mapping[str, float] | None) -> str | None:
        if self.pattern is not None:
            last = next(reversed(list(compiled(self.pattern).finditer(text))), None)
            return last and next((group for group in last.groups() if group is not None), last[0])
        text = re.sub(r'\A"([^"]*)"\Z', r"\1", text)
        match = re.search(self._line(known), text, re.IGNORECASE) or re.search(OBJECT, text, re.DOTALL)
        return None if match is None or _opens_quotation(text[: match.start()]) else _of_object(match["value"])

    def _line(self, known: Mapping[str, float] | None) -> str:
        """Regular expression for a last line with a verdict."""
        out_of = rf"(?:[*_\s]*(?:/|(?:out )?of)[*_\s]*{re.escape(f'{self.scale[1]:g}')})?" if self.scale else ""
        value = NUMBER if known is None else "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        return LINE.replace("{value}", f"{value}){out_of}(?:")


def _opens_quotation(text: str) -> bool:
    """True if a quotation may follow this text: the text announces one, leaves one open, or ends in mid-sentence."""
    line = text.rstrip(" \t\n*_=~-").rpartition("\n")[2]
    unfinished = UNFINISHED.search(line) is not None and PIECE.match(line) is None
    announces = text.rstrip("\"“'‘`*_ \n").endswith((":", "："))
    begun = any(text.count(left) > text.count(right) for left, right in ("“”", "«»", "「」", "『』", "《》"))
    opened, closed = (max((found.end() for found in quote.finditer(text)), default=0) for quote in (QUOTE, QUOTE_END))
    begun = begun or opened > closed or any(text.count(mark) % 2 for mark in '"`')
    return begun or ((unfinished or announces) and INTRODUCTION.search(text) is None)


def _of_object(found: str) -> str | None:
    """Verdict in a JSON object, or None; other text unchanged."""
    if not found.startswith("{"):
        return found
    try:
        content = json.loads(found)
    except (ValueError, RecursionError):
        return None
    known = {name.casefold(): one for name, one in content.items()}
    value = next((known[key] for key in KEYS if key in known), None)
    return ("no", "yes")[value] if isinstance(value, bool) else str(value) if isinstance(value, str | int | float) else None


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile the pattern; ValueError if it is no regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
