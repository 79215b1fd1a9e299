"""Assert-style tests: the tests' process calls the program's functions with plain values and judges the results.

Two processes in two sandboxes share a socket. The tests' process (`Tests`) runs no code of the program; the program's process (`serve`)
sees only the arguments of calls. A test that needs more than such calls runs in the program's process, see `inside.py`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import secrets
import select
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from roll_lite.sandbox.inside import guarded
from roll_lite.sandbox.kernel import limit_cpu
from roll_lite.sandbox.values import FROM_PROGRAM, decode, encode

LONGEST = 8 << 20
"""Maximum size of an answer in bytes."""
CHANGING = (list, dict, set, bytearray)
"""Types of arguments that a function can change in place."""
CONTROL = (StopIteration, StopAsyncIteration)
"""Exceptions that would end a loop of the tests without a check; the tests get a plain Exception instead."""


NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""Exceptions that reading a forged answer may raise."""


class _Aborted(BaseException):
    """Ends a test from within a call. A BaseException, so that the tests' own handlers do not catch it."""


# ---------------------------------------------------------------- the tests' side


class Remote:
    """Proxy for a function, class or object of the program: can be called and passed back, has no operators and equals nothing else."""

    def __init__(self, tests: Tests, at: str | int) -> None:
        self._tests, self._at = tests, at

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._tests.call(self._at, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """A test that reads an attribute of a program's name moves inside. An object that the program returned has no attributes."""
        if isinstance(self._at, str):
            self._tests.go_inside(f"{self._at}.{name}")
        raise AttributeError(f"an object of the program is no plain value: no attribute {name!r}")

    def _is_class(self, *_: Any) -> NoReturn:
        self._tests.go_inside(f"{self._at} used as a class")

    __instancecheck__ = __subclasscheck__ = __mro_entries__ = _is_class


class Tests:
    """The tests' process: runs each test and forwards its calls to the program's process."""

    def __init__(self, peer: int, wall_s: float) -> None:
        self._peer, self._wall_s = peer, wall_s
        self._heard = b""
        self._deadline = 0.0
        self._remotes: dict[str | int, Remote] = {}
        self._ended = self._inside = self._stopped = ""
        """Why the program's process is unusable; why the test must run inside it; the limit that was exceeded."""
        self._used = False

    def run(self, tests: list[dict[str, Any]], fail_fast: bool) -> Iterator[dict[str, Any]]:
        """Yield the verdict of each test, until the program's process ends or, with `fail_fast`, until one fails."""
        names: dict[str, Any] = {}
        for test in tests:
            self._deadline = time.monotonic() + self._wall_s
            try:
                names = names or self._names()
                self._ask({"do": "begin"})
                verdict = self._verdict(test, {name: names[name] for name in test["names"] if name in names})
            except _Aborted:
                verdict = {}
            if self._ended:
                verdict = {"error": self._ended, "stopped": self._stopped}
            yield verdict
            if self._ended or (fail_fast and verdict.get("error")):
                return

    def _names(self) -> dict[str, Any]:
        """Functions, classes and constants of the program."""
        answer = self._ask({"do": "names"})
        try:
            return {name: Remote(self, name) if value == {"r": name} else self._read(value) for name, value in answer["names"].items()}
        except NO_ANSWER:
            self._end("the program sent what is no answer")

    def _verdict(self, test: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
        try:
            import_modules(test)
        except ImportError as error:
            return {"cannot": f"the tests import what is not there: {error}; python_path may name its folder"}
        self._inside, self._used = test["inside"], any(not isinstance(value, Remote) for value in names.values())
        if not self._inside:
            module = types.ModuleType(FROM_PROGRAM)
            sys.modules[FROM_PROGRAM] = module
            names = {name: self._solution() if name == "Solution" else value for name, value in names.items()}
            module.__dict__.update(names)
            wrong = run_test(test, names)
            missing = [name for name in test["names"] if name not in names]
            if not self._inside and not wrong and not self._used and not missing:
                return {"cannot": "the tests end without having used the program"}
            if not self._inside:
                return {"error": wrong or ("" if self._used else f"NameError: name {missing[0]!r} is not defined")}
        token = secrets.token_hex()
        answer = self._ask({"do": "test", "test": test, "token": token})
        if answer.get("token") != token:
            self._end("the program sent what is no answer")
        return {"error": str(answer["error"]), "inside": self._inside}

    def go_inside(self, why: str) -> NoReturn:
        self._inside = self._inside or why
        raise _Aborted(why)

    def call(self, at: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._used = True
        asked = {"do": "call", "at": at, "args": encode(list(args), self._refer), "kwargs": encode(kwargs, self._refer)}
        answer = self._ask(asked)
        raised: Exception | None = None
        try:
            for place, now in dict(answer.get("changed", {})).items():
                _replace(kwargs[place] if place in kwargs else args[int(place)], self._read(now))
            if "error" not in answer:
                return self._read(answer["value"])
            raised = _error(answer)
        except NO_ANSWER:
            self._end("the program sent what is no answer")
        raise raised

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"r": value._at}
        self.go_inside(f"an argument of type {type(value).__name__}")

    def _read(self, data: Any) -> Any:
        return decode(data, lambda at: self._remotes.setdefault(int(at), Remote(self, int(at))))

    def _solution(self) -> type:
        """LeetCode's class Solution: each instance is a fresh object of the program, whose methods can be called."""
        numbers, tests = itertools.count(), self

        class Solution:
            def __init__(self) -> None:
                self._number = next(numbers)

            def __getattr__(self, name: str) -> Remote:
                return Remote(tests, f"Solution#{self._number}.{name}")

        return Solution

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        message = json.dumps(asked).encode() + b"\n"
        try:
            while message:
                message = message[os.write(self._peer, message) :]
            line = self._line()
        except ConnectionError:
            self._end("the program ended during its tests")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError, MemoryError):
            answer = None
        if not isinstance(answer, dict):
            self._end("the program sent what is no answer")
        return answer

    def _line(self) -> bytes:
        poller = select.poll()
        poller.register(self._peer, select.POLLIN)
        found = [self._heard]
        while b"\n" not in found[-1]:
            if not poller.poll(max(0.0, self._deadline - time.monotonic()) * 1000):
                self._stopped = "wall"
                self._end("time limit: did not end")
            found.append(os.read(self._peer, 1 << 20))
            if not found[-1]:
                self._end("the program ended during its tests")
            if sum(map(len, found)) > LONGEST:
                self._end(f"the program returned a value of more than {LONGEST >> 20} MB")
        line, _, self._heard = b"".join(found).partition(b"\n")
        return line

    def _end(self, why: str) -> NoReturn:
        self._ended = self._ended or why
        raise _Aborted(why)


def import_modules(test: dict[str, Any]) -> dict[str, Any]:
    """Import the test's own imports; return the modules that it uses without importing them, by name."""
    for name in test["imports"]:
        importlib.import_module(name)
    return {name: importlib.import_module(path) for name, path in test["modules"].items()}


def _replace(mine: Any, now: Any) -> None:
    mine.clear()
    mine.extend(now) if hasattr(mine, "extend") else mine.update(now)


def _error(answer: dict[str, Any]) -> Exception:
    """Rebuild the program's exception as the first class in its MRO that is known here."""
    kind = next((kind for name in answer["error"] if (kind := _known_kind(str(name))) is not None), RuntimeError)
    text, args = str(answer["text"]), decode(answer["args"])
    error = kind.__new__(kind, *args)
    if str(error) != text:
        kind = type(kind.__name__, (kind,), {"__str__": lambda self: text})
        error = kind.__new__(kind, *args)
    return error


def _known_kind(name: str) -> type[Exception] | None:
    module, _, plain = name.rpartition(".")
    kind = getattr(sys.modules.get(module), plain, None) if module.partition(".")[0] not in ("unittest", "_pytest") else None
    return kind if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, CONTROL) else None


# ---------------------------------------------------------------- a test, on either side


def run_test(test: dict[str, Any], names: dict[str, Any], inside: bool = False) -> str:
    """Run one test in a fresh module; return what failed, empty if it passed."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where unittest.main() looks for the tests
    known = module.__dict__
    known |= {**import_modules(test), **names, "RUN_TEST_CLASSES": lambda: run_test_classes(known)}
    failed: list[str] = []
    try:
        tree = guarded(test["source"], known, failed) if inside else test["source"]
        if "unittest" in test["source"]:
            importlib.import_module("unittest").__dict__["main"] = lambda *args, **kwargs: run_test_classes(known)
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), known)
    except SystemExit as end:
        if inside and not _is_left_by(known, end):
            return "the program ended the test: SystemExit"
        return failed[0] if failed else "" if end.code in (None, 0, False) else f"SystemExit: {end.code}"
    except BaseException as error:
        return _what_failed(error, test["source"])
    return failed[0] if failed else ""


def _is_left_by(tests: dict[str, Any], end: SystemExit) -> bool:
    """True if the tests themselves called `sys.exit()`, as at their end. A program that exits must not pass the test."""
    *_, (frame, _) = traceback.walk_tb(end.__traceback__)
    return frame.f_globals is tests


def run_test_classes(names: dict[str, Any]) -> None:
    """Run test classes like a test runner: unittest's, and classes named Test... AssertionError unless all pass."""
    classes = [one for one in names.values() if isinstance(one, type) and one.__module__ == names["__name__"]]
    unittest = importlib.import_module("unittest")
    result, load = unittest.TestResult(), unittest.defaultTestLoader.loadTestsFromTestCase
    unittest.case.__dict__["_ShouldStop"] = ()  # it would catch this exception, which a program may raise, and count a pass
    for one in classes:
        if issubclass(one, unittest.TestCase):
            load(one).run(result)
        elif one.__name__.startswith("Test"):
            for name in [name for name in dir(one) if name.startswith("test")]:
                owner = one()
                for step in ("setup_method", name, "teardown_method"):
                    getattr(owner, step, lambda: None)()
                result.testsRun += 1
    for _, said in (*result.failures, *result.errors):
        raise AssertionError(said.strip().rpartition("\n")[2])
    if not result.testsRun or result.skipped or result.unexpectedSuccesses:
        raise AssertionError("not every test of the test classes ran")


def _what_failed(error: BaseException, source: str) -> str:
    """Describe the error, with the line of the tests that raised it."""
    at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    line = source.splitlines()[at[-1] - 1].strip() if at and at[-1] else ""
    text = str(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{said} at {line}"[:300] if line else said[:300]


# ---------------------------------------------------------------- the program's side


def serve(program: dict[str, Any], names: list[str], peer: int, test_s: float, named: Callable[[dict[str, Any], str], Any]) -> None:
    """Answer the tests' requests until they end. `named` finds a function of the program, or a method of its class Solution."""
    objects: list[Any] = []
    places: dict[int, int] = {}
    solutions: dict[str, Any] = {}
    incoming, outgoing = open(peer, "rb", closefd=False), open(peer, "wb", closefd=False)  # noqa: SIM115

    def refer(value: Any) -> Any:
        if id(value) not in places:
            places[id(value)] = len(objects)
            objects.append(value)  # keeps it alive, so that its id stays unique
        return {"r": places[id(value)]}

    def find(at: str | int) -> Any:
        if isinstance(at, int):
            return objects[at]
        owner, _, method = at.partition(".")
        if not method:
            return named(program, at)
        if owner not in solutions:
            solutions[owner] = program["Solution"]()
        return getattr(solutions[owner], method)

    def call(asked: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = decode(asked["args"], find), decode(asked["kwargs"], find)
        try:
            said: dict[str, Any] = {"value": encode(find(asked["at"])(*args, **kwargs), refer)}
        except Exception as error:  # passed on to the tests
            said = _told(error)
        given = dict(zip(map(str, itertools.count()), args, strict=False)) | kwargs
        before = dict(zip(map(str, itertools.count()), asked["args"], strict=False)) | dict(asked["kwargs"]["d"])
        after = {place: encode(one, refer) for place, one in given.items() if type(one) in CHANGING}
        return said | {"changed": {place: now for place, now in after.items() if now != before[place]}}

    while line := incoming.readline():
        asked = json.loads(line)
        if asked["do"] == "begin":
            limit_cpu(test_s)
        answer: dict[str, Any]
        if asked["do"] == "names":
            known = {name: _value(program, name, named, refer) for name in names}
            answer = {"names": {name: value for name, value in known.items() if value is not None}}
        elif asked["do"] == "test":
            given = {name: named(program, name) for name in asked["test"]["names"] if known[name] is not None}
            answer = {"token": asked["token"], "error": run_test(asked["test"], given, inside=True)}
        else:
            answer = call(asked) if asked["do"] == "call" else {}
        outgoing.write(json.dumps(answer).encode() + b"\n")
        outgoing.flush()


def _value(program: dict[str, Any], name: str, named: Callable[[dict[str, Any], str], Any], refer: Callable[[Any], Any]) -> Any:
    try:
        value = named(program, name)
    except (KeyError, AttributeError):
        return None
    return {"r": name} if callable(value) else encode(value, refer)


def _told(error: Exception) -> dict[str, Any]:
    kinds = [f"{one.__module__}.{one.__qualname__}" for one in type(error).__mro__]
    try:
        return {"error": kinds, "args": encode(list(error.args), str), "text": str(error)}
    except Exception:
        return {"error": kinds, "args": [], "text": ""}
