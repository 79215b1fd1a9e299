"""Encode plain Python data as JSON. A program and its judges exchange nothing else."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import importlib
import itertools
import math
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

STANDARD: dict[type, Callable[[Any], list[Any]]] = {
    range: lambda value: [value.start, value.stop, value.step],
    bytearray: lambda value: [bytes(value)],
    frozenset: lambda value: [list(value)],
    collections.deque: lambda value: [list(value), value.maxlen],
    collections.Counter: lambda value: [dict(value)],
    collections.OrderedDict: lambda value: [list(value.items())],
    decimal.Decimal: lambda value: [str(value)],
    fractions.Fraction: lambda value: [value.numerator, value.denominator],
    datetime.date: lambda value: [value.year, value.month, value.day],
    datetime.time: lambda value: [value.hour, value.minute, value.second, value.microsecond, value.tzinfo],
    datetime.datetime: lambda value: [*value.timetuple()[:6], value.microsecond, value.tzinfo],
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    datetime.timezone: lambda value: [value.utcoffset(None)],
}
"""{standard-library type that counts as plain data: function from a value to constructor arguments}."""
NAMED = {kind.__name__: kind for kind in STANDARD}
FIRST_ARGUMENT_TYPE = {"bytearray": bytes, "frozenset": list, "deque": list, "Counter": dict, "OrderedDict": list}
"""{type name: required type of the first argument}: a number could make a huge object."""
ARGUMENT_TYPE: dict[str, Any] = {"range": int, "Fraction": int, "date": int, "Decimal": str, "timedelta": int}
"""{type name: required type of all arguments}: others are refused, because decoding could compute Fraction("1e99999999")."""
LONGEST_NUMBER = 10_000
SAME_HASH = 100
"""Maximum items with the same hash in a decoded set or dict, against hash flooding."""
PLAIN_READERS: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: value,
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: set(frozenset.__iter__(value)),
    collections.OrderedDict: lambda value: dict(collections.OrderedDict.items(value)),
    dict: lambda value: dict(dict.items(value)),
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: lambda value: bytes(bytes.__iter__(value)),
    complex: lambda value: complex(complex.__pos__(value)),
}
"""{type: function that copies a subclass's value as plain data without calling its overrides}."""
MOST_ITEMS = 100_000
VIEWS: dict[str, Callable[[Any], Any]] = {
    "Iterator": iter,
    "KeysView": lambda items: dict.fromkeys(_spread(items)).keys(),
    "ItemsView": lambda items: dict(zip(_spread([key for key, _ in items]), [one for _, one in items], strict=True)).items(),
    "ValuesView": lambda items: dict(enumerate(items)).values(),
}
FROM_PROGRAM = "solution"


def encode(value: Any, refer: Callable[[Any], Any] | None = None) -> Any:
    """Encode plain data. `refer` encodes other values; without it, they raise TypeError."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        value = plain_copy(value)
        if isinstance(value, int):
            return value if isinstance(value, bool) or -(2**63) < value < 2**63 else {"i": hex(value)}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"f": repr(value)}
        if isinstance(value, complex):
            return {"c": [repr(value.real), repr(value.imag)]}
        return {"b": value.hex()} if isinstance(value, bytes) else value
    if type(value) in STANDARD:
        return {"o": [type(value).__name__, [encode(one, refer) for one in STANDARD[type(value)](value)]]}
    plain = plain_copy(value)
    if isinstance(plain, list):
        return [encode(one, refer) for one in plain]
    if isinstance(plain, tuple):
        return {"t": [encode(one, refer) for one in plain]}
    if isinstance(plain, set):
        return {"s": [encode(one, refer) for one in plain]}
    if isinstance(plain, dict):
        return {"d": [[encode(key, refer), encode(one, refer)] for key, one in plain.items()]}
    kinds = [(kind.__module__, kind.__name__) for kind in type(value).__mro__]
    if ("numpy", "generic") in kinds:
        return encode(value.item(), refer)
    if ("numpy", "ndarray") in kinds:
        return {"a": [value.dtype.str, encode(value.tolist(), refer)]}
    if isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
        items = list(itertools.islice(value, MOST_ITEMS + 1))
        if len(items) <= MOST_ITEMS:
            kind = next((kind for kind in (KeysView, ValuesView, ItemsView) if isinstance(value, kind)), Iterator)
            return {"v": [kind.__name__, [encode(one, refer) for one in items]]}
    if refer is not None:
        return refer(value)
    raise TypeError(f"a value of type {type(value).__name__} is no plain data")


def plain_copy(value: Any) -> Any:
    for base, read in PLAIN_READERS.items():
        if isinstance(value, base):
            return value if type(value) is base else read(value)
    return value


def decode(data: Any, find: Callable[[Any], Any] | None = None) -> Any:
    """Decode data made by `encode`; ValueError for other data. `find` resolves references made by `refer`; without it, iterators, dict
    views and numpy arrays become lists."""
    if isinstance(data, list):
        return [decode(one, find) for one in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("no encoded value")
    (kind, inner), *_ = data.items()
    try:
        return _decoded(kind, inner, find)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ImportError) as error:
        raise ValueError(f"no encoded value: {error}") from error


def _decoded(kind: str, inner: Any, find: Callable[[Any], Any] | None) -> Any:
    match kind:
        case "i":
            return int(inner, 16)
        case "f":
            return float(inner)
        case "c":
            return complex(float(inner[0]), float(inner[1]))
        case "b":
            return bytes.fromhex(inner)
        case "t":
            return tuple(decode(one, find) for one in inner)
        case "s":
            return set(_spread([decode(one, find) for one in inner]))
        case "d":
            keys = _spread([decode(key, find) for key, _ in inner])
            return dict(zip(keys, (decode(one, find) for _, one in inner), strict=True))
        case "r" if find is not None:
            return find(inner)
        case "a":
            items = decode(inner[1], find)
            return items if find is None else importlib.import_module("numpy").array(items, dtype=inner[0])
        case "v":
            items = decode(inner[1], find)
            return items if find is None else VIEWS[inner[0]](items)
        case "o":
            return _object(inner[0], decode(inner[1], find))
    raise LookupError(kind)


def _object(name: str, args: Any) -> Any:
    if type(args[0]) is not FIRST_ARGUMENT_TYPE.get(name, type(args[0])):
        raise TypeError(f"{name} of {type(args[0]).__name__}")
    part = ARGUMENT_TYPE.get(name)
    if part and not all(type(one) is part and (len(one) if part is str else one.bit_length() // 3) <= LONGEST_NUMBER for one in args):
        raise TypeError(f"{name} of other than {part.__name__}, or of too long ones")
    if name == "OrderedDict":
        _spread([key for key, _ in args[0]])
    return NAMED[name](*([_spread(args[0])] if name == "frozenset" else args))


def _spread(items: list[Any]) -> list[Any]:
    hashes = sorted(map(hash, items))
    if any(one == other for one, other in zip(hashes, hashes[SAME_HASH:], strict=False)) and len(set(map(id, items))) > SAME_HASH:
        raise ValueError(f"more than {SAME_HASH} items of one hash")
    return items
