"""What is wrong with a configuration: every mistake is one Problem, and all of them travel together in one ConfigError."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Path = tuple[str, ...]
"""Place in the YAML tree; list indices are digits."""

LONGEST_VALUE = 100


ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*://)[^/?#\s\"@]*@", re.IGNORECASE)
"""With a user, a password or a token."""
KEY = re.compile(
    r"([?&](?:[a-z0-9_.-]*(?:key|token|secret|passw(?:or)?d|signature|credential)|sig|auth|authorization|pwd)=)[^&#\s\"]+", re.IGNORECASE
)
"""In the query of an address."""


def secret_in_address(text: str) -> str | None:
    """What it is, in words."""
    if ADDRESS.match(text):
        return "a user or a password"
    return "a key in its query" if "://" in text and KEY.search(text) else None


class _NoValue:
    """Stands for "there is no value to show", which is not the same as null."""


NO_VALUE = _NoValue()


@dataclass(frozen=True)
class Problem:
    path: str
    """Dotted YAML path, or what stands in its place (a file, an override)."""
    message: str
    """What is wrong and what would be right."""
    value: Any = NO_VALUE
    source: str = ""
    """Where the value was written: file and line, or the command line."""

    def at(self, source: str) -> Problem:
        return replace(self, source=source)

    def __str__(self) -> str:
        message = ADDRESS.sub(r"\1***@", KEY.sub(r"\1***", self.message))
        path = self.path if len(self.path) <= LONGEST_VALUE else self.path[: LONGEST_VALUE - 3] + "..."
        place = path if self.value is NO_VALUE else f"{path} = {show(self.value)}"
        return f"{place}: {message}" + (f"  [{self.source}]" if self.source else "")


class ConfigError(ValueError):
    """Everything that is wrong with one configuration."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        count = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        super().__init__("\n".join([f"{count} in configuration {name!r}:", *(f"  - {problem}" for problem in self.problems)]))


def dotted(path: Path) -> str:
    return ".".join(path)


def show(value: Any) -> str:
    """A value as a user would write it on the command line, cut where it is long."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list that holds itself
        text = f"({type(value).__name__})"
    text = ADDRESS.sub(r"\1***@", KEY.sub(r"\1***", text))
    text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """The close names if there are any, else all of them."""
    names = sorted(valid)
    if close := close_names(wrong, names):
        return f"did you mean {' or '.join(repr(name) for name in close)}?"
    return f"valid here: {', '.join(names)}." if names else "nothing is valid here."


def close_names(wrong: str, valid: Iterable[str], most: int = 2) -> list[str]:
    """The closest first, whatever their capitals."""
    by_lower = {name.lower(): name for name in valid}
    return [by_lower[name] for name in difflib.get_close_matches(wrong.lower(), by_lower, n=most, cutoff=0.6)]


def or_nearest(wrong: str, valid: Iterable[str], most: int = 1) -> str:
    """The end of a message; empty where nothing comes near."""
    close = close_names(wrong, valid, most)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def first_line(error: BaseException) -> str:
    """Of what it says; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
