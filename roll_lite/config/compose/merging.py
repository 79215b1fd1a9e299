"""Merge configurations by the schema. null removes inherited settings.

If a section's `name` changes, keys that fit only the former name are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from roll_lite.config.problems import Path
from roll_lite.config.validation import discriminator_of, is_removed_by_null, sections_at


def spell_out(data: Any, path: Path, lines: dict[Path, int]) -> Any:
    """Expand short forms: `sglang` becomes `{name: sglang}`. `lines` gets the new keys' line numbers."""
    if isinstance(data, dict):
        return {key: spell_out(value, (*path, key), lines) for key, value in data.items()}
    if isinstance(data, list):
        return [spell_out(value, (*path, str(index)), lines) for index, value in enumerate(data)]
    if not is_short_form(data, path):
        return data
    lines[*path, "name"] = lines[path]
    return {"name": data}


def is_short_form(value: Any, path: Path) -> bool:
    is_word = isinstance(value, str) and "${" not in value and value != "???"
    return is_word and any("name" in cls.model_fields for cls in sections_at(path))


def merge(tree: dict[str, Any], layer: Mapping[str, Any], path: Path = ()) -> None:
    """Merge `layer` into `tree`."""
    for key in _ended(tree, layer, path):
        del tree[key]
    for key, value in layer.items():
        if value is None and is_removed_by_null((*path, key), inherited=key in tree):
            tree.pop(key, None)
        elif isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value, (*path, key))
        else:
            tree[key] = value


def _ended(tree: Mapping[str, Any], layer: Mapping[str, Any], path: Path) -> list[str]:
    """Keys to drop from `tree` if `layer` changes its `name`: `args`, and fields that the new choice lacks or defines differently."""
    former, chosen = (None if "${" in str(one.get("name")) or one.get("name") == "???" else one.get("name") for one in (tree, layer))
    classes = sections_at(path)
    if chosen is None or former == chosen or not any("name" in cls.model_fields for cls in classes):
        return []
    if len(classes) == 1:
        return ["args"] if former is not None and "args" in tree and "args" in classes[0].model_fields else []
    by_name = {discriminator_of(cls): cls for cls in classes}
    before, after = by_name.get(str(former), classes[0]), by_name.get(str(chosen))
    if after is None or after is before:
        return []
    own = [key for key in tree if key in before.model_fields and key != "name"]
    return [key for key in own if not _alike(before.model_fields[key], after.model_fields.get(key))]


def _alike(one: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and (one.annotation, one.metadata, one.default) == (other.annotation, other.metadata, other.default)
