"""`strategy: sglang` is short for `strategy: {name: sglang}`, wherever a section is chosen by its name.

Spelled out as soon as a file or an override is read, before anything is merged: a word then sets the name and leaves the section's other
keys as they are, and what comes later finds a section.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_origin

from roll_lite.config.problems import Path
from roll_lite.config.validation import sections


def spell_out(data: Any, path: Path, lines: dict[Path, int]) -> Any:
    """`data`, which stands at `path`, with sections for words. `lines` gets the lines of their names."""
    if isinstance(data, dict):
        return {key: spell_out(value, (*path, key), lines) for key, value in data.items()}
    if isinstance(data, list):
        return [spell_out(value, (*path, str(index)), lines) for index, value in enumerate(data)]
    if not is_short_form(data, path):
        return data
    lines[*path, "name"] = lines[path]
    return {"name": data}


def is_short_form(value: Any, path: Path) -> bool:
    """An interpolation is none: it may give a whole section."""
    is_word = isinstance(value, str) and "${" not in value and value != "???"
    return is_word and any(_is_at(path, place) for place in _chosen_by_name())


@cache
def _chosen_by_name() -> frozenset[Path]:
    """Places of the sections whose `name` is a choice among given words, even where there is only one so far."""
    names = ((path, cls.model_fields.get("name")) for path, cls in sections())
    return frozenset(path for path, name in names if name is not None and get_origin(name.annotation) is Literal)


def _is_at(path: Path, place: Path) -> bool:
    return len(path) == len(place) and all(wanted in (key, "<name>", "<n>") for key, wanted in zip(path, place, strict=True))
