"""Plain data of Python as JSON, and nothing else: what crosses between a program and those who judge it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def encode(value: Any, refer: Callable[[Any], Any] | None = None) -> Any:
    """TypeError for what is no plain data, unless `refer` has something to put in its place."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if -(2**63) < value < 2**63 else {"i": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"f": repr(float(value))}
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"b": value.hex()}
    if isinstance(value, list):
        return [encode(one, refer) for one in value]
    if isinstance(value, tuple):
        return {"t": [encode(one, refer) for one in value]}
    if isinstance(value, set | frozenset):
        return {"s": [encode(one, refer) for one in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, refer), encode(one, refer)] for key, one in value.items()]}
    for module, name, plain in (("numpy", "ndarray", "tolist"), ("numpy", "generic", "item"), ("collections", "deque", "copy")):
        if any(kind.__module__ == module and kind.__name__ == name for kind in type(value).__mro__):
            return encode(list(value) if plain == "copy" else getattr(value, plain)(), refer)
    if refer is not None:
        return refer(value)
    raise TypeError(f"a value of type {type(value).__name__} is no plain data")


def decode(data: Any, find: Callable[[int], Any] | None = None) -> Any:
    """The value; ValueError for what no `encode` writes. Only built-in types come out, whoever wrote the data."""
    if isinstance(data, list):
        return [decode(one, find) for one in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("no encoded value")
    (kind, inner), *_ = data.items()
    try:
        return _decoded(kind, inner, find)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no encoded value: {error}") from error


def _decoded(kind: str, inner: Any, find: Callable[[int], Any] | None) -> Any:
    if kind == "r" and find is not None:
        return find(inner)
    read: dict[str, Callable[[Any], Any]] = {
        "i": lambda text: int(text, 16),
        "f": float,
        "c": lambda parts: complex(float(parts[0]), float(parts[1])),
        "b": bytes.fromhex,
        "t": lambda ones: tuple(decode(one, find) for one in ones),
        "s": lambda ones: {decode(one, find) for one in ones},
        "d": lambda pairs: {decode(key, find): decode(one, find) for key, one in pairs},
    }
    return read[kind](inner)
