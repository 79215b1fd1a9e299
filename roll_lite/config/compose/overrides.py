"""Overrides on the command line: `a.b=1`, `a.b=[1,2]`, `a={x: 1}`, `+a.b=1`, `~a.b`, `trackers.0.name=jsonl`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll_lite.config.compose.short_form import is_short_form, make_room, spell_out
from roll_lite.config.compose.yaml_source import parse_yaml
from roll_lite.config.problems import Path, Problem, did_you_mean, dotted, show
from roll_lite.config.validation import words_at
from roll_lite.files import first_line

COMMAND_LINE = "command line"
GRAMMAR = "write key=value, +key=value to add, or ~key to delete"
_KEY = re.compile(r"[A-Za-z0-9_\-/]+(?:\.[A-Za-z0-9_\-/]+|\[[0-9]+\])*")

_CALL = re.compile(r"\s*(range|choice|interval|glob|shuffle|sort|tag)\((.*)\)\s*", re.DOTALL)
"""Functions of Hydra's sweeps."""
MOST_RUNS = 1000


@dataclass(frozen=True)
class Override:
    text: str
    path: Path
    value: Any = None
    delete: bool = False


def parse_override(text: str) -> Override | Problem:
    """Parse one override. Values are YAML: `null`, `true`, `[1,2]` and `{x: 1}` mean the same as in a file."""
    delete = text.startswith("~")
    key, separator, raw = text.lstrip("~+").partition("=") if not delete else (text[1:], "", "")
    if delete and "=" in key:
        return Problem(text, "a deletion takes no value; write " + text.partition("=")[0], source=COMMAND_LINE)
    if not _KEY.fullmatch(key) or not (separator or delete):
        return Problem(text or "(empty)", f"not an override; {GRAMMAR}", source=COMMAND_LINE)
    path = tuple(re.sub(r"\[([0-9]+)\]", r".\1", key).split("."))
    if delete:
        return Override(text, path, delete=True)
    parsed = parse_yaml(raw, place=text, root=path)
    if words_at(path) in ("text", "text or null") and "${" not in raw and (parsed.problems or isinstance(parsed.data, dict | list)):
        return Override(text, path, raw)  # braces, brackets and colons belong to the text
    if parsed.problems:
        return Problem(text, parsed.problems[0].message, source=COMMAND_LINE)
    if is_short_form(parsed.data, path):
        return Override(text, (*path, "name"), parsed.data)
    return Override(text, path, spell_out(parsed.data, path, parsed.lines))


def names_first(overrides: Sequence[Override]) -> list[Override]:
    """Reorder overrides: choosing a section's name drops earlier settings of the section, so it moves before them."""
    ordered: list[Override] = []
    for one in overrides:
        named = isinstance(one.value, dict) and "name" in one.value
        section = one.path if named else one.path[:-1]
        place = len(ordered)
        for index in reversed(range(len(ordered)) if named or one.path[-1] == "name" else ()):
            other = ordered[index].path
            if other == one.path or other == section[: len(other)]:
                break
            place = index if other[: len(section)] == section else place
        ordered.insert(place, one)
    return ordered


def alternatives(text: str) -> list[str]:
    """Expand a sweep: `key=a,b` and `key=choice(a,b)` give `key=a` and `key=b`, `key=range(1,3)` gives `key=1` and `key=2`. Commas in
    quotes, brackets, braces and parentheses do not separate. ValueError for an invalid sweep."""
    key, separator, raw = text.partition("=")
    if (called := _CALL.fullmatch(raw)) is None:
        values = _parts(raw) if separator else []
    elif called[1] in ("range", "choice"):
        values = _range(called[2]) if called[1] == "range" else _parts(called[2])
        if not values:
            raise ValueError(f"{called[1]}() has no value; write {key}=choice(a,b)")
    else:
        raise ValueError(f"a sweep does not know {called[1]}(); write {key}=a,b or {key}=choice(a,b) or {key}=range(start,stop,step)")
    return [f"{key}={value}" for value in values] if len(values) > 1 or called else [text]


def is_sweep(text: str) -> bool:
    """True if the override is a sweep, for `run -m`."""
    try:
        return len(alternatives(text)) > 1
    except ValueError:
        return True


def _parts(raw: str) -> list[str]:
    try:
        node = yaml.compose(f"[{raw}]", Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):  # reported where the value is parsed
        return [raw]
    parts: list[str] = []
    open_ = 0
    start = 0
    for one in node.value if isinstance(node, yaml.SequenceNode) else ():
        start = start if open_ else one.start_mark.index - 1
        open_ += one.value.count("(") - one.value.count(")") if isinstance(one, yaml.ScalarNode) and one.style is None else 0
        if open_ <= 0:
            parts.append(raw[start : one.end_mark.index - 1])
    return parts


def _range(arguments: str) -> list[str]:
    """Values of a range as in Python, decimals too."""
    try:
        given = [Decimal(one.strip()) for one in arguments.split(",")]
        start, stop, step = {1: (Decimal(0), *given, Decimal(1)), 2: (*given, Decimal(1)), 3: tuple(given)}[len(given)]
        count = max(0, math.ceil((stop - start) / step))
    except (ArithmeticError, ValueError, KeyError):
        raise ValueError(f"range({arguments}) takes numbers: range(stop), range(start,stop) or range(start,stop,step)") from None
    if not 0 < count <= MOST_RUNS:
        raise ValueError(f"range({arguments}) has {'no value' if not count else f'{count} values, more than {MOST_RUNS}'}")
    return [str(start + number * step) for number in range(count)]


def apply_override(config: DictConfig, override: Override) -> list[Problem]:
    """Set, merge or delete the value. Keys that do not exist are created; the schema checks them later."""
    last = override.path[-1]
    try:
        parent = _parent(config, override)
    except LookupError as error:
        return [Problem(override.text, str(error.args[0]), source=COMMAND_LINE)]
    if override.delete:
        if isinstance(parent, ListConfig):
            del parent[int(last)]
        else:
            del parent[last]
    elif override.value == {} and isinstance(parent, DictConfig) and isinstance(there := _child(parent, last), DictConfig) and there:
        message = (
            f"a mapping is merged into a section, and an empty one changes nothing; delete what is to go: ~{dotted(override.path)}.KEY"
        )
        return [Problem(override.text, message, source=COMMAND_LINE)]
    else:
        # Replaced, not merged: a list over a section, the reverse, and anything over an interpolation, which need not resolve.
        layer = {last: override.value}
        if parent is not config or len(override.path) == 1:
            make_room(parent, layer, override.path[:-1])
        if not layer:  # a null that removes the inherited section
            return []
        settled = not OmegaConf.is_interpolation(parent, int(last) if isinstance(parent, ListConfig) else last)
        merge = settled and isinstance(override.value, dict) and isinstance(_child(parent, last), DictConfig)
        OmegaConf.update(config, dotted(override.path), override.value, merge=merge, force_add=True)
    return []


def _parent(config: DictConfig, override: Override) -> DictConfig | ListConfig:
    """Container of the override's last key. Raises LookupError with a message if it cannot exist."""
    container: Any = config
    for depth, key in enumerate(override.path):
        here = dotted(override.path[:depth])
        if isinstance(container, ListConfig):
            if not key.isdigit():
                raise LookupError(f"{here} is a list; after it comes a number, not {key!r}")
            if int(key) >= len(container):
                raise LookupError(f"{here} has {len(container)} entries, numbered from 0; there is no entry {key}")
        elif isinstance(container, DictConfig):
            if override.delete and key not in list(container):  # `in` is false if the value is ???
                raise LookupError(f"nothing to delete at {dotted(override.path[: depth + 1])}; {did_you_mean(key, map(str, container))}")
        elif container is None and not override.delete:
            if key.isdigit():
                raise LookupError(f"{here} is not set in the YAML files; give the whole list: {here}=[...]")
            return config
        else:
            raise LookupError(f"{here} is {show(container, here)}, not a section; it has no {key!r}")
        if depth == len(override.path) - 1:
            return container
        container = _child(container, key)
    raise AssertionError("an override has at least one key")


def _child(container: DictConfig | ListConfig, key: str) -> Any:
    place: Any = int(key) if isinstance(container, ListConfig) else key
    if isinstance(container, DictConfig) and key not in container:  # absent or ???
        return None
    try:
        return container[place]
    except OmegaConfBaseException as error:
        raise LookupError(first_line(error)) from error
