"""From what a judge wrote to a number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from roll_lite.rewards.answer_extraction import without_thinking

NUMBER = r"(?<!\w)[-+]?\d+(?:\.\d+)?"
NAMES = r"(?:verdict|score|rating|grade)"
STATED = re.compile(
    rf"\b{NAMES}\b[\W_]*(?:is\b)?[\W_]*\Z|(?:\A|\n|[.!?]\s)[\W_]*(?:(?:the|my|final)\s+)*answer[*_]*:[\W_]*\Z", re.IGNORECASE
)
BEGINS, ON_THE_LAST_LINE = re.compile(r"\A[\W_]*\Z"), re.compile(r"\n[\W_]*\Z")
ENDS = re.compile(r"[\W_]*?(?:[.,;:!()\[\]\n—–-]|\Z|\s(?:because|since|as|for|given|due)\b)", re.IGNORECASE)
NOTHING_MORE = re.compile(r"[\W_]*\Z")
DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|nor|hardly|than|instead\s+of)\b|n['’]t\b)"
    rf"(?:[^.,;:!?\n—–()-]*|(?:\s+\w+){{0,2}}\s+{NAMES}\b[^.,;!?\n]*)\Z",
    re.IGNORECASE,
)
QUOTED = re.compile(r"\w[^\w\n]*\s[\"“‘'«`][^\"”’'»`\n]*\w[^\"”’'»`\n]*\Z")
"""A quotation that began behind other words, and holds more than the verdict."""
SAID = re.compile(
    r"\b(?:response|student|text|it|they|user|candidate|assistant|author|solution|answer)\s+"
    r"(?:says?|said|claims?|states?|writes?|asks?|tells?|told|wants?|demands?|instructs?|contains|ends)\b[^.,;\n]*\Z",
    re.IGNORECASE,
)
WINDOW = 300
"""Characters in front of a choice that may say what is meant by it."""
LISTED = re.compile(r"^[^\w\n]*\d+[.)]\s", re.MULTILINE)
OUT_OF = re.compile(r"(\d+(?:\.\d+)?)[*_\s]*(?:/|\b(?:out\s+)?of\b)[*_\s]*(\d+(?:\.\d+)?)(?!\w)", re.IGNORECASE)
RANGE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:-|–|\bto\b)\s*(\d+(?:\.\d+)?)(?!\w)")
YES_OR_NO = {"yes": 1.0, "no": 0.0}


@dataclass(frozen=True)
class Verdict:
    value: float
    extracted: str
    """The part of the text that it was read from."""


@dataclass(frozen=True)
class VerdictParser:
    """Searches a judge's text for `pattern` (its first group, or all of it, where it matches last). Without one: of the
    choices or numbers the one behind the last "verdict:", else the one that the text begins with, the one alone on its last line, the only
    one that it names; not what it denies or quotes. What was found is looked up in `choices`, or is a number; one of `scale` is moved to
    0..1."""

    pattern: str | None = None
    choices: Mapping[str, float] | None = field(default=None, hash=False)
    scale: tuple[float, float] | None = None

    @cached_property
    def known(self) -> dict[str, float] | None:
        """The choices in lower case; yes and no where nothing else is asked for."""
        if self.choices is None:
            return YES_OR_NO if self.pattern is None and self.scale is None else None
        return {choice.strip().casefold(): float(value) for choice, value in self.choices.items()}

    @cached_property
    def search(self) -> re.Pattern[str]:
        """ValueError if the pattern is none."""
        if self.pattern is not None:
            try:
                return re.compile(self.pattern, re.DOTALL)
            except re.error as error:
                raise ValueError(f"{self.pattern!r} is no regular expression: {error}") from None
        if self.known is None:
            return re.compile(NUMBER)
        return re.compile(self._choice, re.IGNORECASE)

    @property
    def _choice(self) -> str:
        longest_first = sorted(self.known or (), key=len, reverse=True)
        return rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"

    def __call__(self, text: str) -> Verdict | None:
        """None where the text holds no verdict. What a model thought aloud before it is not looked at."""
        text = without_thinking(text)
        if self.pattern is None:
            text = self._without_the_question(text)
            match = _settled(text, list(self.search.finditer(text)))
        else:
            match = next(reversed(list(self.search.finditer(text))), None)
        if match is None:
            return None
        found = next((group for group in match.groups() if group is not None), match.group()).strip()
        value = self._value(found)
        return None if value is None else Verdict(value, found)

    def _without_the_question(self, text: str) -> str:
        """Without "yes or no" and (1-10), the 10 of 7/10, counts such as 2 of 3, and the numbers of a list."""
        if self.known is not None:
            return re.sub(rf"{self._choice}(?:[^\w\n]{{0,5}}(?:[/|]|\bor\b)[^\w\n]{{0,5}}{self._choice})+", " ", text, flags=re.IGNORECASE)
        low, high = self.scale or (math.nan, math.nan)
        text = RANGE.sub(lambda one: " " if (float(one[1]), float(one[2])) == (low, high) else one[0], text)
        text = OUT_OF.sub(lambda one: one[1] if float(one[2]) == high else " ", text)
        return LISTED.sub("", text) if len(LISTED.findall(text)) > 1 else text

    def _value(self, found: str) -> float | None:
        if self.known is not None:
            return self.known.get(found.casefold())
        try:
            number = float(found)
        except ValueError:
            return None
        if not math.isfinite(number):
            return None
        if self.scale is None:
            return number
        low, high = self.scale
        return (number - low) / (high - low) if low <= number <= high else None


def _settled(text: str, matches: list[re.Match[str]]) -> re.Match[str] | None:
    """The one that the text states, where it names several: "Yes. There is no error" is a yes. None where what it names is denied, or
    somebody else's words."""
    if not matches:
        return None
    meant = [one for one in matches if not _doubtful(text, one)]
    stated = [one for one in meant if STATED.search(text[max(0, one.start() - WINDOW) : one.start()]) and ENDS.match(text, one.end())]
    if stated:
        return stated[-1]
    if BEGINS.match(text[: matches[0].start()]) and ENDS.match(text, matches[0].end()):
        return matches[0]
    last = matches[-1]
    if last in meant and ON_THE_LAST_LINE.search(text, 0, last.start()) and NOTHING_MORE.match(text, last.end()):
        return last
    return last if meant == matches and len({one.group().casefold() for one in matches}) == 1 else None


def _doubtful(text: str, found: re.Match[str]) -> bool:
    before = text[max(0, found.start() - WINDOW) : found.start()]
    return any(pattern.search(before) for pattern in (DENIED, QUOTED, SAID))


def checked_pattern(pattern: str) -> str:
    """ValueError if it is none."""
    _ = VerdictParser(pattern).search
    return pattern


def checked_scale(scale: tuple[float, float]) -> tuple[float, float]:
    if not scale[0] < scale[1]:
        raise ValueError("the first number has to be less than the second")
    return scale
