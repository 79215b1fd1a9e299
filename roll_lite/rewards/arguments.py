"""Reads a built-in reward type's arguments from YAML; reports every mistake with its place and a remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from roll_lite.config.problems import NO_VALUE, Problem, did_you_mean, dotted
from roll_lite.config.wording import field_type, refusal
from roll_lite.rewards.reward_type import RewardType, Unshown


def read_arguments(name: str, cls: type[RewardType], args: Mapping[str, Any], place: str) -> RewardType | list[Problem]:
    """Create the reward type, or return all problems with its arguments. Strict: the text "3" is no number."""
    unquoted = list(_unquoted(args, place))
    if unquoted:
        return unquoted
    try:
        return cls.model_validate_json(json.dumps(args, default=str), strict=True)
    except ValidationError as error:
        found = [_problem(name, cls, args, one, place) for one in error.errors(include_url=False)]
        return list({(one.path, one.message): one for one in found}.values())


def _unquoted(value: Any, place: str) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        if any(isinstance(key, bool) for key in value):
            yield Problem(place, 'YAML reads yes, no, on and off as true and false: put keys in quotes, such as {"yes": 1, "no": 0}')
        for key, inner in value.items():
            yield from _unquoted(inner, f"{place}.{key}")


def _problem(name: str, cls: type[RewardType], args: Mapping[str, Any], error: ErrorDetails, place: str) -> Problem:
    if not error["loc"]:
        return Problem(place, str(error["ctx"]["error"]))
    path, model, value = _where(cls, args, error)
    key, here = path[-1], dotted((place, *path))
    if error["type"] == "extra_forbidden":
        what = f"{name!r} takes no such argument" if model is cls else "unknown key"
        return Problem(here, f"{what}; {did_you_mean(key, model.model_fields)}", value)
    if error["type"] == "missing" and key in model.model_fields and value is None:
        return Problem(dotted((place, *path[:-1])), f"{repr(name) if model is cls else 'the section'} needs {key}")
    info = model.model_fields.get(key)
    if info is None:
        return Problem(here, f"expected a section with the keys {', '.join(model.model_fields)}")
    shown = NO_VALUE if _is_unshown(field_type(cls.model_fields[path[0]])) else value
    return Problem(here, refusal(info, value, [error]), shown)


def _where(cls: type[RewardType], args: Mapping[str, Any], error: ErrorDetails) -> tuple[list[str], type[BaseModel], Any]:
    """Return an error's YAML path, the model that the path's last key belongs to, and the value."""
    first, *rest = map(str, error["loc"])
    path, value = [first], args.get(first)
    section = _section(cls.model_fields[first].annotation) if first in cls.model_fields else None
    if section is None:
        return path, cls, value
    for part in rest:
        if isinstance(value, Mapping) and part in value:
            path, value = [*path, part], value[part]
    if error["type"] == "missing" and rest[-1] in section.model_fields:
        path, value = [*path, rest[-1]], None
    return path, section if len(path) > 1 else cls, value


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _section(one))), None)


def _is_unshown(annotation: Any) -> bool:
    return isinstance(annotation, Unshown) or _section(annotation) is not None or any(map(_is_unshown, get_args(annotation)))
