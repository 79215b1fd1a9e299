"""What is Python's own, by its name: both sides of assert-style tests have it."""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from typing import Any

PLAIN: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    set,
    frozenset,
    dict,
    range,
    object,
    type,
    type(None),
)
CONTROL = (StopIteration, StopAsyncIteration)
"""Exceptions that would end a loop of the tests, and with it what they check."""
KINDS: dict[str, type] = {
    **{f"builtins.{kind.__name__}": kind for kind in PLAIN},
    **{
        f"builtins.{name}": kind
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, CONTROL)
    },
}
"""Types that a program may return as themselves: none does anything when it is called but make a value."""


def name_of(value: Any) -> str | None:
    """None for what the other side would not find under a name."""
    module = getattr(value, "__module__", None) or "builtins"
    plain = getattr(value, "__qualname__", None) or getattr(value, "_name", None)
    if not isinstance(module, str) or not isinstance(plain, str):
        return None
    ways = [f"{module}.{plain}"] if module.partition(".")[0] in sys.stdlib_module_names else []
    ways += [f"types.{name}" for name in types.__all__ if getattr(types, name) is value] if isinstance(value, type) else []
    return next((way for way in ways if _finds(way, value)), None)


def _finds(name: str, value: Any) -> bool:
    try:
        return by_name(name) is value
    except (ImportError, AttributeError):
        return False


def by_name(name: str) -> Any:
    """ImportError or AttributeError where there is none."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)
