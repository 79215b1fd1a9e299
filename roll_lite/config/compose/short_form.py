"""Sections that are chosen by their name: `strategy: sglang` is short for `strategy: {name: sglang}`, and another name than before brings
the keys that only the former had to an end.

Spelled out as soon as a file or an override is read, before anything is merged: what comes later finds a section.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic.fields import FieldInfo

from roll_lite.config.problems import Path
from roll_lite.config.schema.base import Section
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
    return isinstance(value, str) and "${" not in value and value != "???" and bool(_members(path))


def make_room(tree: Any, layer: Any, path: Path) -> None:
    """Before `layer` is merged over `tree`, both at `path`: takes from the tree what would not be merged but replaced. That is a list under
    a section and the other way round, which OmegaConf refuses; and where the layer chooses another member of a union, the former
    member's keys, but for those that mean the same in both."""
    if not isinstance(tree, DictConfig) or not isinstance(layer, DictConfig | Mapping):
        return
    members = _members(path)
    former, chosen = (members.get(str(_plain(one, "name"))) for one in (tree, layer))
    former = former or next(iter(members.values()), None)
    if former is not None and chosen is not None and former is not chosen:
        for key in [str(key) for key in tree if key in former.model_fields]:
            if key != "name" and not _alike(former.model_fields[key], chosen.model_fields.get(key)):
                del tree[key]
    for key in map(str, layer):
        old, new = _plain(tree, key), _plain(layer, key)
        if isinstance(old, DictConfig) and isinstance(new, DictConfig | Mapping):
            make_room(old, new, (*path, key))
        elif isinstance(old, DictConfig | ListConfig) and isinstance(new, DictConfig | ListConfig) and type(old) is not type(new):
            del tree[key]


def _plain(node: DictConfig | Mapping[str, Any], key: str) -> Any:
    """The value; None where there is none yet, or an interpolation."""
    if isinstance(node, DictConfig) and OmegaConf.is_interpolation(node, key):
        return None
    return node.get(key) if key in node else None


def _alike(one: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and (one.annotation, one.metadata, one.default) == (other.annotation, other.metadata, other.default)


@cache
def _chosen_by_name() -> dict[Path, dict[str, type[Section]]]:
    """The members at the places of sections whose `name` is a choice among given words, even where there is only one so far. The first is
    the default."""
    found: dict[Path, dict[str, type[Section]]] = {}
    for path, cls in sections():
        name = cls.model_fields.get("name")
        if name is not None and get_origin(name.annotation) is Literal:
            found.setdefault(path, {})[get_args(name.annotation)[0]] = cls
    return found


def _members(path: Path) -> dict[str, type[Section]]:
    return next((members for place, members in _chosen_by_name().items() if _is_at(path, place)), {})


def _is_at(path: Path, place: Path) -> bool:
    return len(path) == len(place) and all(wanted in (key, "<name>", "<n>") for key, wanted in zip(path, place, strict=True))
