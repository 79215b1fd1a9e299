"""Validate plain data against the schema and collect all mistakes.

Pydantic checks single values only, because its error locations name union members, not YAML paths, and one wrong value prevents the whole
object.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from annotated_types import MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from roll_lite.config.problems import NO_VALUE, Missing, Path, Problem, close_names, did_you_mean, dotted, or_nearest, space_missing
from roll_lite.config.schema.base import Section
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.wording import field_type, in_words, refusal

S = TypeVar("S", bound=Section)
FORMER_NAMES = ("type", "kind")
DOTTED_PATH = "a dotted path"
REMOVED = {"batch_wait_ms": "was removed: samples that wait at the same time share requests; leave it out"}
NAMES_IN_OTHER_TRAINERS = {
    "learning_rate": "lr",
    "max_new_tokens": "max_tokens",
    "num_generations": "samples_per_prompt",
    "rollout_batch_size": "prompts_per_step",
}


class _Invalid:
    """Type of _INVALID, which stands for an invalid value."""


_INVALID = _Invalid()


def validate(data: dict[str, Any], broken: Collection[Path] = ()) -> tuple[RunConfig, list[Problem]]:
    return section_from(RunConfig, data, (), broken)


def section_from(cls: type[S], data: dict[str, Any], path: Path, broken: Collection[Path] = ()) -> tuple[S, list[Problem]]:
    """Return the section's valid part and all problems. `broken`: paths with known problems, which are skipped."""
    walker = _Walker(broken)
    section = walker.section(cls, data, path)
    assert isinstance(section, cls)
    return section, walker.problems


@dataclass
class _Walker:
    broken: Collection[Path]
    problems: list[Problem] = field(default_factory=list)
    entries: dict[Path, list[str]] = field(default_factory=dict)

    def section(self, cls: type[Section], data: Any, path: Path) -> Section | _Invalid:
        if data is None and "enabled" in cls.model_fields:
            data = {"enabled": False}
        if not isinstance(data, dict):
            self._refuse(path, data, f"expected a section with the keys {', '.join(cls.model_fields)}{space_missing(data)}")
            return _INVALID
        unknown = [key for key in data if key not in cls.model_fields and (*path, key) not in self.broken]
        meant = {name for key in unknown for name in self._unknown_key(cls, key, data, path)}
        values: dict[str, Any] = {}
        refused: list[str] = []
        for name, info in cls.model_fields.items():
            here = (*path, name)
            if name in data or info.validate_default:
                values[name] = self._field(cls, name, info, data[name] if name in data else str(info.default), here)
                if values[name] is _INVALID:
                    refused.append(name)
            elif here in self.broken or name in meant or (info.is_required() and () in self.broken):
                refused.append(name)
            elif info.is_required():
                refused.append(name)
                others = [one for one in self.entries.get(path[:-1], []) if one != path[-1]]
                hint = or_nearest(path[-1], others) if others else ""
                words = in_words(field_type(info))
                if words == "section":
                    words = f"a section with the keys {', '.join(shape_of(info.annotation).variants[0].model_fields)}"
                self.problems.append(Missing(dotted(here), f"is missing; expected {words}{hint}"))
        built = cls.model_construct(**values)
        for name in refused:
            built.__dict__.pop(name, None)
        for key, message in built.mistakes():
            self._refuse((*path, *key.split(".")) if key else path, value_at(built, key), message)
        return built

    def _field(self, cls: type[Section], name: str, info: FieldInfo, value: Any, path: Path) -> Any:
        if path in self.broken:
            return _INVALID
        if value is None and _optional(info.annotation):
            return None
        shape = shape_of(info.annotation)
        if not shape.variants:
            try:
                return _leaf_adapter(cls, name).validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                self._refuse(path, value, refusal(info, value, error.errors()))
                return _INVALID
        if shape.container is None:
            return self._one_of(shape.variants, value, path, info.get_default(call_default_factory=True))
        too_few = value in ({}, []) and any(isinstance(one, MinLen) for one in info.metadata)
        if not isinstance(value, shape.container) or too_few:
            hint = f"; write [{value}]" if shape.container is list and isinstance(value, str) else ""
            self._refuse(path, value, f"expected {in_words(info.annotation)}" + (", at least one" if too_few else hint))
            return _INVALID
        if isinstance(value, dict):
            self.entries[path] = list(value)
        built: dict[Any, Section] = {}
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            here = (*path, str(key))
            one = _INVALID if here in self.broken else self._one_of(shape.variants, item, here)
            if isinstance(one, _Invalid):  # its fields raise Refused when read
                one = shape.variants[0].model_construct()
                one.__dict__.clear()
            built[key] = one
        return built if isinstance(value, dict) else list(built.values())

    def _one_of(self, variants: list[type[Section]], value: Any, path: Path, default: Any = None) -> Section | _Invalid:
        if len(variants) == 1:
            return self.section(variants[0], value, path)
        by_name = {discriminator_of(variant): variant for variant in variants}
        own = by_name.pop(DOTTED_PATH, None)
        if not isinstance(value, dict):
            # Short forms are already expanded; a text here comes from an interpolation.
            hint = f"; to interpolate the name, write it as {path[-1]}.name" if isinstance(value, str) else ""
            self._refuse(path, value, f"expected one of {', '.join(by_name)}, or a section with such a name{hint}")
            return _INVALID
        name, is_broken = value.get("name", getattr(default, "name", None)), (*path, "name") in self.broken
        chosen = by_name.get(name) if isinstance(name, str) and not is_broken else None
        if chosen is None and isinstance(name, str) and "." in name:
            chosen = own
        if chosen is not None:
            return self.section(chosen, {"name": discriminator_of(chosen), **value}, path)
        if not is_broken:
            hint = space_missing(name) or or_nearest(str(name), by_name, most=2)
            known = ", ".join([*by_name, *([DOTTED_PATH] if own is not None else [])])
            self._refuse((*path, "name"), name, f"expected one of {known}{hint}")
        return _INVALID

    def _unknown_key(self, cls: type[Section], key: str, data: dict[str, Any], path: Path) -> list[str]:
        """Report an unknown key. Return similar unset keys: one of them was probably meant."""
        value = data[key]
        if key in FORMER_NAMES and "name" in cls.model_fields:
            self._refuse((*path, key), value, "is called name here, as in every section that is chosen by a word")
            return ["name"]
        if key in REMOVED:
            self._refuse((*path, key), value, REMOVED[key])
            return []
        if others := [discriminator_of(other) for other in sections_at(path) if other is not cls and key in other.model_fields]:
            if value is not None:
                message = f"is only used by name: {' or '.join(others)}; {discriminator_of(cls)} has the keys {', '.join(cls.model_fields)}"
                self._refuse((*path, key), value, message)
            return []
        ours = NAMES_IN_OTHER_TRAINERS.get(key, key)
        meant, hint = close_names(ours, cls.model_fields), did_you_mean(ours, cls.model_fields)
        inside = _paths_of_key(ours, cls, path)
        elsewhere = inside or ([] if meant else _paths_of_key(ours))
        if not meant and not elsewhere:
            near = close_names(ours, {name for _, one in sections(cls, path) for name in one.model_fields}, most=1)
            elsewhere = [found for name in near for found in _paths_of_key(name, cls, path)]
        if elsewhere:
            hint = f"there is {' and '.join(elsewhere[:3])}" + ("" if inside else f"; {hint}")
        self._refuse((*path, key), value, f"unknown key; {hint}")
        return close_names(ours, [name for name in cls.model_fields if name not in data])

    def _refuse(self, path: Path, value: Any, message: str) -> None:
        self.problems.append(Problem(dotted(path) or "(top)", message, value))


def value_at(section: Any, path: str) -> Any:
    """Return the value at a path, for messages; NO_VALUE if it is missing, invalid, or a section."""
    for key in path.split("."):
        items = vars(section) if isinstance(section, Section) else section if isinstance(section, dict) else {}
        section = section[int(key)] if isinstance(section, list) and key.isdigit() else items.get(key, NO_VALUE)
    held = section.values() if isinstance(section, dict) else section if isinstance(section, list) else [section]
    return NO_VALUE if any(isinstance(one, Section) for one in held) else section


def texts_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (YAML path, text); skip invalid fields."""
    if isinstance(value, str):
        yield path, value
    items = vars(value) if isinstance(value, Section) else value
    if isinstance(items, dict | list):
        for key, item in items.items() if isinstance(items, dict) else enumerate(items):
            yield from texts_in(item, f"{path}.{key}".lstrip("."))


@dataclass(frozen=True)
class Shape:
    """Structure of a field's type. `variants`: section classes, empty for plain values. `container`: dict or list, for a collection."""

    variants: list[type[Section]]
    container: type[dict[Any, Any]] | type[list[Any]] | None = None


def shape_of(annotation: Any) -> Shape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Shape([annotation])
    if origin in (Union, UnionType):
        return Shape([argument for argument in arguments if isinstance(argument, type) and issubclass(argument, Section)])
    return Shape(shape_of(arguments[-1]).variants, origin) if origin in (dict, list) else Shape([])


def discriminator_of(cls: type[Section]) -> str:
    """Return the `name` that selects the class in YAML; DOTTED_PATH if its `name` may be any dotted path."""
    return next(map(str, get_args(cls.model_fields["name"].annotation)), DOTTED_PATH)


def _optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


@cache
def _leaf_adapter(cls: type[Section], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(field_type(cls.model_fields[name]), config=ConfigDict(allow_inf_nan=False))


def sections(cls: type[Section] = RunConfig, path: Path = ()) -> Iterator[tuple[Path, type[Section]]]:
    """Yield (path, section class). `<name>` stands for a user's key, `<n>` for an index."""
    yield path, cls
    for name, info in cls.model_fields.items():
        shape = shape_of(info.annotation)
        inner: Path = () if shape.container is None else ("<name>",) if shape.container is dict else ("<n>",)
        for variant in shape.variants:
            yield from sections(variant, (*path, name, *inner))


def _paths_of_key(key: str, cls: type[Section] = RunConfig, path: Path = ()) -> list[str]:
    """Return the paths of settings with the name `key` in a section and below it."""
    return list(dict.fromkeys(dotted((*place, key)) for place, one in sections(cls, path) if key in one.model_fields))


@cache
def _places() -> dict[Path, list[type[Section]]]:
    places: dict[Path, list[type[Section]]] = {}
    for path, cls in sections():
        places.setdefault(path, []).append(cls)
    return places


@lru_cache(maxsize=4096)
def sections_at(path: Path) -> list[type[Section]]:
    """Section classes allowed at a path, the default first."""

    def fits(place: Path) -> bool:
        return len(path) == len(place) and all(wanted in (key, "<name>", "<n>") for key, wanted in zip(path, place, strict=True))

    return next((found for place, found in _places().items() if fits(place)), [])


def _fields_at(path: Path) -> list[FieldInfo]:
    return [cls.model_fields[path[-1]] for cls in sections_at(path[:-1]) if path[-1] in cls.model_fields]


def words_at(path: Path) -> str:
    fields = _fields_at(path)
    return in_words(field_type(fields[0])) if fields else ""


def is_removed_by_null(path: Path, inherited: bool) -> bool:
    """Return True if null in the YAML removes the key: an entry of a mapping from an earlier layer (`inherited`), or a setting that cannot
    be null and returns to its default."""
    fields = _fields_at(path)
    if not inherited and (len(sections_at(path)) != 1 or not fields):
        return False
    if sections_at(path) and not fields:
        return not path[-1].isdigit()
    takes_null = any("enabled" in cls.model_fields for cls in sections_at(path))
    return not takes_null and any(not info.is_required() and not _optional(info.annotation) for info in fields)
