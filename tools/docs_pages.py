#!/usr/bin/env python3
"""Writes the tables of docs/configuration.md, docs/metrics.md, docs/rewards.md, docs/coming_from.md, docs/versioning.md
and docs/command_line.md: `make docs`.

What stands above the marker of a page is written by hand and stays.
"""

from __future__ import annotations

import inspect
import json
import re
from argparse import Action, ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from roll_lite.cli import _parser
from roll_lite.config.coming_from.convert import table_of
from roll_lite.config.problems import dotted, show
from roll_lite.config.schema.base import Section
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.validation import FORMER_NAMES, NAMES_IN_OTHER_TRAINERS, sections, shape_of
from roll_lite.config.wording import field_type, in_words
from roll_lite.files import changed_environment
from roll_lite.observability.metric_table import DERIVED, METRICS
from roll_lite.rewards.base import RewardType
from roll_lite.rewards.registry import REWARDS, reward_type

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARKER = "<!-- Below this line `make docs` writes the page from the code. -->\n"
CODE = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names, *lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([names, "|" + "---|" * len(head), *lines])


# ---------------------------------------------------------------- configuration.md


def configuration() -> str:
    places: dict[type[Section], list[str]] = {}
    for path, cls in sections():
        places.setdefault(cls, []).append(dotted(path))
    return "\n\n".join(_section(cls, where) for cls, where in places.items())


def _section(cls: type[Section], places: list[str]) -> str:
    parts = [f"## {cls.__name__}"]
    if cls is not RunConfig:
        parts.append("At " + ", ".join(f"`{place}`" for place in places) + ".")
    if cls.__doc__ and cls.__doc__ != Section.__doc__:
        parts.append(" ".join(cls.__doc__.split()))
    rows = []
    for name, info in cls.model_fields.items():
        description = " ".join((info.description or "Selects this section.").split())
        rows.append((f"`{name}`", _type(info), _default(info), description))
    return "\n\n".join([*parts, table(("field", "type", "default", "meaning"), rows)])


def _type(info: FieldInfo) -> str:
    shape = shape_of(info.annotation)
    if not shape.variants:
        return in_words(field_type(info))
    links = " or ".join(f"[{variant.__name__}](#{variant.__name__.lower()})" for variant in shape.variants)
    if shape.container is None:
        return links
    return ("mapping of name to " if shape.container is dict else "list of ") + links


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
        return f"`{_json(value)}`" if value else "its defaults"
    if isinstance(value, list):
        value = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in value]
    return f"`{_json(value)}`"


def _json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


# ---------------------------------------------------------------- metrics.md


def metrics() -> str:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, metric in METRICS.items():
        if metric.shown:
            row = (f"`{name}`", metric.reduction.value, metric.by or "", metric.unit, metric.description)
            groups.setdefault(name.split("/")[0], []).append(row)
    for name, derived in DERIVED.items():
        row = (f"`{name}`", "derived", METRICS[derived.inputs[0]].by or "", derived.unit, derived.description)
        groups.setdefault(name.split("/")[0], []).append(row)
    head = ("name", "reduction", "by", "unit", "meaning")
    return "\n\n".join(f"## {title}\n\n{table(head, rows)}" for title, rows in groups.items())


# ---------------------------------------------------------------- rewards.md


def rewards() -> str:
    contents = " · ".join(f"[{name}](#{name})" for name in REWARDS)
    return "\n\n".join([f"Types: {contents}", *(_reward(name, reward_type(name)) for name in REWARDS)])


def _reward(name: str, cls: type[RewardType]) -> str:
    prose, example = documentation(cls)
    rows = []
    for argument, info in cls.model_fields.items():
        default = "required" if info.is_required() else f"`{show(info.get_default(call_default_factory=True))}`"
        shown = f"**`{argument}`**" if info.is_required() else f"`{argument}`"
        rows.append((shown, in_words(field_type(info)), default, _page_text(" ".join((info.description or "").split()))))
    return "\n\n".join([f"## {name}", _page_text(prose), table(("argument", "type", "default", "meaning"), rows), example])


def documentation(cls: type[RewardType]) -> tuple[str, str]:
    """Prose of the docstring, and the YAML example at its end."""
    prose, fence, example = inspect.cleandoc(cls.__doc__ or "").partition("```yaml\n")
    return prose.strip(), fence + example


def _page_text(text: str) -> str:
    """Escape tags outside code, so that they are not read as HTML."""
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in CODE.split(text))


# ---------------------------------------------------------------- coming_from.md

TITLES = {"roll": "ROLL", "verl": "verl", "openrlhf": "OpenRLHF", "trl": "TRL"}


def coming_from() -> str:
    parts = []
    for project, title in TITLES.items():
        entries = sorted(table_of(project)["keys"].items())
        rows = [(_keys(key, entry), _here(entry), _how(entry)) for key, entry in entries if key != "(all)"]
        parts.append(f"## {title}\n\n{table((title, 'here', ''), rows)}")
    return "\n\n".join(parts)


def _keys(key: str, entry: dict[str, Any]) -> str:
    former = ", ".join(f"`{one}`" for one in entry.get("was", ()))
    return f"`{key}`" + (f", also {former}" if former else "")


def _here(entry: dict[str, Any]) -> str:
    targets = entry.get("to", ())
    return ", ".join(f"`{path}`" for path in ([targets] if isinstance(targets, str) else targets)).replace("{each}", "NAME")


def _how(entry: dict[str, Any]) -> str:
    words = ", ".join(f"{theirs}: {ours}" for theirs, ours in entry.get("words", {}).items() if theirs != ours)
    nothing = f"nothing to set: {entry['always']}" if "always" in entry else entry.get("none", "")
    return _page_text("; ".join(part for part in (entry.get("how", ""), words, nothing, entry.get("note", "")) if part))


# ---------------------------------------------------------------- versioning.md


def versioning() -> str:
    return f"## Names that are told\n\n{table(('you write', 'the error names', 'in'), _told_names())}"


def _told_names() -> Iterable[tuple[str, str, str]]:
    for old, new in {**dict.fromkeys(FORMER_NAMES, "name"), **NAMES_IN_OTHER_TRAINERS}.items():
        places = dict.fromkeys(dotted(path) for path, cls in sections() if new in cls.model_fields)
        few = ", ".join(f"`{place}`" for place in places) if len(places) <= 6 else "every section that is chosen by a word"
        yield f"`{old}`", f"`{new}`", few


# ---------------------------------------------------------------- command_line.md


def command_line() -> str:
    with changed_environment({}, without=("RAY_API_SERVER_ADDRESS",)):  # gives a default
        return "\n\n".join(_command(command) for command in _commands(_parser()))


def _commands(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    below = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for command in action.choices.values():
            yield from _commands(command)


def _command(command: ArgumentParser) -> str:
    actions = [action for action in command._actions if action.dest != "help"]
    places = [_named(action) for action in actions if not action.option_strings]
    name = command.prog.removeprefix("roll-lite ")
    usage = " ".join([name, *(["[options]"] if len(places) < len(actions) else []), *places])
    description = command.description or ""
    parts = [f"## {name}", f"`{usage}`", f"{description[:1].upper()}{description[1:]}."]
    if actions:
        parts.append(table(("argument", "value", "meaning"), map(partial(_argument, command), actions)))
    return "\n\n".join(parts)


def _named(action: Action) -> str:
    name = str(action.metavar or action.dest)
    return {"*": f"[{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _argument(command: ArgumentParser, action: Action) -> tuple[str, str, str]:
    names = [one for one in action.option_strings if "_" not in one] or [str(action.metavar or action.dest)]
    shown = ", ".join(f"`{one}`" for one in names)
    value = ", ".join(map(str, action.choices or ()))
    if action.option_strings and action.nargs != 0:
        value = value or str(action.metavar or action.dest.upper())
    must = action.required and action.nargs not in ("*", "?")
    return f"**{shown}**" if must else shown, value, _page_text(command._get_formatter()._expand_help(action))


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "metrics.md": metrics,
    "rewards.md": rewards,
    "coming_from.md": coming_from,
    "versioning.md": versioning,
    "command_line.md": command_line,
}


def render(name: str) -> str:
    """Content of a page: its part by hand as in docs/, and the generated one."""
    by_hand, marker, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        raise ValueError(f"docs/{name} lacks the line {MARKER!r}")
    return f"{by_hand}{MARKER}\n{PAGES[name]()}\n"


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(render(page), encoding="utf-8")
