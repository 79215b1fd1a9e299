"""A warm Python interpreter behind walls that forks a process for each program, watches it, and kills it with all that it started.

It is alone in its namespaces with one program at a time. What it is told comes over one socket: a JSON line with the program and its
limits, and the open files that become the program's 0 to 4. Nothing that the program must not know is ever sent here.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

from roll_lite.rewards.sandbox import kernel
from roll_lite.rewards.sandbox.isolation import Walls, build_outer_walls, go_inside, reset_signals
from roll_lite.rewards.sandbox.programs import run_program

WARM = [
    "array",
    "bisect",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "threading",
    "traceback",
    "typing",
    "linecache",
    "ast",
    "types",
    "enum",
    "io",
    "time",
    "atexit",
    "inspect",
    "dataclasses",
    "abc",
    "numbers",
    "cmath",
    "textwrap",
]
FIRST_LOOK_S, LOOK_S = 0.02, 0.05
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


def main(control: int, settings: dict[str, Any]) -> None:
    """Go behind the walls, say what holds, serve until the other end of the socket closes."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    line = socket.socket(fileno=control)
    walls = build_outer_walls(settings["readable"], settings["walls"])
    if walls.kind == "namespaces":
        pid = os.fork()
        if pid:
            line.close()
            os.waitpid(pid, 0)
            os._exit(0)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.environ.clear()
    os.environ.update({"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TMPDIR": "/tmp"})
    sys.path[:] = [path for path in sys.path if path != settings["root"]] + settings["python_path"]
    for name in WARM:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.collect()
    gc.freeze()
    line.sendall(json.dumps({"kind": walls.kind, "held": walls.held, "why_not": walls.why_not}).encode() + b"\n")
    Zygote(line, walls, settings["readable"]).serve()


def _remove(folder: str) -> None:
    """Also a folder nested more deeply than Python recurses."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", folder], check=False)


class Zygote:
    def __init__(self, line: socket.socket, walls: Walls, readable: list[str]) -> None:
        self._line = line
        self._walls = walls
        self._readable = readable
        self._namespaces = walls.kind == "namespaces"
        with open("/proc/self/statm", "rb") as stream:  # noqa: PTH123
            self._own_pages = int(stream.read().split()[1])
            """Shared with the programs, and not to be counted for each of their processes."""
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if self._namespaces else -1

    def serve(self) -> None:
        while (request := self._receive()) is not None:
            order, files = request
            try:
                report = self._run(order, files)
            except OSError as error:  # this machine's trouble, told as such
                report = {"trouble": f"{type(error).__name__}: {error}"}
            finally:
                for file in files:
                    os.close(file)
            self._line.sendall(json.dumps(report).encode() + b"\n")

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The order is itself in the first of the files: a socket's messages are limited in length."""
        files = array.array("i")
        data, ancillary, _, _ = self._line.recvmsg(1, socket.CMSG_SPACE(6 * files.itemsize))
        if not data:
            return None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files.frombytes(payload[: len(payload) - len(payload) % files.itemsize])
        order = files.pop(0)
        with open(order, "rb") as stream:  # noqa: PTH123
            stream.seek(0)
            return json.load(stream), list(files)

    def _run(self, order: dict[str, Any], files: list[int]) -> dict[str, Any]:
        with self._folder() as folder:
            if self._namespaces:  # the next child is the first of a namespace that dies with it
                kernel.setns(self._own_pids, kernel.CLONE_NEWPID)
                kernel.unshare(kernel.CLONE_NEWPID)
            ready, say_ready = os.pipe()
            started = time.monotonic()
            pid = os.fork()
            if pid == 0:
                self._child(order, files, folder, say_ready)
            os.close(say_ready)
            try:
                ended = self._watch(pid, order["limits"], started)
                trouble = os.read(ready, 2000).decode(errors="replace")
            finally:
                os.close(ready)
                self._kill_rest()
            return {"trouble": trouble} if trouble else ended | {"seconds": time.monotonic() - started}

    @contextlib.contextmanager
    def _folder(self) -> Iterator[str]:
        if self._namespaces:
            yield "/tmp"
            return
        folder = tempfile.mkdtemp(prefix="code-")
        if "users" in self._walls.held:
            os.chown(folder, 65534, 65534)
        try:
            yield folder
        finally:
            _remove(folder)

    def _child(self, order: dict[str, Any], files: list[int], folder: str, say_ready: int) -> None:
        last = say_ready
        try:
            try:
                reset_signals()
                self._line.detach()
                high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 64) for file in (*files, say_ready)]
                for number, file in enumerate(high[:-1]):
                    os.dup2(file, number)
                os.dup2(high[-1], len(files), inheritable=False)
                last = len(files)
                os.closerange(last + 1, 512)
                if not self._namespaces:
                    os.environ["HOME"] = os.environ["TMPDIR"] = folder
                go_inside(self._walls, folder, order["limits"], self._readable)
            except BaseException as error:
                os.write(last, f"{type(error).__name__}: {error}".encode())
                os._exit(125)
            os.close(last)
            run_program(order)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _watch(self, pid: int, limits: dict[str, Any], started: float) -> dict[str, Any]:
        """Until it ends or passes a limit."""
        handle = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.register(self._line.fileno(), 0)
        stopped, pause = "", FIRST_LOOK_S
        try:
            while not (events := poller.poll(pause * 1000)) or handle not in dict(events):
                if events:  # whoever wanted to know is gone
                    os._exit(0)
                pause = LOOK_S
                stopped = self._passed(limits, time.monotonic() - started, pid)
                if stopped:
                    os.kill(pid, signal.SIGKILL)
                    break
        finally:
            os.close(handle)
        _, status, usage = os.wait4(pid, 0)
        cpu_s = usage.ru_utime + usage.ru_stime
        if not stopped and cpu_s > limits["cpu_s"]:
            stopped = "cpu"
        return {"exit": os.waitstatus_to_exitcode(status), "stopped": stopped, "cpu_s": cpu_s, "memory_bytes": usage.ru_maxrss * 1024}

    def _passed(self, limits: dict[str, Any], seconds: float, pid: int) -> str:
        if seconds > limits["wall_s"]:
            return "wall"
        cpu = memory = 0.0
        for process in self._members(pid):
            try:
                with open(f"/proc/{process}/stat", "rb") as stream:  # noqa: PTH123
                    fields = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue
            cpu += sum(int(fields[place]) for place in (11, 12, 13, 14)) / TICKS
            memory += max(0, int(fields[21]) - self._own_pages) * PAGE
        return "cpu" if cpu > limits["cpu_s"] else "memory" if memory > limits["memory_bytes"] else ""

    def _members(self, pid: int) -> list[int]:
        """All processes of the program."""
        if self._namespaces:
            own = os.getpid()
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]  # noqa: PTH208
        found, new = [pid], [pid, *self._children(os.getpid())]
        found = list(dict.fromkeys(new))
        for process in found:
            found.extend(child for child in self._children(process) if child not in found)
        return found

    def _children(self, pid: int) -> list[int]:
        try:
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as stream:  # noqa: PTH123
                return [int(one) for one in stream.read().split()]
        except OSError:
            return []

    def _kill_rest(self) -> None:
        """Without a pid namespace: what the program left behind is a child of this process now."""
        if self._namespaces:
            return
        deadline = time.monotonic() + 5
        while (rest := self._members(0)[1:]) and time.monotonic() < deadline:
            for process in rest:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
