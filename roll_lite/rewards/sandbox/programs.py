"""Runs inside the sandbox, in the process of the untrusted program: what is asked of it.

Nothing here decides anything. Values leave through an open file and are compared outside, where what is expected is known.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import importlib
import json
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from roll_lite.rewards.sandbox.stand_ins import StandIn, Wire
from roll_lite.rewards.sandbox.values import decode, encode

RESULT = 3
PEER = 4
RECURSION = 20_000


def run_program(order: dict[str, Any]) -> None:
    """Ends the process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "roll_lite" and name not in KEPT]:
        del sys.modules[name]
    if order["kind"] == "exec":
        _exec(order)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.setrecursionlimit(RECURSION)
    sys.argv = ["main.py"]
    try:
        MODES[order["kind"]](order)
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
        if isinstance(leave.code, str):
            sys.stderr.write(leave.code)
    except BaseException:
        status = 1
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BaseException:
        status = status or 1
    os._exit(status & 0xFF)


KEPT = ("roll_lite", "roll_lite.rewards")


def _exec(order: dict[str, Any]) -> None:
    """A program of another interpreter, or a compiled one."""
    for name, text in order["files"].items():
        with open(name, "w", encoding="utf-8") as stream:  # noqa: PTH123
            stream.write(text)
    if order.get("artifact"):
        with open(PEER, "rb", closefd=False) as source, open(order["artifact"], "wb") as target:  # noqa: PTH123
            source.seek(0)
            target.write(source.read())
        os.chmod(order["artifact"], 0o700)  # noqa: PTH101
    os.set_inheritable(RESULT, bool(order.get("keeps_result")))
    os.execvp(order["command"][0], order["command"])


def _module(source: str, name: str) -> dict[str, Any]:
    """The names that the program defines."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__["__file__"] = "main.py"
    linecache.cache["main.py"] = (len(source), None, source.splitlines(keepends=True), "main.py")
    exec(compile(source, "main.py", "exec"), module.__dict__)
    return module.__dict__


def _script(order: dict[str, Any]) -> None:
    _module(order["source"], "__main__")


def _call(order: dict[str, Any]) -> None:
    """One call of the program's function; its value leaves."""
    arguments, named = decode(order["args"]), decode(order["kwargs"])
    function = _named(_module(order["source"], "solution"), order["function"])
    _leave(function(*arguments, **named))


def _named(names: dict[str, Any], function: str) -> Callable[..., Any]:
    """A function of the program, or a method of its class Solution."""
    if function not in names and isinstance(names.get("Solution"), type):
        return getattr(names["Solution"](), function)
    owner, _, method = function.rpartition(".")
    if owner:
        found = names[owner]
        return getattr(found() if isinstance(found, type) else found, method)
    return names[function]


def _expression(order: dict[str, Any]) -> None:
    names = {"__builtins__": builtins} | {name: importlib.import_module(name) for name in order.get("modules", ())}
    _leave(eval(compile(order["source"].strip(), "<expression>", "eval"), names))


def _leave(value: Any) -> None:
    text = json.dumps({"value": encode(value)})
    with open(RESULT, "w", encoding="utf-8", closefd=False) as stream:
        stream.write(text)


def _serve(order: dict[str, Any]) -> None:
    """The program's side of assert-style tests: its functions, called by a process that it cannot touch."""
    names = _module(order["source"], "solution")
    objects: list[Any] = []

    def refer(value: Any) -> dict[str, Any]:
        objects.append(value)
        return {"r": len(objects) - 1}

    incoming, outgoing = open(PEER, "rb", closefd=False), open(PEER, "wb", closefd=False)  # noqa: SIM115
    with contextlib.suppress(ConnectionError):  # the tests have ended
        outgoing.write(b'{"ready": true}\n')
        outgoing.flush()
        for line in incoming:
            answer = _answer(json.loads(line), names, objects, refer)
            outgoing.write(json.dumps(answer).encode() + b"\n")
            outgoing.flush()


def _answer(asked: dict[str, Any], names: dict[str, Any], objects: list[Any], refer: Callable[[Any], Any]) -> dict[str, Any]:
    def find(number: int) -> Any:
        return objects[number]

    try:
        target = names[asked["name"]] if "name" in asked else objects[asked["object"]]
        for attribute in asked["attributes"]:
            target = getattr(target, attribute)
        if asked["do"] == "get":
            return {"value": encode(target, refer)}
        arguments, named = decode(asked["args"], find), decode(asked["kwargs"], find)
        if asked["do"] == "list":
            return {"value": encode(list(target), refer)}
        value = target(*arguments, **named) if asked["do"] == "call" else getattr(builtins, asked["do"])(target)
        return {"value": encode(value, refer), "args": encode(arguments, refer)}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)[:200]}


def _judge(order: dict[str, Any]) -> None:
    """The tests' side: it holds no line of the program, only its functions' stand-ins; what comes back is plain data."""
    wire = Wire(PEER)
    tests = order["source"]
    names: dict[str, Any] = {"__name__": "tests"}
    for name in free_names(tests) | set(order["names"]):
        names[name] = StandIn(wire, {"name": name})
    verdict: dict[str, Any]
    try:
        wire.wait()
        exec(compile(tests, "tests.py", "exec"), names)
        verdict = {"value": True}
    except BaseException as error:
        verdict = {"value": False, "error": f"{type(error).__name__}: {error}"[:300]}
    with open(RESULT, "w", encoding="utf-8", closefd=False) as stream:
        json.dump(verdict, stream)


def free_names(source: str) -> set[str]:
    """Names that a piece of code uses and does not define."""
    used: set[str] = set()
    defined = set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used - defined


MODES: dict[str, Callable[[dict[str, Any]], None]] = {
    "script": _script,
    "call": _call,
    "expression": _expression,
    "serve": _serve,
    "judge": _judge,
}
