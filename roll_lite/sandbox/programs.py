"""Runs inside the sandbox, in the process of the untrusted program: what is asked of it.

Nothing here decides anything. Values leave through an open file and are compared outside, where what is expected is known.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from roll_lite.sandbox.rewriting import DERIVED, IDENTICAL, LIVES_THERE, TYPE_OF, rewritten
from roll_lite.sandbox.serving import serve
from roll_lite.sandbox.stand_ins import Cannot, ProgramFault, StandIn, ask_there, builtins_for
from roll_lite.sandbox.values import FROM_PROGRAM, decode, encode
from roll_lite.sandbox.wire import Wire

RESULT = 3
PEER = 4
RECURSION = 20_000
STACK = 8 << 20
"""Of a thread, as elsewhere: that of the process is larger."""


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
    printed = sys.stdout
    sys.setrecursionlimit(RECURSION)
    threading.stack_size(STACK)
    sys.argv = ["main.py"]
    if order["kind"] != "tests":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    builtins.exit = builtins.quit = _leave_program  # type: ignore[assignment]
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
    _end(printed, status)


def _end(printed: TextIO, status: int) -> NoReturn:
    """As an interpreter ends: threads, functions for the end, what is not written yet, what objects say when they go, and that."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    status = _flushed(status, sys.stdout, printed)  # while there are names: a stream of the program's own may need them
    sys.stdout = printed
    with contextlib.suppress(BaseException):
        for module in [sys.modules[name] for name in ("__main__", FROM_PROGRAM) if name in sys.modules]:
            for name in [name for name in vars(module) if not name.startswith("__")]:
                vars(module)[name] = None
        gc.collect()
    os._exit(_flushed(status, printed) & 0xFF)


def _flushed(status: int, *streams: TextIO | None) -> int:
    for stream in streams:
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:
            status = status or 1
    return status


def _leave_program(code: Any = None) -> NoReturn:
    """What `site`, which does not run here, offers as exit and quit."""
    raise SystemExit(code)


KEPT = ("roll_lite", "roll_lite.rewards")


def _executable(path: str, flags: int) -> int:
    """From the start: some walls let no program change the mode of a file."""
    return os.open(path, flags, 0o700)


def _exec(order: dict[str, Any]) -> None:
    """A program of another interpreter, or a compiled one."""
    for name, text in order["files"].items():
        with open(name, "w", encoding="utf-8") as stream:  # noqa: PTH123
            stream.write(text)
    if order.get("artifact"):
        with open(PEER, "rb", closefd=False) as source, open(order["artifact"], "wb", opener=_executable) as target:
            source.seek(0)
            target.write(source.read())
    os.environ["MALLOC_ARENA_MAX"] = "1"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `yes | head -n1` ends by it
    os.set_inheritable(RESULT, bool(order.get("keeps_result")))
    os.execvp(order["command"][0], order["command"])


def _module(order: dict[str, Any], name: str) -> dict[str, Any]:
    """The names that the program defines, below those of the prelude."""
    source = order["source"]
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__["__file__"] = "main.py"
    linecache.cache["main.py"] = (len(source), None, source.splitlines(keepends=True), "main.py")
    exec(compile(order.get("prelude", ""), "prelude.py", "exec", dont_inherit=True), module.__dict__)
    exec(compile(source, "main.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _script(order: dict[str, Any]) -> None:
    _module(order, "__main__")


def _call(order: dict[str, Any]) -> None:
    """One call of the program's function; its value leaves."""
    arguments, named = decode(order["args"]), decode(order["kwargs"])
    function = _named(_module(order, FROM_PROGRAM), order["function"])
    value = function(*arguments, **named)
    _leave(value, None if value is not None or not arguments else arguments[0])


def _named(names: dict[str, Any], function: str) -> Callable[..., Any]:
    """A function of the program, or a method of a class of its, which may be left out where that is Solution."""
    owner, _, method = function.rpartition(".")
    if not owner and function not in names and isinstance(names.get("Solution"), type):
        owner, method = "Solution", function
    if not owner:
        return names[function]
    found = names[owner]
    return getattr(found() if isinstance(found, type) else found, method)


def _expression(order: dict[str, Any]) -> None:
    names = {"__builtins__": builtins} | {name: importlib.import_module(name) for name in order.get("modules", ())}
    _leave(eval(compile(order["source"].strip(), "<expression>", "eval", dont_inherit=True), names))


def _leave(value: Any, changed: Any = None) -> None:
    """`changed`: the first argument, of a function without a value, which may work in place."""
    text = json.dumps({"value": encode(value)} if changed is None else {"value": None, "changed": encode(changed)})
    with open(RESULT, "w", encoding="utf-8", closefd=False) as stream:
        stream.write(text)


def _serve(order: dict[str, Any]) -> None:
    """The program's side of assert-style tests."""
    serve(_module(order, FROM_PROGRAM), PEER)


def _tests(order: dict[str, Any]) -> None:
    """The tests' side: it holds no line of the program, only its functions' stand-ins; what comes back is plain data."""
    wire = Wire(PEER, order["names"], order["source"])
    try:
        verdict = _verdict_of(wire, order)
    except BaseException as error:
        verdict = {"value": False, "error": _what_failed(error, order["source"])}
    if isinstance(wire.over, ProgramFault):
        verdict = {"value": False, "error": str(wire.over)}
    if isinstance(wire.over, Cannot):
        verdict = {"cannot": str(wire.over)}
    with open(RESULT, "w", encoding="utf-8", closefd=False) as stream:
        json.dump(verdict, stream)


def _verdict_of(wire: Wire, order: dict[str, Any]) -> dict[str, Any]:
    tree, asks = rewritten(order["source"])
    if asks:
        wire.watch_identity()
    wire.wait()
    found = wire.names(order["names"])
    module = types.ModuleType(FROM_PROGRAM)
    module.__dict__.update(found)
    sys.modules[FROM_PROGRAM] = module
    tests = types.ModuleType("__main__")
    sys.modules["__main__"] = tests  # where unittest.main() looks for them
    names = tests.__dict__
    names |= {"__name__": "tests", "__builtins__": builtins_for(wire, order["names"])}
    names |= {IDENTICAL: wire.same, TYPE_OF: wire.type_of, DERIVED: wire.derive, LIVES_THERE: _live_there}
    if wire.awaits:
        importlib.import_module("asyncio")
    ask_there(wire)
    names |= found
    try:
        names |= {name: importlib.import_module(path) for name, path in order.get("modules", {}).items()}
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
    except SystemExit as end:
        if end.code not in (None, 0, False):
            raise
    except ImportError as error:
        if error.name == FROM_PROGRAM or hasattr(error, "of_program"):
            raise
        return {"cannot": f"the tests import what is not there: {error}; python_path may name its folder"}
    return {"value": True} if wire.used else {"cannot": "the tests end without having used the program"}


def _live_there(*bases: Any) -> bool:
    return any(isinstance(base, StandIn) for base in bases)


def _what_failed(error: BaseException, source: str) -> str:
    """With the line of the tests, where an assert says nothing else."""
    at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    line = source.splitlines()[at[-1] - 1].strip() if at and at[-1] else ""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{said} at {line}"[:300] if line else said[:300]


MODES: dict[str, Callable[[dict[str, Any]], None]] = {
    "script": _script,
    "call": _call,
    "expression": _expression,
    "serve": _serve,
    "tests": _tests,
}
