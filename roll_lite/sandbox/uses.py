"""What tests may do with an object of a program, in the program's own process."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Callable
from typing import Any

from roll_lite.sandbox.values import FROM_PROGRAM, decode, encode

AT_A_TIME_S = 0.01
"""For what is awaited, until the tests have their turn again."""


def _size(value: Any) -> tuple[int, ...]:
    """Empty for what has none."""
    return (len(value),) if hasattr(type(value), "__len__") else ()


_EMPTY: dict[Any, Any] = {}
LIKE_SETS = (type(_EMPTY.keys()), type(_EMPTY.items()))


def _how_to_compare(value: Any) -> tuple[Any, ...]:
    owner = next(kind for kind in type(value).__mro__ if "__eq__" in vars(kind))
    if owner is object:
        return ("itself",)
    if owner.__module__ == FROM_PROGRAM:
        return ("own",)
    try:
        return ("plain", set(value) if isinstance(value, LIKE_SETS) else decode(encode(value)))
    except TypeError:
        return ("own",)


def _plain_for(value: Any, method: str) -> tuple[Any, ...]:
    owner = next((kind for kind in type(value).__mro__ if method in vars(kind)), object)
    if owner is object or owner.__module__ != "builtins":
        return ()
    try:
        return (decode(encode(value)),)
    except TypeError:
        return ()


def _state(value: Any) -> str:
    """What it holds, as a text: the same for objects of one class that hold the same."""
    seen: dict[int, int] = {}
    kept: list[Any] = []

    def of(one: Any) -> Any:
        try:
            return encode(one)
        except (TypeError, RecursionError):
            pass
        if id(one) in seen:
            return {"again": seen[id(one)]}
        seen[id(one)] = len(seen)
        kept.append(one)
        if isinstance(one, list | tuple):
            return [type(one).__qualname__, list(map(of, one))]
        if isinstance(one, set | frozenset):
            return [type(one).__qualname__, sorted(json.dumps(of(part)) for part in one)]
        if isinstance(one, dict):
            return [type(one).__qualname__, [[of(key), of(part)] for key, part in one.items()]]
        if isinstance(one, type) or callable(one):
            return {"itself": id(one)}
        slots = [name for kind in type(one).__mro__ for name in _slots(kind) if hasattr(one, name)]
        held = {name: getattr(one, name) for name in slots} | getattr(one, "__dict__", {})
        return {"class": id(type(one)), "holds": {name: of(held[name]) for name in sorted(held)}}

    return json.dumps(of(value))


def _slots(kind: type) -> list[str]:
    named = vars(kind).get("__slots__", ())
    names = [named] if isinstance(named, str) else list(named)
    return [f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "divmod": divmod,
    "pow": pow,
    "abs": abs,
    "int": int,
    "float": float,
    "complex": complex,
    "round": round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "reversed": reversed,
    "and": operator.and_,
    "or": operator.or_,
}
"""Operators that the module of that name calls otherwise."""


def _operate(target: Any, name: str, /, *others: Any, mirrored: bool = False) -> Any:
    function = FUNCTIONS.get(name) or getattr(operator, name)
    return function(*others, target) if mirrored else function(target, *others)


class _Later:
    """Runs what the tests await, in slices."""

    def __init__(self) -> None:
        self._loop: Any = None
        self._tasks: dict[int, tuple[Any, Any]] = {}

    def start(self, waited: Any) -> None:
        import asyncio

        self._loop = self._loop or asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._tasks.setdefault(id(waited), (waited, asyncio.ensure_future(waited, loop=self._loop)))

    def step(self, waited: Any) -> list[Any]:
        """Its value, once it has one."""
        import asyncio

        task = self._tasks[id(waited)][1]
        if not task.done():
            self._loop.run_until_complete(asyncio.wait([task], timeout=AT_A_TIME_S))
        return [task.result()] if task.done() else []

    def cancel(self, waited: Any) -> None:
        self._tasks[id(waited)][1].cancel()


_LATER = _Later()


async def _item_later(iterator: Any) -> list[Any]:
    """Empty at the end."""
    try:
        return [await anext(iterator)]
    except StopAsyncIteration:
        return []


USES: dict[str, Callable[..., Any]] = {
    "call": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "has": hasattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "delete item": operator.delitem,
    "contains": operator.contains,
    "operator": _operate,
    "iter": iter,
    "items": lambda iterator, most: list(itertools.islice(iterator, most)),
    "list": list,
    "size": _size,
    "bool": bool,
    "str": str,
    "repr": repr,
    "callable": callable,
    "type": type,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "how to compare": _how_to_compare,
    "plain for": _plain_for,
    "state": _state,
    "enter": lambda target: type(target).__enter__(target),
    "leave": lambda target, *error: bool(type(target).__exit__(target, *error)),
    "enter later": lambda target: type(target).__aenter__(target),
    "leave later": lambda target, *error: type(target).__aexit__(target, *error),
    "iter later": lambda target: type(target).__aiter__(target),
    "item later": _item_later,
    "start": _LATER.start,
    "step": _LATER.step,
    "cancel": _LATER.cancel,
}
