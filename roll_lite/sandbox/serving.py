"""The program's side of assert-style tests: its functions and objects, used by a process that it cannot touch."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import json
import operator
from collections.abc import Callable
from typing import Any

from roll_lite.sandbox.links import Links
from roll_lite.sandbox.values import FROM_PROGRAM, decode, encode


def serve(names: dict[str, Any], peer: int) -> None:
    """Until the tests end."""
    incoming, outgoing = open(peer, "rb", closefd=False), open(peer, "wb", closefd=False)  # noqa: SIM115

    def say(answer: dict[str, Any]) -> None:
        outgoing.write(json.dumps(answer).encode() + b"\n")
        outgoing.flush()

    def ask_tests(prompt: object = "", /) -> str:
        """`input`, for tests that put something else in its place."""
        say({"input": str(prompt)})
        said = json.loads(incoming.readline())
        if said["text"] is None:
            raise EOFError("EOF when reading a line")
        return str(said["text"])

    served = _Served(names)
    with contextlib.suppress(ConnectionError):
        say({"ready": True})
        builtins.input = ask_tests
        for line in incoming:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                answer = served.answer(json.loads(line))
            say(answer | {"printed": printed.getvalue()} if printed.tell() else answer)


class _Served:
    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._links = Links("p", self._refer, self._find)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            self._links.follow(asked["now"])
            self._links.forget(asked["gone"])
            if asked["do"] == "name":
                return self._name(asked["name"], asked["caught"])
            args = [self._links.take(one) for one in asked["args"]]
            kwargs = {name: self._links.take(one) for name, one in asked["kwargs"].items()}
            value = USES[asked["do"]](self._find(asked["object"]), *args, **kwargs)
            if inspect.isawaitable(value) or inspect.isasyncgen(value):
                return {"awaitable": type(value).__name__}
            return {"value": self._links.send(value), "now": self._links.changes()}
        except Exception as error:  # whatever the program raised, the tests get
            return self._raised(error)

    def _raised(self, error: Exception) -> dict[str, Any]:
        try:
            given = encode(list(error.args))
        except TypeError:
            given = [str(error)]
        try:
            now = self._links.changes()
        except Exception:  # a list that holds itself
            now = {}
        return {"error": _kinds(type(error)), "with": given, "now": now}

    def _name(self, name: str, caught: bool) -> dict[str, Any]:
        solution = self._names.get("Solution")
        if name in self._names:
            value = self._names[name]
        elif isinstance(solution, type) and hasattr(solution, name):
            value = getattr(solution(), name)
        else:
            return {"missing": True}
        if caught and isinstance(value, type) and issubclass(value, Exception):
            return {"exception": _kinds(value)}
        return {"value": self._links.send(value)}

    def _find(self, which: int | str | dict[str, Any]) -> Any:
        """An object by its number, one of Python's own by its name, or an iterator of items."""
        if isinstance(which, dict):
            return iter(decode(which["items"], self._find))
        return getattr(builtins, which) if isinstance(which, str) else self._objects[which]

    def _refer(self, value: Any) -> dict[str, Any]:
        """Objects stay alive as long as the program, so that a number is the same object's for ever."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"r": self._numbers[id(value)]}


def _kinds(kind: type) -> list[str]:
    return [f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__]


def _next(iterator: Any) -> list[Any]:
    """Empty at the end."""
    try:
        return [next(iterator)]
    except StopIteration:
        return []


_EMPTY: dict[Any, Any] = {}
LIKE_SETS = (type(_EMPTY.keys()), type(_EMPTY.items()))


def _how_to_compare(value: Any) -> list[Any]:
    owner = next(kind for kind in type(value).__mro__ if "__eq__" in vars(kind))
    if owner is object:
        return ["itself"]
    if owner.__module__ == FROM_PROGRAM:
        return ["own"]
    try:
        return ["plain", set(value) if isinstance(value, LIKE_SETS) else decode(encode(value))]
    except TypeError:
        return ["own"]


def _plain_for(value: Any, method: str) -> list[Any]:
    owner = next((kind for kind in type(value).__mro__ if method in vars(kind)), object)
    if owner is object or owner.__module__ != "builtins":
        return []
    try:
        return [decode(encode(value))]
    except TypeError:
        return []


USES: dict[str, Callable[..., Any]] = {
    "call": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "delete item": operator.delitem,
    "list": list,
    "next": _next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "callable": callable,
    "isinstance": isinstance,
    "is plain": lambda target, kind: isinstance(target, getattr(builtins, kind)),
    "how to compare": _how_to_compare,
    "plain for": _plain_for,
}
