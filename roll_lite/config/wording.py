"""Describes a field's type in words, for messages ("expected ...") and docs/configuration.md."""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_PLAIN: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    Path: "path",
    NoneType: "null",
    Any: "any value",
    int: "integer",
    float: "number",
}


def field_type(field: FieldInfo) -> Any:
    """Annotation with its constraints, which pydantic stores apart."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def in_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        base, *metadata = arguments
        bounds = [bound for item in metadata for bound in _bounds(item)]
        is_empty_refused = any(isinstance(item, annotated_types.MinLen) for one in metadata for item in _inner(one))
        least = "" if not is_empty_refused else ", not empty" if base is str else ", at least one"
        return " ".join([in_words(base), " and ".join(bounds)]).strip() + least
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments) if len(arguments) > 1 else str(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(in_words(argument) for argument in sorted(arguments, key=lambda one: one is NoneType))
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


def _inner(metadata: Any) -> list[Any]:
    """Constraints; Field(...) inside a union keeps them in a nested FieldInfo."""
    return metadata.metadata if isinstance(metadata, FieldInfo) else [metadata]


def _bounds(metadata: Any) -> list[str]:
    if isinstance(metadata, FieldInfo):
        return [bound for item in metadata.metadata for bound in _bounds(item)]
    match metadata:
        case annotated_types.Gt(gt=bound):
            return [f"> {bound}"]
        case annotated_types.Ge(ge=bound):
            return [f">= {bound}"]
        case annotated_types.Lt(lt=bound):
            return [f"< {bound}"]
        case annotated_types.Le(le=bound):
            return [f"<= {bound}"]
    return []
