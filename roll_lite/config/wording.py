from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from roll_lite.config.problems import or_nearest

_PLAIN: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    Path: "path",
    NoneType: "null",
    Any: "any value",
    int: "integer",
    float: "number",
}

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def field_type(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def refusal(field: FieldInfo, value: Any, errors: Sequence[ErrorDetails]) -> str:
    if own := [error for error in errors if error["type"] == "value_error"]:
        return str(own[-1]["ctx"]["error"])
    expected = in_words(field_type(field))
    hint = or_nearest(value, _choices(field.annotation), most=2) if isinstance(value, str) else ""
    if expected in ("text", "path", "text or null", "path or null") and value is not None and not isinstance(value, str | list):
        hint = "; put it in quotes"
    return f"expected {expected}{hint}"


def _choices(annotation: Any) -> list[str]:
    inner = get_args(annotation)
    return [str(one) for one in inner] if get_origin(annotation) is Literal else [one for part in inner for one in _choices(part)]


def in_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        base, *metadata = arguments
        # Field(...) inside a union keeps its constraints in a nested FieldInfo.
        constraints = [item for one in metadata for item in (one.metadata if isinstance(one, FieldInfo) else [one])]
        bounds = [f"{sign} {getattr(item, key)}" for item in constraints for key, sign in _SIGNS.items() if hasattr(item, key)]
        is_empty_refused = any(isinstance(item, annotated_types.MinLen) for item in constraints)
        least = "" if not is_empty_refused else ", not empty" if base is str else ", at least one"
        return " ".join([in_words(base), " and ".join(bounds)]).strip() + least
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments) if len(arguments) > 1 else str(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(in_words, sorted(arguments, key=lambda one: one is NoneType))))
    if origin is list:
        return f"list of ({in_words(arguments[0])})"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of ({in_words(arguments[0])})"
    if origin is tuple:
        return f"list of {len(arguments)} ({in_words(arguments[0])})"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping of name to ({in_words(arguments[1])})"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _PLAIN[annotation]
