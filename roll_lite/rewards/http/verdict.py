"""Verdicts of a judge: from its text to a number, and the cache of its texts."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sqlite3
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll_lite.rewards.answer_extraction import without_thinking

NUMBER = r"[-+]?\d+(?:\.\d+)?"
KEYS = ("verdict", "score", "rating", "grade", "judgment", "judgement", "answer")
"""Of an object with several the first here counts: its `answer` may repeat the response's."""
NAMES = rf"(?:{'|'.join(KEYS)})"
OBJECT = r"(?:\A|\n)[ \t]*(?:```\w*\s*)?(?P<value>\{.*\})\s*(?:```)?\Z"
LINE = (
    rf"(?:\A|\n)[ \t*_`#(\[]*(?:(?:(?:the|my|final|overall)[*_ ]+)*{NAMES}[*_ ]*(?:\([^()\n]*\)[*_ ]*)?(?:[:=]|\bis\b)[*_ ]*:?)?"
    r"[\s*_`(\[]*(?P<value>{value})[\s*_`)\].!]*\Z"
)
INTRODUCTION = re.compile(rf"(?:\A|\n)\W*(?:here(?:['’]s| is) )?(?:(?:the|my|final|overall) )*{NAMES}\W*\Z", re.IGNORECASE)
"""Line that announces the judge's own verdict. Any other line that ends with a colon announces a quotation."""
YES_OR_NO = {"yes": 1.0, "no": 0.0}


@dataclass(frozen=True)
class Verdict:
    value: float
    extracted: str
    """Part of the text that contains the verdict."""


@dataclass(frozen=True)
class VerdictParser:
    """Reads a judge's own verdict, not a quoted one: the last line, such as "Verdict: yes" or "yes", or a final JSON object such as
    {"verdict": "yes"}.

    With `pattern`: the first group of its last match, or the whole match. The verdict is looked up in `choices`, or is a number; `scale`
    maps it to 0..1.
    """

    pattern: str | None = None
    choices: Mapping[str, float] | None = field(default=None, hash=False)
    scale: tuple[float, float] | None = None

    def __call__(self, text: str) -> Verdict | None:
        """Verdict of a text without its thinking, or None."""
        text = without_thinking(text).strip()
        choices = YES_OR_NO if (self.choices, self.pattern, self.scale) == (None, None, None) else self.choices
        known = None if choices is None else {choice.strip().casefold(): float(value) for choice, value in choices.items()}
        if self.pattern is not None:
            last = next(reversed(list(compiled(self.pattern).finditer(text))), None)
            found = last and next((group for group in last.groups() if group is not None), last[0])
        else:
            text = re.sub(r'\A"([^"]*)"\Z', r"\1", text)
            match = re.search(self._line(known), text, re.IGNORECASE) or re.search(OBJECT, text, re.DOTALL)
            found = None if match is None or _opens_quotation(text[: match.start()]) else _of_object(match["value"])
        try:
            value = None if found is None else known.get(found.strip().casefold()) if known is not None else float(found)
        except ValueError:
            return None
        low, high = self.scale or (-math.inf, math.inf)
        if found is None or value is None or (known is None and not (math.isfinite(value) and low <= value <= high)):
            return None
        return Verdict((value - low) / (high - low) if self.scale is not None else value, found.strip())

    def _line(self, known: Mapping[str, float] | None) -> str:
        """Regular expression of the last line."""
        out_of = rf"(?:[*_\s]*(?:/|(?:out )?of)[*_\s]*{re.escape(f'{self.scale[1]:g}')})?" if self.scale else ""
        value = NUMBER if known is None else "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        return LINE.replace("{value}", f"{value}){out_of}(?:")


def _opens_quotation(text: str) -> bool:
    """True if a quotation follows this text: it is announced, or opened and not closed."""
    announces = text.rstrip("\"“'‘`*_ \n").endswith((":", "：")) and INTRODUCTION.search(text) is None
    begun = any(text.count(left) > text.count(right) for left, right in ("“”", "«»", "「」", "『』", "《》"))
    return announces or begun or any(text.count(mark) % 2 for mark in '"`')


def _of_object(found: str) -> str | None:
    """Verdict of a JSON object; other text unchanged."""
    if not found.startswith("{"):
        return found
    try:
        content: Any = json.loads(found)
    except (ValueError, RecursionError):
        return None
    known = {name.casefold(): one for name, one in content.items()}
    value = next((known[key] for key in KEYS if key in known), None)
    return ("no", "yes")[value] if isinstance(value, bool) else str(value) if isinstance(value, str | int | float) else None


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern; ValueError if it is no regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


LOCK_SECONDS = 0.5


def cache_key(**parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class VerdictCache:
    """Keeps the most recently used texts, at most `entries` in memory (0: none). ValueError if the file cannot be used as a cache.

    Several processes may share the file. A process that finds it locked skips it; a lost entry costs one more question.
    """

    def __init__(self, entries: int, file: Path | None = None) -> None:
        self._entries = entries
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._file = self._opened(file.expanduser().absolute()) if file is not None else None

    def get(self, key: str) -> str | None:
        if key in self._texts:
            self._texts.move_to_end(key)
            return self._texts[key]
        if self._file is None:
            return None
        with suppress(sqlite3.OperationalError):
            row = self._file.execute("SELECT text FROM verdicts WHERE key = ?", (key,)).fetchone()
            if row is not None:
                self._remember(key, row[0])
                return str(row[0])
        return None

    def put(self, key: str, text: str) -> None:
        self._remember(key, text)
        if self._file is not None:
            with suppress(sqlite3.OperationalError):
                self._file.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, text))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _remember(self, key: str, text: str) -> None:
        self._texts[key] = text
        self._texts.move_to_end(key)
        while len(self._texts) > self._entries:
            self._texts.popitem(last=False)

    def _opened(self, file: Path) -> sqlite3.Connection:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(file, timeout=LOCK_SECONDS, isolation_level=None)
            connection.execute("PRAGMA synchronous = OFF")  # a power failure may destroy the file, which can be rebuilt
            connection.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, text TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"cache_file: {file} cannot be used: {error}") from None
        return connection
