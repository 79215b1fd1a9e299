"""For tests that run apart from the program: its functions and objects, called over a socket.

What comes back is plain data, or a stand-in for an object that stays with the program. The program never learns what a test expects, and
decides no comparison. What the tests need and cannot be done that way is no verdict about the program: it ends them as `Cannot`. What the
program alone brings about, by what it returns or sends, is its fault: it ends them as `ProgramFault`.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from roll_lite.sandbox.links import MUTABLE, Links, inner
from roll_lite.sandbox.questions import Questions
from roll_lite.sandbox.values import decode, encode

SOLUTION = "Solution"
"""A class that only holds the functions to be tested."""
LONGEST = 8 << 20
LONGEST_NAME = 200
MOST_ITEMS = 100_000
CONTROL = (StopIteration, StopAsyncIteration)
"""Exceptions that would end a loop of the tests, and with it what they check."""
OBSERVING = ("size", "bool", "str", "repr", "how to compare", "plain for", "isinstance", "is plain", "callable", "type name")
"""Uses that change nothing."""
RUNNERS = ("unittest", "doctest", "pytest", "_pytest", "nose")
"""Modules whose exceptions tell a test runner to skip or to stop."""


class Cannot(BaseException):
    """The tests need something that two processes apart cannot do."""


class ProgramFault(BaseException):
    """The program ended, or returned or sent what no tests can use; it fails them whatever they catch."""


class Wire:
    def __init__(self, file: int, names: Sequence[str], source: str) -> None:
        """`names`: those of the program that the tests use; `source`: the tests."""
        others = [name for name in names if name != SOLUTION]
        self._questions = asked = Questions(source)
        self._class_names = {name for name in others if name.lstrip("_")[:1].isupper() and not asked.only_catches(name)}
        self._uses_helpers = len(others) > 1
        self._classes: set[int] = set()
        self._made: set[int] = set()
        """Objects that the tests had from one of these classes, and that the program has not returned otherwise."""
        self._plain: dict[int, Any] = {}
        """What an object derives from, which for one object is always the same."""
        self._seen: dict[str, Any] = {}
        """What was said of objects since they may have changed."""
        self._gave_objects = False
        self._longest_answer = 0
        self._incoming = open(file, "rb", closefd=False)  # noqa: SIM115
        self._file = file
        self._known: dict[int, StandIn] = {}
        self._exceptions: dict[str, type[Exception]] = {}
        self._links = Links("t", self._refer, self.find)
        self._inside: dict[int, Any] | None = None
        """What can be changed inside of values of the program: copies, of which nobody knows whose they are. Kept where tests ask."""
        self.used = False
        self.over: Cannot | ProgramFault | None = None
        """The first of them: it holds even where the tests catch everything."""

    def wait(self) -> None:
        """Until the program has been read."""
        if not self._incoming.readline(LONGEST):
            self.end(ProgramFault("the program ended before its tests"))

    def end(self, why: Cannot | ProgramFault) -> NoReturn:
        self.over = self.over or why
        raise self.over

    def end_as(self, of_tests: object, why: str) -> NoReturn:
        """As what the tests need and cannot have, or else as the program's fault: it returned what they did not ask for."""
        self.end(Cannot(why) if of_tests else ProgramFault(f"what the program returned is of no use: {why}"))

    def end_at_object(self, why: str, *operands: Any) -> NoReturn:
        """Tests need what they make of a class of the program, and may need to compare what its functions return."""
        objects = [one for one in operands if isinstance(one, StandIn)]
        may_compare = len(objects) > 1 and (self._class_names or (self._uses_helpers and self._gave_objects))
        self.end_as(may_compare or any(one._number in self._made for one in objects), why)

    def is_made(self, one: StandIn) -> bool:
        """By the tests, of a class of the program."""
        return one._number in self._made

    def type_name(self, value: Any) -> str:
        return str(self.use("type name", value)) if isinstance(value, StandIn) else type(value).__name__

    def end_at_type(self, why: str) -> NoReturn:
        self.end_as(self._class_names, why)

    def end_of_iterator(self) -> NoReturn:
        self.end_as(self._questions.looks_for_end, "next() at the end of an iterator of the program")

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """What the program has of them."""
        self.ask({"do": "know", "attributes": sorted(self._questions.attributes), "classes": bool(self._class_names)})
        caught = {name for name in wanted if self._questions.may_catch(name)}
        found = {name: self.ask({"do": "name", "name": name, "caught": name in caught}) for name in wanted}
        answers = {name: answer["exception"] for name, answer in found.items() if name in caught and "exception" in answer}
        exceptions = {name: [str(one) for one in kinds] for name, kinds in answers.items()}
        for kinds in sorted(exceptions.values(), key=len):  # the base before what derives from it
            self._exceptions[kinds[0]] = type(kinds[0].rpartition(".")[2], (self._kind(kinds[1:]),), {"__str__": _said})
        values = {name: self._take(answer["value"]) for name, answer in found.items() if "value" in answer}
        self.used = any(not isinstance(value, StandIn) for value in values.values())
        self._classes = {value._number for name, value in values.items() if name in self._class_names and isinstance(value, StandIn)}
        return values | {name: self._exceptions[kinds[0]] for name, kinds in exceptions.items()}

    def use(self, what: str, target: StandIn, /, *args: Any, **kwargs: Any) -> Any:
        self.used = True
        given = [self._links.send(one) for one in args], {name: self._links.send(one) for name, one in kwargs.items()}
        answer = self.ask({"do": what, "object": target._number, "args": given[0], "kwargs": given[1]})
        if "awaitable" in answer:
            why = f"a value of type {answer['awaitable']}, which has to be awaited"
            self.end_as(self._questions.awaits, why[:LONGEST_NAME])
        try:
            self._links.follow(dict(answer.get("now", {})))
            self._see(json.dumps([what, target._number, *given]), answer, what)
            value, error = self._read(answer)
        except (ValueError, TypeError, LookupError, RecursionError):
            self.end(ProgramFault("the program sent what is no answer"))
        if error is not None:
            raise error
        if what == "call" and target._number in self._classes and isinstance(value, StandIn):
            self._made.add(value._number)
        return value

    def _see(self, asked: str, answer: dict[str, Any], what: str) -> None:
        """An object that nobody changes says the same as before."""
        if what in OBSERVING and self._seen.setdefault(asked, answer.get("value")) != answer.get("value"):
            raise ValueError("a different answer")
        if what not in (*OBSERVING, "list"):
            self._seen.clear()

    def held(self, one: StandIn, plain: list[Any]) -> list[Any]:
        """What it derives from: the same whatever is done with it. Empty for an object that is only itself."""
        try:
            said = [type(part).__name__ if type(part) in MUTABLE else encode(part) for part in plain]
        except TypeError:
            said = None
        if said is None or self._plain.setdefault(one._number, said) != said:
            self.end(ProgramFault("an object of the program is one value here and another there"))
        return plain

    def _read(self, answer: dict[str, Any]) -> tuple[Any, Exception | None]:
        """The value, and what was raised instead."""
        if "error" not in answer:
            return self._take(answer["value"]), None
        kind = self._kind([str(one) for one in answer["error"]])
        if "text" in answer and kind not in self._exceptions.values():
            kind = type(kind.__name__, (kind,), {"__str__": _said})
        error = kind.__new__(kind, *decode(answer["with"]))
        told = {str(name): decode(value) for name, value in dict(answer.get("attributes", {})).items()}
        error.__dict__.update(told, of_program=True)
        if "text" in answer:
            error.__dict__["text of program"] = str(answer["text"])
        return None, error

    def _take(self, data: Any) -> Any:
        value = self._links.take(data)
        if self._inside is not None:
            self._inside |= {id(one): one for one in inner(value)}
        return value

    def watch_identity(self) -> None:
        """From the start, where the tests ask whether one object is another."""
        self._inside = {}

    def same(self, one: Any, other: Any) -> bool:
        """What crosses by itself keeps its identity."""
        inside = self._inside or {}
        if one is not other and type(one) is type(other) and (id(one) in inside or id(other) in inside):
            self.end(Cannot("whether something inside of a value is the same object as another"))
        return one is other

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """An answer; on the way the program may print, and ask for input."""
        answer = self._exchange({**asked, "now": self._links.changes(), "gone": self._links.let_go()})
        while "input" in answer:
            try:
                text = str(builtins.input(str(answer["input"])))
            except Exception:  # none is left
                text = None
            answer = self._exchange({"text": text})
        sys.stdout.write(str(answer.get("printed", "")))
        return answer

    def _exchange(self, said: dict[str, Any]) -> dict[str, Any]:
        message = json.dumps(said).encode() + b"\n"
        try:
            while message:
                message = message[os.write(self._file, message) :]
        except ConnectionError:
            self.end(ProgramFault("the program ended during its tests"))
        line = self._incoming.readline(LONGEST)
        self._longest_answer = max(self._longest_answer, len(line))
        if len(line) == LONGEST:
            self.end(ProgramFault(f"the program returned a value of more than {LONGEST >> 20} MB"))
        try:
            answer = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self.end(ProgramFault("the program ended during its tests"))
        return answer

    def find(self, number: Any) -> StandIn:
        """The same one for the same object."""
        self._made.discard(int(number))
        return self._known.setdefault(int(number), StandIn(self, int(number)))

    def _refer(self, value: Any) -> Any:
        if isinstance(value, StandIn):
            self._gave_objects = True
            return {"r": value._number}
        name = str(getattr(value, "__name__", ""))
        if name and getattr(builtins, name, self) is value:
            return {"r": name}
        if isinstance(value, Iterator):
            items = list(itertools.islice(value, MOST_ITEMS + 1))
            if len(items) > MOST_ITEMS:  # the program's, where it may have sent as many
                self.end_as(self._longest_answer <= MOST_ITEMS, "an endless argument")
            return {"r": {"items": encode(items, self._refer)}}
        self.end(Cannot(f"an argument of type {type(value).__name__}, which is no plain data"))

    def _kind(self, names: list[str]) -> type[Exception]:
        """The first that exists here too: an exception of the program that the tests name, or one of Python's."""
        for name in names:
            module, _, plain = name.rpartition(".")
            kind = self._exceptions.get(name) or getattr(sys.modules.get(module), plain, None)
            is_control = isinstance(kind, type) and (issubclass(kind, CONTROL) or kind.__module__.partition(".")[0] in RUNNERS)
            if isinstance(kind, type) and issubclass(kind, Exception) and not is_control:
                return kind
        return RuntimeError


class StandIn:
    """An object of the program. Everything is asked there, except whether it equals something."""

    __slots__ = ("_number", "_wire")
    _wire: Wire
    _number: int

    def __init__(self, wire: Wire, number: int) -> None:
        object.__setattr__(self, "_wire", wire)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._wire.use("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__dict__", "__annotations__"):
            raise AttributeError(name)
        return self._wire.use("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._wire.use("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._wire.use("delete", self, name)

    def __contains__(self, item: Any) -> bool:
        """Asked of the program where the tests made the object; what it returns otherwise is looked through."""
        if self._wire.is_made(self):
            return bool(self._wire.use("contains", self, item))
        return any(one is item or one == item for one in self)

    def __getitem__(self, key: Any) -> Any:
        return self._wire.use("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wire.use("set item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._wire.use("delete item", self, key)

    def __iter__(self) -> Any:
        """As many as it says that it has: a loop over fewer would check less."""
        items, size = self._wire.use("list", self), self._wire.use("size", self)
        if size and size != (len(items),):
            self._wire.end(ProgramFault(f"an object of the program has the length {size[0]} and {len(items)} items"))
        return iter(items)

    def __next__(self) -> Any:
        """Its end could end a loop of the tests: those who need it have to write a loop."""
        found = self._wire.use("next", self)
        return found[0] if found else self._wire.end_of_iterator()

    def __len__(self) -> int:
        size = self._wire.use("size", self)
        if not size:
            raise TypeError("an object of the program has no len()")
        return int(size[0])

    def __bool__(self) -> bool:
        return bool(self._wire.use("bool", self))

    def __str__(self) -> str:
        return str(self._wire.use("str", self))

    def __repr__(self) -> str:
        return str(self._wire.use("repr", self))

    def __enter__(self) -> Any:
        return self._wire.use("call", self._wire.use("get", self, "__enter__"))

    def __exit__(self, *_: object) -> None:
        self._wire.use("call", self._wire.use("get", self, "__exit__"), None, None, None)

    def __eq__(self, other: object) -> bool:
        """An object that is the same only as itself is that; one that is a list, number or the like is compared as such. No program is
        asked whether its object equals another."""
        if self is other:
            return True
        if other is StandIn:
            self._wire.end_at_type("comparing the type of an object of the program")
        how, *plain = self._wire.use("how to compare", self)
        if how == "own":
            self._wire.end_at_object("comparing an object of a class of the program, which has an __eq__ of its own", self, other)
        return any(one == other for one in self._wire.held(self, plain))

    def _may_be(self, kind: type) -> bool:
        how, *plain = self._wire.use("how to compare", self)
        return how == "own" or any(isinstance(one, kind) for one in self._wire.held(self, plain))

    def __hash__(self) -> int:
        plain = self._plain_for("__hash__")
        return hash(plain[0]) if plain else object.__hash__(self)

    def _plain_for(self, method: str) -> list[Any]:
        """The number, text or tuple that it derives from, where it has the method from there; else empty."""
        plain = list(self._wire.use("plain for", self, method))
        return self._wire.held(self, plain) if plain else plain


def _said(error: Exception) -> str:
    """Its own text, where the program has given it one."""
    ways: list[Any] = [kind.__str__ for kind in type(error).__mro__]
    of_python = next(way for way in ways if way is not _said)
    return str(error.__dict__.get("text of program", of_python(error)))


def _as_plain(method: str) -> Any:
    """Of an IntEnum, a namedtuple and the like; refused where its class says itself what the method does."""

    def called(self: StandIn, *others: Any) -> Any:
        values = [one._plain_for(method) if isinstance(one, StandIn) else [one] for one in (self, *others)]
        if not all(values):
            self._wire.end_at_object(f"{method} of an object of a class of the program", self, *others)
        return getattr(values[0][0], method)(*(one for [one] in values[1:]))

    return called


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rmatmul", "rand", "ror", "rxor"),
    *("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil"),
    *("await", "aiter", "anext", "array", "reversed", "reduce_ex"),
):
    setattr(StandIn, f"__{_name}__", _as_plain(f"__{_name}__"))
setattr(StandIn, "__doc__", property(lambda self: self._wire.use("get", self, "__doc__")))  # noqa: B010


def builtins_for(wire: Wire, under_test: list[str]) -> dict[str, Any]:
    """Python's own names as the tests see them: none that the program was to define, and such as know stand-ins."""

    def is_instance(value: Any, kinds: Any) -> bool:
        if isinstance(kinds, tuple):
            return any(is_instance(value, one) for one in kinds)
        if isinstance(value, StandIn) and isinstance(kinds, StandIn):
            return bool(wire.use("isinstance", value, kinds))
        if isinstance(kinds, StandIn):
            return False
        if isinstance(value, StandIn) and kinds not in (bool, int, float, complex, str, bytes, *_CONTAINERS):
            why = f"isinstance of an object of the program and {getattr(kinds, '__name__', kinds)}"
            wire.end(Cannot(why)) if getattr(kinds, "__module__", "") in _PROTOCOLS else wire.end_at_object(why, value)
        if isinstance(value, StandIn):
            is_one = bool(wire.use("is plain", value, kinds.__name__))
            if is_one and kinds not in _CONTAINERS and not value._may_be(kinds):
                wire.end(ProgramFault(f"an object of the program is a {kinds.__name__} and derives from none"))
            return is_one
        return isinstance(value, kinds)

    def is_callable(value: Any) -> bool:
        return bool(wire.use("callable", value)) if isinstance(value, StandIn) else callable(value)

    def next_of(iterator: Any, *default: Any) -> Any:
        """With a default its end ends no loop."""
        if not isinstance(iterator, StandIn) or len(default) != 1:
            return next(iterator, *default)
        found = wire.use("next", iterator)
        return found[0] if found else default[0]

    names = {"isinstance": is_instance, "callable": is_callable, "next": next_of}
    return {name: value for name, value in {**vars(builtins), **names}.items() if name not in under_test}


_PROTOCOLS = ("collections.abc", "typing", "types")
"""Modules with kinds of objects that are no plain data, such as iterators: tests that ask for one need it."""
_CONTAINERS = (list, tuple, set, frozenset, dict)
