"""Command-line overrides: `a.b=1`, `a.b=[1,2]`, `a={x: 1}`, `+a.b=1`, `~a.b`, `trackers.0.name=jsonl`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml

from roll_lite.config.compose.merging import is_short_form, merge, spell_out
from roll_lite.config.compose.yaml_source import parse_yaml
from roll_lite.config.problems import Path, Problem, did_you_mean, dotted, show
from roll_lite.config.validation import words_at

COMMAND_LINE = "command line"
GRAMMAR = "write key=value, +key=value to add, or ~key to delete"
_KEY = re.compile(r"[A-Za-z0-9_\-/]+(?:\.[A-Za-z0-9_\-/]+|\[[0-9]+\])*")

_CALL = re.compile(r"\s*(range|choice|interval|glob|shuffle|sort|tag)\((.*)\)\s*", re.DOTALL)
MOST_RUNS = 1000


@dataclass(frozen=True)
class Override:
    text: str
    path: Path
    value: Any = None
    delete: bool = False


def parse_override(text: str) -> Override | Problem:
    """Parse an override. Values are YAML; texts need no quotes for braces and colons."""
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
    """Put overrides of a section's `name` before those of its other keys, because a change of `name` may drop keys set before it."""
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
    """Expand a sweep, `key=a,b`, `key=choice(a,b)` or `key=range(1,3)`, into one override per value."""
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


def _parts(raw: str) -> list[str]:
    try:
        node = yaml.compose(f"[{raw.replace('?', '_')}]", Loader=yaml.SafeLoader)  # a list refuses it in hf://owner/name?revision=...
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
    try:
        given = [Decimal(one.strip()) for one in arguments.split(",")]
        start, stop, step = {1: (Decimal(0), *given, Decimal(1)), 2: (*given, Decimal(1)), 3: tuple(given)}[len(given)]
        count = max(0, math.ceil((stop - start) / step))
    except (ArithmeticError, ValueError, KeyError):
        raise ValueError(f"range({arguments}) takes numbers: range(stop), range(start,stop) or range(start,stop,step)") from None
    if not 0 < count <= MOST_RUNS:
        raise ValueError(f"range({arguments}) has {'no value' if not count else f'{count} values, more than {MOST_RUNS}'}")
    return [str(start + number * step) for number in range(count)]


def apply_override(tree: dict[str, Any], override: Override) -> list[Problem]:
    try:
        holder, depth = _holder(tree, override)
    except LookupError as error:
        return [Problem(override.text, str(error.args[0]), source=COMMAND_LINE)]
    key, path, value = override.path[depth], override.path[:depth], override.value
    for inner in reversed(override.path[depth + 1 :]):
        value = {inner: value}
    if isinstance(holder, list):
        there = holder[int(key)]
        if override.delete:
            del holder[int(key)]
        elif isinstance(there, dict) and isinstance(value, dict):
            merge(there, value, (*path, key))
        else:
            holder[int(key)] = value
    elif override.delete:
        del holder[key]
    elif value == {} and isinstance(there := holder.get(key), dict) and there:
        message = "a mapping is merged into a section, and an empty one changes nothing; delete what is to go"
        return [Problem(override.text, f"{message}: ~{dotted(override.path)}.KEY", source=COMMAND_LINE)]
    else:
        merge(holder, {key: value}, path)
    return []


def _holder(tree: dict[str, Any], override: Override) -> tuple[dict[str, Any] | list[Any], int]:
    """Innermost existing section or list on the path, and its depth; LookupError if the next key does not fit."""
    container: Any = tree
    for depth, key in enumerate(override.path):
        here, below = dotted(override.path[:depth]), override.path[depth + 1 :]
        if isinstance(container, list):
            if not key.isdigit():
                raise LookupError(f"{here} is a list; after it comes a number, not {key!r}")
            if int(key) >= len(container):
                raise LookupError(f"{here} has {len(container)} entries, numbered from 0; there is no entry {key}")
            inner = container[int(key)]
        elif isinstance(container, dict):
            if override.delete and key not in container:
                raise LookupError(f"nothing to delete at {dotted(override.path[: depth + 1])}; {did_you_mean(key, container)}")
            inner = container.get(key)
        else:
            raise LookupError(f"{here} is {show(container, here)}, not a section; it has no {key!r}")
        if below and inner in (None, "???") and not override.delete:
            if below[0].isdigit():
                whole = dotted(override.path[: depth + 1])
                raise LookupError(f"{whole} is not set in the YAML files; give the whole list: {whole}=[...]")
            return container, depth
        if not below:
            return container, depth
        container = inner
    raise AssertionError("an override has at least one key")
