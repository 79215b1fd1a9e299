"""Tool `python`: a sandboxed interpreter for each episode."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from roll_lite.config.schema.environments import PythonToolConfig
from roll_lite.data.row_values import files_of
from roll_lite.environments.base import Task
from roll_lite.environments.tool_calls import schema_of
from roll_lite.environments.tools import Call, ToolError
from roll_lite.sandbox.kernel import KILL, PAUSE, RESUME
from roll_lite.sandbox.pool import Limits, Program, Sandbox, SandboxTrouble

GRACE_S = 2.0
"""Extra seconds, beyond `timeout_s`, for interrupted code to end."""
CPU_CALLS = 100
"""CPU time limit over an interpreter's life, as a multiple of `timeout_s`, the limit of one call. The interpreter is paused between
calls."""
LONGEST_S = 7 * 24 * 3600.0
WRITE_FILES = """
def write(files):
    import os
    for name, text in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
write({!r})
del write
"""


class PythonTool:
    def __init__(self, settings: PythonToolConfig, turn_timeout_s: float) -> None:
        self._settings = settings
        self._longest_wait_s = max(turn_timeout_s - settings.timeout_s - 2 * GRACE_S, 1.0)
        first = Interpreter(settings)
        first.sandbox.start().refuse_missing(settings.allow_unprotected, "tool python")
        self.schemas = [schema_of(first.python)]
        self._free = [first]
        """Idle interpreters. Their sandboxes are reused, because starting a sandbox takes up to a second."""

    @asynccontextmanager
    async def opened(self, task: Task) -> AsyncIterator[Call]:
        files = {} if self._settings.files is None else files_of(task.columns, self._settings.files)
        interpreter = self._free.pop() if self._free else Interpreter(self._settings)
        interpreter.files, interpreter.longest_wait_s = files, self._longest_wait_s
        try:
            yield interpreter.call
        finally:
            interpreter.sandbox.order(KILL)  # also ends a cancelled call
            interpreter.thread.submit(interpreter.end).add_done_callback(lambda _: self._free.append(interpreter))


class Interpreter:
    """Sandboxed Python process, used by one episode after another. It starts at an episode's first call, and again if it has died."""

    def __init__(self, settings: PythonToolConfig) -> None:
        self.sandbox = Sandbox(python_path=list(map(str, settings.python_path)))
        self.thread = ThreadPoolExecutor(1)
        self.files: dict[str, str] = {}
        self.longest_wait_s = LONGEST_S
        """Maximum seconds that a call may wait for earlier calls of the same response, so that all end before `turn_timeout_s`. A call that
        waits longer is not run."""
        self._settings = settings
        self._peer: socket.socket | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        run = partial(self.python, **arguments)
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._in_time, time.monotonic(), run)

    def _in_time(self, asked: float, run: Callable[[], str]) -> str:
        if (waited := time.monotonic() - asked) > self.longest_wait_s:
            raise ToolError(f"This call was not run: the earlier calls of the response took {waited:.0f} s.")
        return run()

    def python(self, code: str) -> str:
        """Run Python code in an interpreter that keeps variables, imports and files from call to call. Returns what the code prints, and
        the value of an expression in its last line or the traceback of an error. There is no network.

        Args:
            code: Python code of one or more lines.
        """
        peer = self._peer = self._peer or self._begin()
        self.sandbox.order(RESUME)
        try:
            peer.sendall(json.dumps(code).encode() + b"\n")
            answer = peer.recv(1)
        except OSError:  # timeout or ended interpreter; an empty answer means the same
            answer = b""
        printed = self.sandbox.printed().decode(errors="replace").rstrip()
        if answer == b"\0":
            self.sandbox.order(PAUSE)
            return printed or "(no output)"
        if answer:
            self.sandbox.order(PAUSE)
            late = printed.endswith("KeyboardInterrupt")
            raise ToolError(f"{printed}: the time limit is {self._settings.timeout_s:g} s" if late else printed)
        self.end()
        limits = f"limits: {self._settings.timeout_s:g} s a call, {self._settings.memory_mb} MB"
        lost = f"The interpreter has ended ({limits}). Variables and changed files are lost; the next call starts a new one."
        raise ToolError(f"{printed}\n{lost}".strip())

    def _begin(self) -> socket.socket:
        timeout_s = self._settings.timeout_s
        order = {"kind": "repl", "source": WRITE_FILES.format(self.files), "call_s": timeout_s}
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout_s + GRACE_S)
        with theirs:
            limits = Limits(timeout_s * CPU_CALLS, LONGEST_S, self._settings.memory_mb)
            self.sandbox.begin(Program(order, limits=limits), theirs.fileno())
        return ours

    def end(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None
            with suppress(SandboxTrouble):  # the next start gets a new sandbox
                self.sandbox.finish(0.0)
