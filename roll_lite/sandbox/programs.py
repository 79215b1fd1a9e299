"""Run an untrusted program in its sandboxed process, in one of several modes (`MODES`). Results are judged outside."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import importlib
import json
import linecache
import os
import resource
import signal
import site
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from roll_lite.sandbox.asserts import Tests, find, import_modules, serve
from roll_lite.sandbox.kernel import OUT_OF_TIME, limit_cpu, read_line
from roll_lite.sandbox.loaded import LOADED
from roll_lite.sandbox.values import FROM_PROGRAM, decode, encode

RESULT = 3
PEER = 4
RECURSION = 20_000
SET_LIMIT = resource.setrlimit
STACK = 8 << 20


def run_program(order: dict[str, Any]) -> None:
    for name in [name for name in sys.modules if name.startswith("roll_lite.")]:
        del sys.modules[name]
    if order["kind"] == "exec":
        _exec(order)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.setrecursionlimit(RECURSION)
    threading.stack_size(STACK)
    sys.argv = ["main.py"]
    if order["kind"] != "tests":  # tests must not import files that the program wrote
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    site.setquit()
    site.setcopyright()
    site.sethelper()
    resource.setrlimit = _set_limit
    if "test_s" in order:
        limit_cpu(order["test_s"])
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
    with contextlib.suppress(AttributeError):
        try:
            sys.stdout.closed  # noqa: B018
        except ValueError:  # detached: its new owner flushes, and Python would exit with 120
            sys.stdout = None
    ctypes.pythonapi.Py_Exit(status & 0xFF)  # joins threads, runs exit functions, finalizes objects and flushes, as Python does


def _set_limit(which: int, limits: tuple[int, int]) -> None:
    """Replace `resource.setrlimit`: ignore refused attempts to raise limits, as contest programs often make."""
    try:
        SET_LIMIT(which, limits)
    except ValueError:
        if which not in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_STACK):
            raise


def _exec(order: dict[str, Any]) -> None:
    for name, text in order["files"].items():
        with open(name, "w", encoding="utf-8") as stream:  # noqa: PTH123
            stream.write(text)
    if order.get("artifact"):
        made = functools.partial(os.open, mode=0o700)  # some walls forbid chmod
        with open(PEER, "rb", closefd=False) as source, open(order["artifact"], "wb", opener=made) as target:
            source.seek(0)
            target.write(source.read())
    os.environ["MALLOC_ARENA_MAX"] = "1"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends `yes | head -n1`
    os.set_inheritable(RESULT, bool(order.get("keeps_result")))
    os.execvp(order["command"][0], order["command"])


def _module(order: dict[str, Any], name: str) -> dict[str, Any]:
    source = order["source"]
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__["__file__"] = "main.py"
    linecache.cache["main.py"] = (len(source), None, source.splitlines(keepends=True), "main.py")
    exec(compile(order.get("prelude", ""), "prelude.py", "exec", dont_inherit=True), module.__dict__)
    exec(compile(source, "main.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _calls(order: dict[str, Any]) -> None:
    """Call one function several times, each in a child process, so that calls do not affect each other."""
    names = _module(order, FROM_PROGRAM)
    for arguments, named in decode(order["calls"]):
        _print(RESULT, _call_in_child(names, order, arguments, named))


def _call_in_child(names: dict[str, Any], order: dict[str, Any], arguments: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Return {"line": JSON of value or error}, {"stopped": exceeded limit} or {"error": text}."""
    here, there = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            limit_cpu(order["test_s"])
            value = find(names, order["function"])(*arguments, **named)
            _print(there, {"value": encode(value)} | ({"changed": encode(arguments[0])} if value is None and arguments else {}))
        except BaseException as error:
            with contextlib.suppress(BaseException):
                _print(there, {"error": f"{type(error).__name__}: {error}"[:300]})
        finally:
            os._exit(0)
    os.close(there)
    try:
        said = read_line(here, time.monotonic() + order["wall_s"], order["most_bytes"])
    except TimeoutError:
        return {"stopped": "wall"}
    finally:
        os.close(here)
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if len(said) > order["most_bytes"]:
        return {"stopped": "output"}
    if b"\n" in said:
        return {"line": said.partition(b"\n")[0].decode(errors="replace")}
    return {"stopped": "cpu"} if status == OUT_OF_TIME else {"error": f"exit status {status}"}


def _print(file: int, data: dict[str, Any]) -> None:
    with open(file, "w", encoding="utf-8", closefd=False) as stream:
        stream.write((data["line"] if "line" in data else json.dumps(data)) + "\n")


def _serve(order: dict[str, Any]) -> None:
    """Load the modules that tests or program import, before the program can replace them; run the program; then answer the tests'
    calls."""
    with contextlib.suppress(Exception):  # the tests' process reports failing imports
        import_modules(order["imports"])
    imports: list[str] = []
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # the program will raise these errors again
        tree = ast.parse(f"{order.get('prelude', '')}\n{order['source']}")
        imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        del tree  # its memory would count as the program's
    for statement in imports:
        with contextlib.suppress(Exception, SystemExit):
            exec(statement, {})
    LOADED.add()
    serve(_module(order, FROM_PROGRAM), order["names"], PEER, order["test_s"])


def _tests(order: dict[str, Any]) -> None:
    for verdict in Tests(PEER, order["wall_s"]).run(order["tests"], order["fail_fast"]):
        _print(RESULT, verdict)


def _repl(order: dict[str, Any]) -> None:
    """Run the program, then pieces of code from the socket PEER in its namespace, each with a time limit.

    After each piece, standard output holds only its output, and PEER gets one byte: 1 if the piece failed, else 0.
    """
    names = _module(order, "__main__")
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    show_traceback = importlib.import_module("code").InteractiveInterpreter().showtraceback  # omits the frame of this function
    os.dup2(1, 2)
    sys.stderr = sys.stdout
    own = os.getpid()
    for number, line in enumerate(open(PEER, "rb", closefd=False), 1):  # noqa: SIM115
        os.lseek(1, 0, os.SEEK_SET)
        os.ftruncate(1, 0)
        piece, name, failed = json.loads(line), f"<call {number}>", False
        linecache.cache[name] = (len(piece), None, piece.splitlines(keepends=True), name)
        try:
            signal.setitimer(signal.ITIMER_REAL, order["call_s"])
            tree: Any = compile(piece, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
            last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
            for part, mode in ((tree, "exec"), (ast.Interactive(last), "single")):
                exec(compile(part, name, mode, dont_inherit=True), names)
        except BaseException as error:
            if failed := not isinstance(error, SystemExit):
                show_traceback()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(BaseException):  # the code may have closed or replaced it
            sys.stdout.flush()
        if os.getpid() != own:  # a child that the code has forked
            os._exit(0)
        os.write(PEER, bytes([failed]))


MODES: dict[str, Callable[[dict[str, Any]], object]] = {
    "script": lambda order: _module(order, "__main__"),
    "calls": _calls,
    "serve": _serve,
    "tests": _tests,
    "repl": _repl,
}
