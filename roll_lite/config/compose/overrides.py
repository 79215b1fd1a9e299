"""Overrides on the command line: `a.b=1`, `a.b=[1,2]`, `a={x: 1}`, `+a.b=1`, `~a.b`, `trackers.0.type=jsonl`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll_lite.config.compose.short_form import is_short_form, make_room, spell_out
from roll_lite.config.compose.yaml_source import parse_yaml
from roll_lite.config.problems import HIDDEN, Path, Problem, did_you_mean, dotted, first_line, is_secret, show

COMMAND_LINE = "command line"
GRAMMAR = "write key=value, +key=value to add, or ~key to delete"
_KEY = re.compile(r"[A-Za-z0-9_\-/]+(?:\.[A-Za-z0-9_\-/]+|\[[0-9]+\])*")


@dataclass(frozen=True)
class Override:
    text: str
    path: Path
    value: Any = None
    delete: bool = False


def parse_override(text: str) -> Override | Problem:
    """Values are YAML, so that `null`, `true`, `[1,2]` and `{x: 1}` mean what they mean in a file."""
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
    if parsed.problems:
        return Problem(text, parsed.problems[0].message, source=COMMAND_LINE)
    if is_short_form(parsed.data, path):
        return Override(text, (*path, "name"), parsed.data)
    if _is_placeholder(parsed.data):
        shown = HIDDEN if is_secret(dotted(path)) else raw
        message = f"YAML takes {shown} for a section; put it in quotes, and these in the shell's: {key}='\"{shown}\"'"
        return Problem(dotted(path), message, source=COMMAND_LINE)
    return Override(text, path, spell_out(parsed.data, path, parsed.lines))


def _is_placeholder(value: Any) -> bool:
    """A text such as {prompt}, without its quotes."""
    return isinstance(value, dict) and len(value) > 0 and all(one is None for one in value.values())


def alternatives(text: str) -> list[str]:
    """What a sweep makes of an override: `key=a,b` is `key=a` and `key=b`. Commas in quotes, brackets and braces separate nothing."""
    key, separator, raw = text.partition("=")
    try:
        node = yaml.compose(f"[{raw}]", Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):  # told where it is read
        return [text]
    if not separator or not isinstance(node, yaml.SequenceNode) or len(node.value) < 2:
        return [text]
    return [f"{key}={raw[one.start_mark.index - 1 : one.end_mark.index - 1]}" for one in node.value]


def apply_override(config: DictConfig, override: Override) -> list[Problem]:
    """Without struct mode: a key that does not exist is created here and judged by the schema later."""
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
        # A list over a section, or the other way round, replaces it; so does anything over an interpolation, which need not resolve.
        if parent is not config or len(override.path) == 1:
            make_room(parent, {last: override.value}, override.path[:-1])
        settled = not OmegaConf.is_interpolation(parent, int(last) if isinstance(parent, ListConfig) else last)
        merge = settled and isinstance(override.value, dict) and isinstance(_child(parent, last), DictConfig)
        OmegaConf.update(config, dotted(override.path), override.value, merge=merge, force_add=True)
    return []


def _parent(config: DictConfig, override: Override) -> DictConfig | ListConfig:
    """The container that holds the override's last key. Raises LookupError with a message where there can be none."""
    container: Any = config
    for depth, key in enumerate(override.path):
        here = dotted(override.path[:depth])
        if isinstance(container, ListConfig):
            if not key.isdigit():
                raise LookupError(f"{here} is a list; after it comes a number, not {key!r}")
            if int(key) >= len(container):
                raise LookupError(f"{here} has {len(container)} entries, numbered from 0; there is no entry {key}")
        elif isinstance(container, DictConfig):
            if override.delete and key not in list(container):  # `in` says no where the value is ???
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
