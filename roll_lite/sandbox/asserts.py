"""Run assert-style tests of an untrusted program (docs/code_reward.md). `Tests` runs them in their own process and calls the program's
functions over a socket with plain values. The program's process (`serve`) sees only the arguments."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import sys
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from roll_lite.sandbox.inside import Operators, guarded, replaced_by
from roll_lite.sandbox.kernel import limit_cpu, read_line
from roll_lite.sandbox.loaded import LOADED, Loaded
from roll_lite.sandbox.values import FROM_PROGRAM, decode, encode

LONGEST = 8 << 20
CHANGING = (list, dict, set, bytearray)
CONTROL = (StopIteration, StopAsyncIteration)
"""Exceptions that would silently end a loop in tests; tests get a plain Exception instead."""
NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError, MemoryError)


class _Aborted(BaseException):
    """Raised to abandon a test; escapes `except Exception`."""


# ---------------------------------------------------------------- the tests' side


class Remote:
    """Proxy in the tests' process of one of the program's functions, classes or objects. `at`: its target: a function's or class's
    name, an object's number, or [object's number, method name]. `has_methods`: True for an object of LeetCode's class Solution."""

    def __init__(self, tests: Tests, at: str | int | list[Any]) -> None:
        self._tests, self._at, self._has_methods = tests, at, False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._tests.call(self._at, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return a method's proxy. Reading an attribute of a function or class aborts the test, which reruns in the program's process."""
        if self._has_methods:
            return Remote(self._tests, [self._at, name])
        if isinstance(self._at, str):
            self._tests.abort_and_run_inside(f"{self._at}.{name}")
        raise AttributeError(f"an object of the program is no plain value: no attribute {name!r}")

    def _is_class(self, *_: Any) -> NoReturn:
        self._tests.abort_and_run_inside(f"{self._at} used as a class")

    __instancecheck__ = __subclasscheck__ = __mro_entries__ = _is_class


class Tests:
    def __init__(self, peer: int, wall_s: float) -> None:
        self._peer, self._wall_s = peer, wall_s
        self._heard = b""
        self._deadline = 0.0
        self._remotes: dict[int, Remote] = {}
        self._dead_reason = ""
        self._inside_reason = ""
        self._limit_hit = ""
        self._used = False

    def run(self, tests: list[dict[str, Any]], fail_fast: bool) -> Iterator[dict[str, Any]]:
        for test in tests:
            self._deadline = time.monotonic() + self._wall_s
            try:
                verdict = self._verdict(test)
            except _Aborted:
                verdict = {}
            if self._dead_reason:
                verdict = {"error": self._dead_reason, "stopped": self._limit_hit}
            yield verdict
            if self._dead_reason or (fail_fast and verdict.get("error")):
                return

    def _verdict(self, test: dict[str, Any]) -> dict[str, Any]:
        with self._reading():
            known = self._ask({"do": "begin"})["names"]
            names = {name: self._read(known[name][0]) if known[name] else Remote(self, name) for name in test["names"] if name in known}
        try:
            import_modules(test["imports"])
        except ImportError as error:
            return {"cannot": f"the tests import what is not there: {error}; python_path may name its folder"}
        self._inside_reason = test["inside"]
        self._used = any(not isinstance(value, Remote) for value in names.values())
        if not self._inside_reason:
            module = sys.modules[FROM_PROGRAM] = types.ModuleType(FROM_PROGRAM)
            module.__dict__.update(names)
            wrong = run_test(test, names)
            missing = [name for name in test["names"] if name not in names]
            if not (self._inside_reason or wrong or self._used or missing):
                return {"cannot": "the tests end without having used the program"}
            if not self._inside_reason:
                return {"error": wrong or ("" if self._used else f"NameError: name {missing[0]!r} is not defined")}
        token = secrets.token_hex()
        with self._reading():
            answer = self._ask({"do": "test", "test": test, "token": token})
            if answer["token"] != token:
                raise ValueError
            return {"error": str(answer["error"]), "inside": self._inside_reason}

    def abort_and_run_inside(self, why: str) -> NoReturn:
        self._inside_reason = self._inside_reason or why
        raise _Aborted(why)

    def call(self, at: str | int | list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._used = True
        asked = {"do": "call", "at": at, "args": encode(args, self._refer), "kwargs": encode(kwargs, self._refer)}
        with self._reading():
            answer = self._ask(asked)
            for place, now in answer["changed"]:
                given, now = args[place] if type(place) is int else kwargs[place], self._read(now)
                if type(given) not in CHANGING:
                    raise ValueError
                given.clear()
                given.extend(now) if hasattr(given, "extend") else given.update(now)
            if "error" not in answer:
                value = self._read(answer["value"])
                if at == "Solution" and isinstance(value, Remote):
                    value._has_methods = True
                return value
            error = _error(answer)
        raise error

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"r": value._at}
        self.abort_and_run_inside(f"an argument of type {type(value).__name__}")

    def _read(self, data: Any) -> Any:
        return decode(data, lambda at: self._remotes.setdefault(int(at), Remote(self, int(at))))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except NO_ANSWER:
            self._end("the program sent what is no answer")

    def _ask(self, asked: dict[str, Any]) -> Any:
        message = json.dumps(asked).encode() + b"\n"
        try:
            while message:
                message = message[os.write(self._peer, message) :]
            heard = read_line(self._peer, self._deadline, LONGEST, self._heard)
        except TimeoutError:
            self._limit_hit = "wall"
            self._end("time limit: did not end")
        except ConnectionError:
            heard = b""
        line, end, self._heard = heard.partition(b"\n")
        if len(heard) > LONGEST:
            self._end(f"the program returned a value of more than {LONGEST >> 20} MB")
        if not end:
            self._end("the program ended during its tests")
        return json.loads(line)

    def _end(self, why: str) -> NoReturn:
        self._dead_reason = self._dead_reason or why
        raise _Aborted(why)


def import_modules(statements: list[str]) -> None:
    for statement in statements:
        exec(statement, {})


def _error(answer: dict[str, Any]) -> Exception:
    """Recreate the program's exception as the first class of its MRO that exists here."""
    kind: type[Exception] = RuntimeError
    for name in map(str, answer["error"]):
        module, _, plain = name.rpartition(".")
        found = getattr(sys.modules.get(module), plain, None) if module.partition(".")[0] not in ("unittest", "_pytest") else None
        if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, CONTROL):
            kind = found
            break
    text, args = str(answer["text"]), decode(answer["args"])
    error = kind.__new__(kind, *args)
    if str(error) != text:
        kind = type(kind.__name__, (kind,), {"__str__": lambda self: text})
        error = kind.__new__(kind, *args)
    return error


# ---------------------------------------------------------------- a test, on either side


def run_test(test: dict[str, Any], names: dict[str, Any], inside: bool = False) -> str:
    """Run a test and return its failure, or "". `inside`: run with guards, in the program's process."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # unittest.main() looks for the tests there
    known = module.__dict__
    known |= {**names, "RUN_TEST_CLASSES": lambda: run_test_classes(known)}
    failed: list[str] = []
    wrong, loaded, operators = "", None, None
    try:
        tree = guarded(test["source"], known, failed) if inside else test["source"]
        if "unittest" in test["source"]:
            unittest = importlib.import_module("unittest")
            unittest.__dict__["main"] = lambda *args, **kwargs: run_test_classes(known)
            unittest.case.__dict__["_ShouldStop"] = ()  # otherwise the program could raise it, which unittest would count as a pass
        if inside:
            loaded, operators = Loaded().add(LOADED.modules), Operators(known, failed, test["source"])
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), known)
    except SystemExit as end:
        *_, (frame, _) = traceback.walk_tb(end.__traceback__)
        if inside and frame.f_globals is not known:
            wrong = "the program ended the test: SystemExit"
        elif end.code not in (None, 0, False):
            wrong = f"SystemExit: {end.code}"
    except BaseException as error:
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
        line = test["source"].splitlines()[at[-1] - 1].strip() if at and at[-1] else ""
        text = str(error)
        said = f"{type(error).__name__}: {text}" if text else type(error).__name__ or "an exception without a name"
        wrong = f"{said} at {line}"[:300] if line else said[:300]
    if loaded and operators and (replaced := (operators.end() | loaded.put_back()) - replaced_by(test["source"])):
        failed.append(f"the program replaced {', '.join(sorted(replaced))} of a module or class")
    return wrong or (failed[0] if failed else "")


def run_test_classes(names: dict[str, Any]) -> None:
    classes = [one for one in names.values() if isinstance(one, type) and one.__module__ == names["__name__"]]
    unittest = importlib.import_module("unittest")
    result, load = unittest.TestResult(), unittest.defaultTestLoader.loadTestsFromTestCase
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


# ---------------------------------------------------------------- the program's side


def find(names: dict[str, Any], function: str) -> Any:
    owner, _, method = function.rpartition(".")
    if not owner and function not in names and isinstance(names.get("Solution"), type):
        owner, method = "Solution", function
    if not owner:
        return names[function]
    found = names[owner]
    return getattr(found() if isinstance(found, type) else found, method)


def serve(program: dict[str, Any], names: list[str], peer: int, test_s: float) -> None:
    objects: list[Any] = []
    places: dict[int, int] = {}
    incoming, outgoing = open(peer, "rb", closefd=False), open(peer, "wb", closefd=False)  # noqa: SIM115

    def refer(value: Any) -> Any:
        if id(value) not in places:
            places[id(value)] = len(objects)
            objects.append(value)  # keeps it alive, so that its id stays unique
        return {"r": places[id(value)]}

    def find_at(at: str | int | list[Any]) -> Any:
        if isinstance(at, list):
            return getattr(objects[at[0]], at[1])
        return find(program, at) if isinstance(at, str) else objects[at]

    def known() -> dict[str, Any]:
        found = {}
        for name in names:
            with contextlib.suppress(KeyError, AttributeError):
                found[name] = find(program, name)
        return found

    def call(asked: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = decode(asked["args"], find_at), decode(asked["kwargs"], find_at)
        try:
            said: dict[str, Any] = {"value": encode(find_at(asked["at"])(*args, **kwargs), refer)}
        except Exception as error:  # passed on to the tests
            said = _error_answer(error)
        before = [*asked["args"]["t"], *(one for _, one in asked["kwargs"]["d"])]
        now = [(place, encode(one, refer) if type(one) in CHANGING else None) for place, one in (*enumerate(args), *kwargs.items())]
        return said | {"changed": [[place, one] for (place, one), old in zip(now, before, strict=True) if one not in (None, old)]}

    while line := incoming.readline():
        asked, answer = json.loads(line), dict[str, Any]()
        match asked["do"]:
            case "begin":
                limit_cpu(test_s)
                answer = {"names": {name: None if callable(one) else [encode(one, refer)] for name, one in known().items()}}
            case "call":
                answer = call(asked)
            case "test":
                LOADED.put_back()
                given = {name: one for name, one in known().items() if name in asked["test"]["names"]}
                answer = {"token": asked["token"], "error": run_test(asked["test"], given, inside=True)}
            case other:
                raise KeyError(other)
        outgoing.write(json.dumps(answer).encode() + b"\n")
        outgoing.flush()


def _error_answer(error: Exception) -> dict[str, Any]:
    kinds = [f"{one.__module__}.{one.__qualname__}" for one in type(error).__mro__]
    try:
        return {"error": kinds, "args": encode(list(error.args), str), "text": str(error)}
    except Exception:
        return {"error": kinds, "args": [], "text": ""}
