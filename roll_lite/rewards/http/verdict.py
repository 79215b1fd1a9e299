"""From what a judge wrote to a number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from roll_lite.rewards.answer_extraction import after_thinking

NUMBER = r"[-+]?\d+(?:\.\d+)?"
STATED = re.compile(r"\bverdict\b[\W_]*(?:is\b)?[\W_]*\Z", re.IGNORECASE)
BEGINS, ENDS = re.compile(r"[\W_]*"), re.compile(r"[\W_]*?(?:[.,;:!)\]\n—-]|\Z)")
YES_OR_NO = {"yes": 1.0, "no": 0.0}


@dataclass(frozen=True)
class Verdict:
    value: float
    extracted: str
    """The part of the text that it was read from."""


@dataclass(frozen=True)
class VerdictParser:
    """Searches a judge's text for `pattern` (its first group, or all of it, where it matches last). Without one: the last number, or of
    the choices the one behind the last "verdict:", else the one that the text begins with, else the only one that it names. What was
    found is looked up in `choices`, or is a number; one of `scale` is moved to 0..1."""

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
        longest_first = sorted(self.known, key=len, reverse=True)
        return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)

    def __call__(self, text: str) -> Verdict | None:
        """None where the text holds no verdict. What a model thought aloud before it is not looked at."""
        text = after_thinking(text)
        matches = list(self.search.finditer(text))
        if self.pattern is None and self.known is not None:
            matches = _settled(text, matches)
        if not matches:
            return None
        found = next((group for group in matches[-1].groups() if group is not None), matches[-1].group()).strip()
        value = self._value(found)
        return None if value is None else Verdict(value, found)

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


def _settled(text: str, matches: list[re.Match[str]]) -> list[re.Match[str]]:
    """The choice that the text states, where it names several: "Yes. There is no error" is a yes, "yes or no" is none."""
    stated = [one for one in matches if STATED.search(text, 0, one.start())]
    if stated:
        return stated
    if matches and BEGINS.fullmatch(text, 0, matches[0].start()) and ENDS.match(text, matches[0].end()):
        return matches[:1]
    return matches if len({one.group().casefold() for one in matches}) == 1 else []


def checked_pattern(pattern: str) -> str:
    """ValueError if it is none."""
    _ = VerdictParser(pattern).search
    return pattern


def checked_scale(scale: tuple[float, float]) -> tuple[float, float]:
    if not scale[0] < scale[1]:
        raise ValueError("the first number has to be less than the second")
    return scale
