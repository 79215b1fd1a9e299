"""Merging by the schema: `strategy: sglang` is short for `strategy: {name: sglang}`, a new name drops keys that only the former one had,
and null removes inherited settings.

Words are expanded as soon as a file or an override is read, so that merging sees sections only.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic.fields import FieldInfo

from roll_lite.config.problems import Path
from roll_lite.config.validation import is_removed_by_null, sections_at


def spell_out(data: Any, path: Path, lines: dict[Path, int]) -> Any:
    """Expand words at `path` and below into sections. `lines` gets the lines of their names."""
    if isinstance(data, dict):
        return {key: spell_out(value, (*path, key), lines) for key, value in data.items()}
    if isinstance(data, list):
        return [spell_out(value, (*path, str(index)), lines) for index, value in enumerate(data)]
    if not is_short_form(data, path):
        return data
    lines[*path, "name"] = lines[path]
    return {"name": data}


def is_short_form(value: Any, path: Path) -> bool:
    """True if the value is a word for a section. An interpolation is not: it may give a whole section."""
    is_word = isinstance(value, str) and "${" not in value and value != "???"
    return is_word and any("name" in cls.model_fields for cls in sections_at(path))


def make_room(tree: Any, layer: Any, path: Path) -> None:
    """Prepare to merge `layer` over `tree`, both at `path`.

    Removes from the tree what the layer replaces: a list under a section and the reverse (OmegaConf refuses to merge them), and keys of a
    name that the layer changes. Removes from both the keys that a null of the layer removes.
    """
    if not isinstance(tree, DictConfig) or not isinstance(layer, DictConfig | MutableMapping):
        return
    for key in _ended(tree, layer, path):
        del tree[key]
    for key in [str(key) for key in layer]:
        old, new = _plain(tree, key), _plain(layer, key)
        if key in tree and _is_null(layer, key) and is_removed_by_null((*path, key)):
            del tree[key], layer[key]
        elif isinstance(old, DictConfig) and isinstance(new, DictConfig | Mapping):
            make_room(old, new, (*path, key))
        elif isinstance(old, DictConfig | ListConfig) and isinstance(new, DictConfig | ListConfig) and type(old) is not type(new):
            del tree[key]


def _ended(tree: DictConfig, layer: DictConfig | Mapping[str, Any], path: Path) -> list[str]:
    """Keys that end if the layer changes the section's name: those that only the former member of a union has, or has with another meaning;
    or the arguments of the former name."""
    former, chosen = (_plain(one, "name") for one in (tree, layer))
    classes = sections_at(path)
    if chosen is None or former == chosen or not any("name" in cls.model_fields for cls in classes):
        return []
    if len(classes) == 1:
        return ["args"] if former is not None and "args" in tree and "args" in classes[0].model_fields else []
    by_name = {get_args(cls.model_fields["name"].annotation)[0]: cls for cls in classes}
    before, after = by_name.get(str(former), classes[0]), by_name.get(str(chosen))
    if after is None or after is before:
        return []
    own = [str(key) for key in tree if key in before.model_fields and key != "name"]
    return [key for key in own if not _alike(before.model_fields[key], after.model_fields.get(key))]


def _is_null(node: DictConfig | Mapping[str, Any], key: str) -> bool:
    if isinstance(node, DictConfig) and (OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key)):
        return False
    return key in node and node[key] is None


def _plain(node: DictConfig | Mapping[str, Any], key: str) -> Any:
    """Value of a key; None if absent or an interpolation."""
    if isinstance(node, DictConfig) and OmegaConf.is_interpolation(node, key):
        return None
    return node.get(key) if key in node else None


def _alike(one: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and (one.annotation, one.metadata, one.default) == (other.annotation, other.metadata, other.default)
