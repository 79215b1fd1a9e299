"""The tests' end of the socket to the program: what is asked and answered, and what ends the tests."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from roll_lite.sandbox import stand_ins
from roll_lite.sandbox.library import CONTROL, KINDS, name_of
from roll_lite.sandbox.links import MUTABLE, Links, inner
from roll_lite.sandbox.questions import Questions
from roll_lite.sandbox.stand_ins import Cannot, ProgramFault, StandIn, awaitable
from roll_lite.sandbox.values import decode, encode, encode_args

SOLUTION = "Solution"
"""A class that only holds the functions to be tested."""
LONGEST = 8 << 20
LONGEST_NAME = 200
MOST_ITEMS = 100_000
OBSERVING = ("size", "bool", "str", "repr", "how to compare", "plain for", "isinstance", "issubclass", "callable", "has", "type", "state")
"""Uses that change nothing."""
RUNNERS = ("unittest", "doctest", "pytest", "_pytest", "nose")
"""Modules whose exceptions tell a test runner to skip or to stop."""
NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What reading an answer may raise that no program of ours has sent."""
OURS = (__file__, stand_ins.__file__)
ENDING_OTHERS = ("<lambda>", "<genexpr>")
"""Code whose loop, somewhere else, an end of an iterator would end."""
ONE_BY_ONE, MOST_AT_ONCE = 64, 4096
"""Items of an iterator that are asked for each by itself, for tests may stop there; and how many at a time later."""


class Wire:
    def __init__(self, file: int, names: Sequence[str], source: str) -> None:
        """`names`: those of the program that the tests use; `source`: the tests."""
        others = [name for name in names if name != SOLUTION]
        self._questions = asked = Questions(source)
        self._class_names = {name for name in others if name.lstrip("_")[:1].isupper() and not asked.only_catches(name)}
        self._classes: set[int] = set()
        self._made: set[int] = set()
        """Objects that the tests had from one of these classes, and that the program has not returned otherwise."""
        self._plain: dict[int, Any] = {}
        """What an object derives from, which for one object is always the same."""
        self._hashes: dict[int, int] = {}
        self._seen: dict[str, Any] = {}
        """What was said of objects since they may have changed."""
        self._longest_answer = 0
        self._given_items = 0
        self._waiting: dict[int, tuple[Any, StandIn]] = {}
        """What the tests may await, and what it stands for: they may give it back, too."""
        self._incoming = open(file, "rb", closefd=False)  # noqa: SIM115
        self._file = file
        self._known: dict[int, StandIn] = {}
        self._exceptions: dict[str, type[Exception]] = {}
        self._links = Links("t", self._refer, self.find)
        self._functions: dict[int, Any] = {}
        """Of the tests, which the program was given."""
        self._inside: dict[int, Any] | None = None
        """What can be changed inside of values of the program: copies, of which nobody knows whose they are. Kept where tests ask."""
        self.awaits = asked.awaits
        self.used = False
        self.over: Cannot | ProgramFault | None = None
        """The first of them: it holds even where the tests catch everything."""

    def wait(self) -> None:
        """Until the program has been read."""
        with contextlib.suppress(ConnectionError):
            if self._incoming.readline(LONGEST):
                return
        self.end(ProgramFault("the program ended before its tests"))

    def end(self, why: Cannot | ProgramFault) -> NoReturn:
        self.over = self.over or why
        raise self.over

    def end_as(self, of_tests: object, why: str) -> NoReturn:
        """As what the tests need and cannot have, or else as the program's fault: it returned what they did not ask for."""
        self.end(Cannot(why) if of_tests else ProgramFault(f"what the program returned is of no use: {why}"))

    def end_at_object(self, why: str, *operands: Any) -> NoReturn:
        """Tests need what they make of a class of the program."""
        self.end_as(any(self.is_made(one) for one in operands), why)

    def is_made(self, one: Any) -> bool:
        """By the tests, of a class of the program."""
        return isinstance(one, StandIn) and one._number in self._made

    def is_promised(self, one: StandIn) -> bool:
        """Of a class that the tests name."""
        return self.is_made(one) or any(self.use("isinstance", one, self._known[number]) for number in self._classes)

    def check_end_of_iterator(self) -> None:
        """It is expected where the tests catch it around the very line."""
        frame = sys._getframe()
        while frame.f_back is not None and (frame.f_code.co_filename in OURS or frame.f_globals.get("__name__", "").startswith(RUNNERS)):
            frame = frame.f_back
        in_tests = frame.f_code.co_filename == "tests.py" and frame.f_code.co_name not in ENDING_OTHERS
        if not in_tests or frame.f_lineno not in self._questions.expecting_end:
            self.end_as(False, "next() at the end of an iterator of the program")

    def may_swallow(self, error: BaseException | None) -> bool:
        """A context manager of the program: what it may keep from the tests is the last thing in the block and no check."""
        trace = error.__traceback__ if error is not None else None
        if trace is None or isinstance(error, AssertionError) or not isinstance(error, Exception):
            return False
        return trace.tb_frame.f_code.co_filename == "tests.py" and trace.tb_lineno in self._questions.ends_of_blocks

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """What the program has of them."""
        self.ask({"do": "know", "attributes": sorted(self._questions.attributes), "classes": bool(self._class_names)})
        caught = {name for name in wanted if self._questions.may_catch(name)}
        found = {name: self.ask({"do": "name", "name": name, "caught": name in caught}) for name in wanted}
        answers = {name: answer["exception"] for name, answer in found.items() if name in caught and "exception" in answer}
        exceptions = {name: [str(one) for one in kinds] for name, kinds in answers.items()}
        for kinds in sorted(exceptions.values(), key=len):  # the base before what derives from it
            self._exceptions[kinds[0]] = self._make_kind(kinds)
        values = {name: self._take(answer["value"]) for name, answer in found.items() if "value" in answer}
        self.used = any(not isinstance(value, StandIn) for value in values.values())
        self._classes = {value._number for name, value in values.items() if name in self._class_names and isinstance(value, StandIn)}
        return values | {name: self._exceptions[kinds[0]] for name, kinds in exceptions.items()}

    def _make_kind(self, kinds: list[str]) -> type[Exception]:
        bases = [kind for name in kinds[1:] if (kind := self._known_kind(name)) is not None] or [Exception]
        lowest = tuple(kind for kind in bases if not any(issubclass(one, kind) and one is not kind for one in bases))
        name = kinds[0].rpartition(".")[2]
        try:
            return type(name, tuple(dict.fromkeys(lowest)), {"__str__": _said})
        except TypeError:  # some of Python's own do not go together here
            return type(name, (bases[0],), {"__str__": _said})

    def derive(self, name: str, source: str, needs: str, *bases: Any) -> Any:
        """A class of the tests, made where its base is."""
        if needs:
            self.end(Cannot(f"a class of the tests that derives from one of the program's and uses {needs}"))
        made = self.use("derive", "builtins.type", name, source, *bases)
        if isinstance(made, StandIn):
            self._classes.add(made._number)
        return made

    def note_kind(self, kind: type) -> None:
        """What is asked of an exception of the program's is asked of the program."""
        self.used = self.used or kind in self._exceptions.values()

    def type_of(self, value: Any) -> Any:
        return self.use("type", value) if isinstance(value, StandIn) else type(value)

    def shown(self, error: BaseException | None) -> tuple[Any, ...]:
        """To a context manager of the program: no traceback, and nothing of what ends the tests."""
        return (self._nearest_kind(error)[1], error, None) if isinstance(error, Exception) else (None, None, None)

    def _nearest_kind(self, error: Exception) -> tuple[str, type]:
        """That the program has, too."""
        return next((name, kind) for kind in type(error).__mro__ if (name := self._name_of(kind)) is not None)

    def use(self, what: str, target: StandIn | str, /, *args: Any, **kwargs: Any) -> Any:
        """`target`: an object of the program, or what is Python's own there by its name."""
        self.used = True
        which = target._number if isinstance(target, StandIn) else target
        given = [self._links.send(one) for one in args], {name: self._links.send(one) for name, one in kwargs.items()}
        answer = self.ask({"do": what, "object": which, "args": given[0], "kwargs": given[1]})
        if "awaitable" in answer and not self.awaits:
            self.end_as(False, f"a value of type {answer['awaitable']}, which has to be awaited"[:LONGEST_NAME])
        try:
            self._links.follow(dict(answer.get("now", {})))
            self._see(json.dumps([what, which, *given]), answer, what)
            value, error = self._read(answer)
        except NO_ANSWER:
            self.end(ProgramFault("the program sent what is no answer"))
        if error is not None:
            raise error
        if answer.get("later") and isinstance(value, StandIn):
            waited = awaitable(value)
            self._waiting[id(waited)] = waited, value
            return waited
        if what == "call" and which in self._classes and isinstance(value, StandIn):
            self._made.add(value._number)
        return value

    def _see(self, asked: str, answer: dict[str, Any], what: str) -> None:
        """An object that nobody changes says the same as before."""
        if what in OBSERVING and self._seen.setdefault(asked, answer.get("value")) != answer.get("value"):
            raise ValueError("a different answer")
        if what not in (*OBSERVING, "iter"):
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

    def hash_of(self, one: StandIn) -> int:
        """Of an object with an __eq__ of its own; it stays, as that of a key has to."""
        if one._number not in self._hashes:
            self._hashes[one._number] = hash(str(self.use("state", one)))
        return self._hashes[one._number]

    def items(self, iterator: StandIn) -> Iterator[Any]:
        """As they come: there may be no end."""
        taken = 0
        while found := self.use("items", iterator, 1 if taken < ONE_BY_ONE else min(taken, MOST_AT_ONCE)):
            taken += len(found)
            self._given_items += len(found)
            yield from found

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
        """An answer; on the way the program may print, ask for input, and call functions of the tests."""
        answer = self._exchange({**asked, "now": self._links.changes(), "gone": self._links.let_go()})
        while "input" in answer or "back" in answer:
            sys.stdout.write(str(answer.get("printed", "")))
            answer = self._exchange(self._read_input(answer) if "input" in answer else self._call(answer))
        sys.stdout.write(str(answer.get("printed", "")))
        return answer

    def _read_input(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"text": str(builtins.input(str(asked["input"])))}
        except Exception:  # none is left
            return {"text": None}

    def _call(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A function of the tests, which the program was given. Should it assert, the program could keep that from the tests."""
        try:
            self._links.follow(dict(asked["now"]))
            function = self.find({"function": asked["back"]})
            args, kwargs = [self._take(one) for one in asked["args"]], {str(key): self._take(one) for key, one in asked["kwargs"].items()}
        except NO_ANSWER:
            self.end(ProgramFault("the program sent what is no answer"))
        said: dict[str, Any]
        try:
            said = {"value": self._links.send(function(*args, **kwargs))}
        except AssertionError as error:
            self.end(ProgramFault(f"AssertionError in a function of the tests: {error}"[:LONGEST_NAME]))
        except Exception as error:
            said = {"error": self._refer(error)["r"]}
        return said | {"now": self._links.changes()}

    def _exchange(self, said: dict[str, Any]) -> dict[str, Any]:
        message = json.dumps(said).encode() + b"\n"
        try:
            while message:
                message = message[os.write(self._file, message) :]
            line = self._incoming.readline(LONGEST)
        except ConnectionError:
            self.end(ProgramFault("the program ended during its tests"))
        self._longest_answer = max(self._longest_answer, len(line))
        if len(line) == LONGEST:
            self.end(ProgramFault(f"the program returned a value of more than {LONGEST >> 20} MB"))
        try:
            answer = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError, MemoryError):
            answer = None
        if not isinstance(answer, dict):
            self.end(ProgramFault("the program ended during its tests"))
        return answer

    def find(self, which: Any) -> Any:
        """The same one for the same object."""
        if isinstance(which, str):
            return KINDS[which]
        if isinstance(which, dict):
            return self._functions[int(which["function"])]
        self._made.discard(int(which))
        return self._known.setdefault(int(which), StandIn(self, int(which)))

    def _refer(self, value: Any) -> Any:
        if isinstance(value, StandIn):
            return {"r": value._number}
        if (name := self._name_of(value)) is not None:
            return {"r": name}
        if id(value) in self._waiting:
            return {"r": self._waiting[id(value)][1]._number}
        if isinstance(value, Exception):
            return {"r": [self._nearest_kind(value)[0], encode_args(value)]}
        if callable(value) and not isinstance(value, type) and not inspect.iscoroutinefunction(value):
            number = next((number for number, one in self._functions.items() if one is value), len(self._functions))
            self._functions[number] = value
            return {"r": {"function": [number, str(getattr(value, "__name__", "function")), getattr(value, "__doc__", None)]}}
        if isinstance(value, Iterator):
            items = list(itertools.islice(value, MOST_ITEMS + 1))
            if len(items) > MOST_ITEMS:  # the program's, where it may have sent as many
                self.end_as(max(self._longest_answer, self._given_items) <= MOST_ITEMS, "an endless argument")
            return {"r": {"items": encode(items, self._refer)}}
        self.end(Cannot(f"an argument of type {type(value).__name__}, which is no plain data"))

    def _name_of(self, value: Any) -> str | None:
        """Of what the program has, too: an exception of its own, or what is Python's."""
        return next((name for name, kind in self._exceptions.items() if kind is value), None) or name_of(value)

    def _kind(self, names: list[str]) -> type[Exception]:
        """The first that exists here too: an exception of the program that the tests name, or one of Python's."""
        return next((kind for name in names if (kind := self._known_kind(name)) is not None), RuntimeError)

    def _known_kind(self, name: str) -> type[Exception] | None:
        module, _, plain = name.rpartition(".")
        kind = self._exceptions.get(name) or getattr(sys.modules.get(module), plain, None)
        is_control = isinstance(kind, type) and (issubclass(kind, CONTROL) or kind.__module__.partition(".")[0] in RUNNERS)
        return kind if isinstance(kind, type) and issubclass(kind, Exception) and not is_control else None


def _said(error: Exception) -> str:
    """Its own text, where the program has given it one."""
    ways: list[Any] = [kind.__str__ for kind in type(error).__mro__]
    of_python = next(way for way in ways if way is not _said)
    return str(error.__dict__.get("text of program", of_python(error)))
