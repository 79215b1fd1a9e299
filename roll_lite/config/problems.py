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
DEEPEST = 50


ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*:/+)[^/?#\s\"@]*@", re.IGNORECASE)
"""With a user, a password or a token; as a path it has lost a slash."""
LOGIN = re.compile(r"(?<![\w.:-])[\w.-]+:[^\s/@:\"']+@(?=\w)")
"""A user and a password in front of a host, without a scheme."""
KEY = re.compile(
    r"([?&](?:[a-z0-9_.-]*(?:key|token|secret|passw(?:or)?d|signature|credential)|sig|auth|authorization|pwd)=)[^&#\s\"]+", re.IGNORECASE
)
"""In the query of an address."""
_SECRETS = r"(?:key|token|secret|passw(?:or)?d|pwd|credentials?|authorization)"
SECRET = re.compile(rf"{_SECRETS}$", re.IGNORECASE)
"""The end of a setting's name whose value is shown nowhere. `api_key_env` is the name of a variable, `max_tokens` a number."""
ASSIGNED = re.compile(rf"({_SECRETS}[\"']?\s*[=:]\s*).+", re.IGNORECASE | re.DOTALL)
"""In a text that could not be read as a setting."""
HIDDEN = "***"
LEFT_OUT = "???"
"""In a configuration that is written down: whoever reads it is asked for the value."""


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
        message = without_logins(self.message)
        if is_secret(self.path) and isinstance(self.value, str) and not _tells_nothing(self.value):
            message = message.replace(self.value, HIDDEN)
        path = hidden(self.path)
        path = path if len(path) <= LONGEST_VALUE else path[: LONGEST_VALUE - 3] + "..."
        place = path if self.value is NO_VALUE else f"{path} = {show(self.value, self.path)}"
        return printable(f"{place}: {message}" + (f"  [{self.source}]" if self.source else ""))


class Missing(Problem):
    """A value that has to be given and is not."""


class ConfigError(ValueError):
    """Everything that is wrong with one configuration. `partial`: what could be read of it."""

    def __init__(self, name: str, problems: Sequence[Problem], partial: Any = None) -> None:
        self.name = name
        self.problems = tuple(problems)
        self.partial = partial
        count = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        super().__init__("\n".join([f"{count} in configuration {name!r}:", *(f"  - {problem}" for problem in self.problems)]))


def dotted(path: Path) -> str:
    return ".".join(path)


def is_secret(path: str) -> bool:
    """Does the name of the setting, of which it may be an entry, say so?"""
    return SECRET.search(re.sub(r"(?:\.[0-9]+)+$", "", path)) is not None


def hidden(text: str) -> str:
    """An override or another text that could not be read, without what it may give to a key or a password."""
    return without_logins(ASSIGNED.sub(rf"\1{HIDDEN}", text))


def without_logins(text: str) -> str:
    return LOGIN.sub(f"{HIDDEN}@", ADDRESS.sub(rf"\1{HIDDEN}@", KEY.sub(rf"\1{HIDDEN}", text)))


def without_secrets(value: Any, path: str = "", depth: int = 0, hidden_as: str = HIDDEN) -> Any:
    """Of a section whatever its names say."""
    if depth < DEEPEST and isinstance(value, dict):
        return {key: without_secrets(item, f"{path}.{key}", depth + 1, hidden_as) for key, item in value.items()}
    if depth < DEEPEST and isinstance(value, list):
        return [without_secrets(item, f"{path}.{index}", depth + 1, hidden_as) for index, item in enumerate(value)]
    return hidden_as if is_secret(path) and not _tells_nothing(value) else value


def _tells_nothing(value: Any) -> bool:
    """The name of a variable is no secret, only what it holds."""
    return value is None or isinstance(value, bool) or value == "" or (isinstance(value, str) and value.startswith("${"))


def show(value: Any, path: str = "") -> str:
    """A value as a user would write it on the command line, cut where it is long. `path`: where it stands, which may say that it is a
    secret."""
    try:
        text = json.dumps(without_secrets(value, path), default=str, ensure_ascii=False)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list that holds itself
        text = f"({type(value).__name__})"
    text = printable(without_logins(text))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def printable(text: str) -> str:
    """With other characters, which might steer a terminal, as escapes."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


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


def space_missing(value: Any) -> str:
    """The end of a message about a text where a key and its value may be meant."""
    if not isinstance(value, str) or (found := re.match(r"([A-Za-z_]\w*):(?=[^\s/])", value)) is None:
        return ""
    return "; YAML wants a space after the colon: " + hidden(f"{found[1]}: {value[found.end() :].split(' ')[0]}")


def first_line(error: BaseException) -> str:
    """Of what it says; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
