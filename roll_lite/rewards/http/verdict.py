"""Reads a judge's verdict, as a number, from its text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_lite.config.text_templates import compile_format
from roll_lite.rewards.answer_extraction import without_thinking
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited
from roll_lite.rewards.text.format import FORMAT_SECONDS

KEYS = ("verdict", "score", "rating", "grade", "judgment", "judgement", "answer")
"""Keys of a JSON verdict, in order of preference: `answer` is last, since it may repeat the response's answer."""
NAMES = rf"(?:(?:the|my|final|overall)[*_ ]+)*(?:{'|'.join(KEYS)})"
LINE = (
    rf"(?i)(?:\A|\n)[ \t*_`#(\[]*(?:{NAMES}[*_ ]*(?:\([^()\n]*\)[*_ ]*)?(?:[:=]|\bis\b)[*_ ]*:?)?"
    r"[\s*_`(\[]*(?P<value>{value}){out_of}[\s*_`)\].!]*\Z"
)
OBJECT = r"(?s)(?:\A|\n)[ \t]*(?:```\w*\s*)?(?P<value>\{.*\})\s*(?:```)?\Z"
NUMBER = r"[-+]?\d+(?:\.\d+)?"

OPEN_QUOTE = re.compile(r"(?s)[“«「『《](?!.*[”»」』》])|(?:‘|(?<![^\s(\[{])')(?!.*\S['’](?!\w))")
"""Quotation mark, not an apostrophe, that is never closed."""
BREAKS_OFF = re.compile(
    rf"(?i)(?!\W*(?:here(?:['’]s| is) )?{NAMES}\W*\Z)"
    r"(?:.*[:：]|(?!\s*(?:#|[-+*•]\s|(?:\d+|\w)[.)]\s|\*\*(?!.*\*\*))).*(?:[^\W\d_\u0e00-\u0eff]|[,;、，；—–(\[{]))\Z"
)
"""Matches a line that may introduce a quotation: it ends with a colon, or in mid-sentence (with a letter, comma or opening bracket). Not
matched: the line "Here is my verdict:"; headings and list items without a colon; lines that end with a Thai or Lao letter (these languages
have no full stop)."""


@dataclass(frozen=True)
class Verdict:
    value: float
    extracted: str


@dataclass(frozen=True)
class VerdictParser:
    """Reads a judge's own verdict, not a quoted one: the last line ("Verdict: yes", "yes") or a final JSON object ({"verdict": "yes"}).

    With `pattern`, the verdict is the first group of its last match, or the whole match. It is looked up in `choices`, or is a number,
    which `scale` maps to 0..1. A text that takes too long to search has no verdict.
    """

    pattern: str | None = None
    choices: Mapping[str, float] | None = field(default=None, hash=False)
    scale: tuple[float, float] | None = None

    def __call__(self, text: str) -> Verdict | None:
        """Verdict in a judge's text, after its thinking, or None."""
        choices = {"yes": 1.0, "no": 0.0} if (self.choices, self.pattern, self.scale) == (None, None, None) else self.choices
        known = None if choices is None else {choice.strip().casefold(): float(value) for choice, value in choices.items()}
        try:
            found = limited(FORMAT_SECONDS, lambda: self._found(without_thinking(text).strip(), known))
            if found is None:
                return None
            value = float(found) if known is None else known[found.strip().casefold()]
        except (TimeLimitExceeded, KeyError, ValueError):
            return None
        low, high = self.scale or (-math.inf, math.inf)
        if not (math.isfinite(value) and low <= value <= high):
            return None
        return Verdict((value - low) / (high - low) if self.scale else value, found.strip())

    def _found(self, text: str, known: Mapping[str, float] | None) -> str | None:
        if self.pattern is not None:
            last = next(reversed(list(compile_format(self.pattern).finditer(text))), None)
            return last and next((group for group in last.groups() if group is not None), last[0])
        value = NUMBER if known is None else "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        out_of = rf"(?:[*_\s]*(?:/|(?:out )?of)[*_\s]*{re.escape(f'{self.scale[1]:g}')})?" if self.scale else ""
        text = re.sub(r'\A"([^"]*)"\Z', r"\1", text)
        verdict = re.search(LINE.format(value=value, out_of=out_of), text) or re.search(OBJECT, text)
        return None if verdict is None or _may_be_quoted(text[: verdict.start()]) else _of_object(verdict["value"])


def _may_be_quoted(before: str) -> bool:
    line = before.rstrip(" \t\n*_=~-").rpartition("\n")[2]
    is_open = OPEN_QUOTE.search(before) is not None or any(before.count(mark) % 2 for mark in '"`')
    return is_open or BREAKS_OFF.match(line) is not None


def _of_object(found: str) -> str | None:
    """Verdict in a JSON object, or None; other text unchanged."""
    if not found.startswith("{"):
        return found
    try:
        content = {name.casefold(): value for name, value in json.loads(found).items()}
    except (ValueError, RecursionError):
        return None
    value = next((content[key] for key in KEYS if key in content), None)
    return ("no", "yes")[value] if isinstance(value, bool) else str(value) if isinstance(value, str | int | float) else None
