"""The program's side of assert-style tests: its functions and objects, used by a process that it cannot touch."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import json
import threading
from typing import Any

from roll_lite.sandbox.library import KINDS, by_name
from roll_lite.sandbox.links import Links
from roll_lite.sandbox.uses import USES
from roll_lite.sandbox.values import FROM_PROGRAM, decode, encode, encode_args, plain_copy


def serve(names: dict[str, Any], peer: int) -> None:
    """Until the tests end."""
    served = _Served(names, peer)
    with contextlib.suppress(ConnectionError), contextlib.redirect_stdout(served.printed):
        served.say({"ready": True})
        builtins.input = served.ask_for_input
        while (asked := served.hear()) is not None:
            served.say(served.answer(asked))


class _Served:
    def __init__(self, names: dict[str, Any], peer: int) -> None:
        self._names = names
        self._incoming, self._outgoing = open(peer, "rb", closefd=False), open(peer, "wb", closefd=False)  # noqa: SIM115
        self.printed = io.StringIO()
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._links = Links("p", self._refer, self._find)
        self._attributes: list[str] = []
        self._classes = False
        self._derived: dict[str, Any] = {}
        self._functions: dict[int, Any] = {}
        """Of the tests, by their number."""
        self._calling = threading.RLock()

    def say(self, answer: dict[str, Any]) -> None:
        """With what was printed until now."""
        if self.printed.tell():
            answer = answer | {"printed": self.printed.getvalue()}
            self.printed.seek(0)
            self.printed.truncate()
        self._outgoing.write(json.dumps(answer).encode() + b"\n")
        self._outgoing.flush()

    def hear(self) -> Any:
        line = self._incoming.readline()
        return json.loads(line) if line else None

    def ask_for_input(self, prompt: object = "", /) -> str:
        """`input`, for tests that put something else in its place."""
        self.say({"input": str(prompt)})
        said = self.hear()
        if said["text"] is None:
            raise EOFError("EOF when reading a line")
        return str(said["text"])

    def _function(self, number: int, name: str, doc: str | None) -> Any:
        """One of the tests: they run it, and may ask something of the program meanwhile."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self._calling:
                given = [self._links.send(one) for one in args], {name: self._links.send(one) for name, one in kwargs.items()}
                self.say({"back": number, "args": given[0], "kwargs": given[1], "now": self._links.changes()})
                while "do" in (said := self.hear()):
                    self.say(self.answer(said))
                self._links.follow(said["now"])
                if "error" in said:
                    raise self._find(said["error"])
                return self._links.take(said["value"])

        called.__name__ = called.__qualname__ = name
        called.__doc__ = doc
        return self._functions.setdefault(number, called)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            self._links.follow(asked["now"])
            self._links.forget(asked["gone"])
            if asked["do"] == "know":
                self._attributes, self._classes = asked["attributes"], asked["classes"]
                return {}
            if asked["do"] == "name":
                return self._name(asked["name"], asked["caught"])
            args = [self._links.take(one) for one in asked["args"]]
            kwargs = {name: self._links.take(one) for name, one in asked["kwargs"].items()}
            use = self._derive if asked["do"] == "derive" else USES[asked["do"]]
            value = use(self._find(asked["object"]), *args, **kwargs)
            answer = {"value": self._links.send(value), "now": self._links.changes()}
            if inspect.isawaitable(value) or inspect.isasyncgen(value):
                answer |= {"awaitable": type(value).__name__, "later": inspect.isawaitable(value)}
            return answer
        except Exception as error:  # whatever the program raised, the tests get
            return self._raised(error)

    def _raised(self, error: Exception) -> dict[str, Any]:
        try:
            now = self._links.changes()
        except Exception:  # a list that holds itself
            now = {}
        return {"error": _kinds(type(error)), "with": encode_args(error), "now": now, **_told(error)}

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

    def _find(self, which: int | str | list[Any] | dict[str, Any]) -> Any:
        """An object by its number, one of Python's own or a class of the program by its name, an exception, a function of the tests,
        or an iterator of items."""
        if isinstance(which, dict):
            return iter(decode(which["items"], self._find)) if "items" in which else self._function(*which["function"])
        if isinstance(which, list):
            kind, args = self._find(which[0]), decode(which[1], self._find)
            try:
                return kind(*args)
            except Exception:  # its class takes others
                return kind.__new__(kind, *args)
        if isinstance(which, str):
            module, _, name = which.partition(".")
            return self._names[name] if module == FROM_PROGRAM else by_name(which)
        return self._objects[which]

    def _refer(self, value: Any) -> Any:
        """Objects stay alive as long as the program, so that a number is the same object's for ever."""
        if isinstance(value, type) and KINDS.get(f"builtins.{value.__name__}") is value:
            return {"r": f"builtins.{value.__name__}"}
        if (number := next((number for number, one in self._functions.items() if one is value), None)) is not None:
            return {"r": {"function": number}}
        if isinstance(value, COPIED) and not self._is_wanted(value):
            return encode(plain_copy(value), self._refer)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"r": self._numbers[id(value)]}

    def _derive(self, _: Any, name: str, source: str, *bases: Any) -> Any:
        """A class of the tests, of one of the program's."""
        names = self._names | self._derived | {f"base_{place}": base for place, base in enumerate(bases)}
        exec(compile(source, "tests.py", "exec", dont_inherit=True), names)
        self._derived[name] = names[name]
        return names[name]

    def _is_wanted(self, value: Any) -> bool:
        """The tests name a class, or use what no plain one has; or nothing tells it from a plain one."""
        base = next(kind for kind in COPIED if isinstance(value, kind))
        has_more = any(hasattr(type(value), name) and not hasattr(base, name) for name in self._attributes)
        return (
            self._classes or has_more or all(getattr(type(value), name) is getattr(base, name) for name in READING if hasattr(base, name))
        )


COPIED = (list, tuple, dict, set, frozenset)
READING = ("__iter__", "__len__", "__getitem__", "__contains__", "keys", "values", "items", "get")
"""What a subclass may do differently from the data that it holds."""


def _told(error: Exception) -> dict[str, Any]:
    """Attributes of an exception that are plain data, and its text where its class has a way of its own."""
    told: dict[str, Any] = {"attributes": {}}
    for name, value in vars(error).items():
        with contextlib.suppress(TypeError, RecursionError):
            told["attributes"][name] = encode(value)
    if any("__str__" in vars(kind) and kind.__module__ == FROM_PROGRAM for kind in type(error).__mro__):
        with contextlib.suppress(Exception):
            told["text"] = str(error)
    return told


def _kinds(kind: type) -> list[str]:
    return [f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__]
