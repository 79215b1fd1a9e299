from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from roll_lite.hub import config_notation

Path = tuple[str, ...]
"""Keys from the YAML root; list indices are digits."""

LONGEST_VALUE = 100
DEEPEST = 50


ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*:/+)[^/?#\s\"@]*@", re.IGNORECASE)
"""Pattern of a URL with a login. One slash suffices: converting a URL to a path drops the second."""
LOGIN = re.compile(r"(?<![\w.:-])[\w.-]+:[^\s/@:\"']+@(?=\w)")
KEY = re.compile(
    r"([?&](?:[a-z0-9_.-]*(?:key|token|secret|passw(?:or)?d|signature|credential)|sig|auth|authorization|pwd)=)[^&#\s\"]+", re.IGNORECASE
)
_SECRETS = r"(?:key|(?<!per_)token|secret|passw(?:or)?d|pwd|credentials?|authorization)"
SECRET = re.compile(rf"{_SECRETS}$", re.IGNORECASE)
"""Names of secret settings. `api_key_env` does not match: it names a variable."""
ASSIGNED = re.compile(rf"({_SECRETS}[\"']?\s*[=:]\s*).+", re.IGNORECASE | re.DOTALL)
HIDDEN = "***"
LEFT_OUT = "???"


def secret_in_address(text: str) -> str | None:
    if ADDRESS.match(text):
        return "a user or a password"
    return "a key in its query" if "://" in text and KEY.search(text) else None


class _NoValue:
    """Type of NO_VALUE, which stands for no value (None would be shown as null)."""


NO_VALUE = _NoValue()


@dataclass(frozen=True)
class Problem:
    path: str
    """YAML path, file, or override."""
    message: str
    value: Any = NO_VALUE
    source: str = ""

    def __str__(self) -> str:
        message = without_logins(self.message)
        if is_secret(self.path) and isinstance(self.value, str) and not _tells_nothing(self.value):
            message = message.replace(self.value, HIDDEN)
        path = hidden(self.path)
        path = path if len(path) <= LONGEST_VALUE else path[: LONGEST_VALUE - 3] + "..."
        place = path if self.value is NO_VALUE else f"{path} = {show(self.value, self.path)}"
        return printable(f"{place}: {message}" + (f"  [{self.source}]" if self.source else ""))


Mistake = tuple[str, str] | Problem


class Missing(Problem):
    """Problem: a required value is missing."""


class ConfigError(ValueError):
    """Mistakes in a configuration. `partial`: its valid part."""

    def __init__(self, name: str, problems: Sequence[Problem], partial: Any = None) -> None:
        self.name = name
        self.problems = tuple(problems)
        self.partial = partial
        count = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        super().__init__("\n".join([f"{count} in configuration {name!r}:", *(f"  - {problem}" for problem in self.problems)]))


def dotted(path: Path) -> str:
    return ".".join(path)


def covers(entries: Iterable[str], path: str) -> bool:
    """True if an entry names the setting, or a section that holds it; `*` matches any name."""
    given = path.split(".")
    return any(len(entry.split(".")) <= len(given) and all(map(fnmatch, given, entry.split("."))) for entry in entries)


def is_secret(path: str) -> bool:
    """True if the setting's name (for a list item, the list's) marks a secret (key, token, ...)."""
    return SECRET.search(re.sub(r"(?:\.[0-9]+)+$", "", path)) is not None


def hidden(text: str) -> str:
    return without_logins(ASSIGNED.sub(rf"\1{HIDDEN}", text))


def without_logins(text: str) -> str:
    return LOGIN.sub(f"{HIDDEN}@", ADDRESS.sub(rf"\1{HIDDEN}@", KEY.sub(rf"\1{HIDDEN}", text)))


def without_secrets(value: Any, path: str = "", depth: int = 0, hidden_as: str = HIDDEN) -> Any:
    if depth < DEEPEST and isinstance(value, dict):
        return {key: without_secrets(item, f"{path}.{key}", depth + 1, hidden_as) for key, item in value.items()}
    if depth < DEEPEST and isinstance(value, list):
        return [without_secrets(item, f"{path}.{index}", depth + 1, hidden_as) for index, item in enumerate(value)]
    return hidden_as if is_secret(path) and not _tells_nothing(value) else value


def _tells_nothing(value: Any) -> bool:
    return value is None or isinstance(value, bool) or value == "" or (isinstance(value, str) and value.startswith("${"))


def show(value: Any, path: str = "") -> str:
    try:
        text = json.dumps(without_secrets(value, path), default=config_notation, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):  # huge integer, keys that are paths, list that contains itself
        text = f"({type(value).__name__})"
    text = printable(without_logins(text))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def printable(text: str) -> str:
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """Write a hint: valid names that resemble `wrong`, or all valid names if none does."""
    names = sorted(valid)
    if close := close_names(wrong, names):
        return f"did you mean {' or '.join(repr(name) for name in close)}?"
    return f"valid here: {', '.join(names)}." if names else "nothing is valid here."


def close_names(wrong: str, valid: Iterable[str], most: int = 2) -> list[str]:
    by_lower = {name.lower(): name for name in valid}
    return [by_lower[name] for name in difflib.get_close_matches(wrong.lower(), by_lower, n=most, cutoff=0.6)]


def or_nearest(wrong: str, valid: Iterable[str], most: int = 1) -> str:
    close = close_names(wrong, valid, most)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def space_missing(value: Any) -> str:
    if not isinstance(value, str) or (found := re.match(r"([A-Za-z_]\w*):(?=[^\s/])", value)) is None:
        return ""
    return "; YAML wants a space after the colon: " + hidden(f"{found[1]}: {value[found.end() :].split(' ')[0]}")
