"""Isolated, preloaded Python interpreter ("zygote"). It forks a process for each program, watches it, and kills it with all its children.

A request holds the limits as JSON, and open files: the order (see programs.py) and the program's file descriptors 0 to 4. Only the forked
process reads these files: later programs could read the zygote's memory.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from roll_lite.sandbox import kernel
from roll_lite.sandbox.cgroup import Group, die_first, make_group
from roll_lite.sandbox.filesystem import WORK, claim, claimed_by_none, remove_folder
from roll_lite.sandbox.isolation import Isolation, isolate_interpreter, isolate_program, reset_signals
from roll_lite.sandbox.kernel import KILL, PAUSE
from roll_lite.sandbox.loaded import LOADED
from roll_lite.sandbox.programs import run_program
from roll_lite.sandbox.usage import Usage, list_tasks, read_proc

WARM = """
array bisect collections copy datetime decimal fractions functools heapq itertools json math operator queue random re statistics
string threading traceback typing linecache ast types enum io time atexit inspect dataclasses abc numbers cmath textwrap
"""
FIRST_LOOK_S, LOOK_S = 0.02, 0.05
"""Seconds until the first usage sample, and mean seconds between later samples, taken at random times: programs cannot hide in between."""
DISK_LOOK_S = 0.002
LONGEST_LIMITS = 4096
HIGHEST_FILE = 1024
FOLDER = "code-"
PATIENCE_S = 5.0
M_ARENA_MAX = -8
PIDFD_OPEN = 434


def main(control: int, settings: dict[str, Any]) -> None:
    line = socket.socket(fileno=control)
    group = make_group() if settings["control_group"] else None
    isolation = isolate_interpreter(settings["readable"], settings["walls"])
    folder = ""
    if isolation.kind != "namespaces":
        for old in claimed_by_none(tempfile.gettempdir(), FOLDER):
            remove_folder(old)
        folder = tempfile.mkdtemp(prefix=FOLDER)
        claim(folder)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if pid := os.fork():
        line.close()
        os.waitpid(pid, 0)
        if folder:  # namespaces end with the zygote
            kill_descendants()
        remove_folder(folder)
        os._exit(0)
    if isolation.kind == "namespaces":
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        os.chmod(folder, 0o711)  # noqa: PTH101
    if group is not None:
        group.enter()  # the zygote enters once, since moving each program into a group would take about 10 ms
    os.environ.clear()
    os.environ.update(settings["environment"] | {"HOME": WORK, "LANG": "C.UTF-8", "TMPDIR": WORK})
    sys.path[:] = sys.path[1:] + settings["python_path"]
    kernel.libc.mallopt(M_ARENA_MAX, 1)  # otherwise each thread reserves 64 MB of address space
    for name in WARM.split():
        importlib.import_module(name)
    tempfile.tempdir = None  # programs read it from their environment
    LOADED.add()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.collect()
    gc.freeze()
    hello = {"kind": isolation.kind, "held": isolation.held, "why_not": isolation.why_not}
    hello |= {"counted": group.counts if group else [], "group": group.folder if group else ""}
    line.sendall(json.dumps(hello).encode() + b"\n")
    try:
        Zygote(line, isolation, settings["readable"], folder, group).serve()
    finally:  # also if the parent, which waits for the zygote's end, was killed
        remove_folder(folder)


class Zygote:
    def __init__(self, line: socket.socket, isolation: Isolation, readable: list[str], folder: str, group: Group | None) -> None:
        """`folder`: parent of the programs' folders; "" with namespaces."""
        self._line = line
        self._isolation = isolation
        self._readable = readable
        self._parent = folder
        self._namespaces = isolation.kind == "namespaces"
        self._group = group
        self._usage = Usage(group, self._namespaces)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if self._namespaces else -1

    def serve(self) -> None:
        while (request := self._receive()) is not None:
            limits, files = request
            try:
                report = self._run(limits, files)
            except OSError as error:  # failure of the machine, reported to the caller
                report = {"trouble": f"{type(error).__name__}: {error}"}
            finally:
                for file in files:
                    os.close(file)
            self._line.sendall(json.dumps(report).encode() + b"\n")

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return (limits, open files) of the next request; None at the end. Skip orders (kill, pause, resume) for ended programs."""
        files, data, ancillary = array.array("i"), b" ", list[Any]()
        while data and not data.strip():
            data, ancillary, _, _ = self._line.recvmsg(LONGEST_LIMITS, socket.CMSG_SPACE(6 * files.itemsize))
        if not data:
            return None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files.frombytes(payload[: len(payload) - len(payload) % files.itemsize])
        return json.loads(data), list(files)

    def _run(self, limits: dict[str, Any], files: list[int]) -> dict[str, Any]:
        with self._folder() as folder:
            if self._namespaces:  # the next child is init of a pid namespace that dies with it
                kernel.setns(self._own_pids, kernel.CLONE_NEWPID)
                kernel.unshare(kernel.CLONE_NEWPID)
            self._usage.begin(limits, folder)
            ready, say_ready = os.pipe()
            started = time.monotonic()
            try:
                pid = os.fork()
            except OSError:
                os.close(ready)
                os.close(say_ready)
                raise
            if pid == 0:
                self._child(limits, files, folder, say_ready)
            os.close(say_ready)
            try:
                ended = self._watch(pid, limits, started)
                trouble = os.read(ready, 2000).decode(errors="replace")
            finally:
                os.close(ready)
                if not self._namespaces:
                    kill_descendants()
            return {"trouble": trouble} if trouble else ended | {"seconds": time.monotonic() - started}

    @contextlib.contextmanager
    def _folder(self) -> Iterator[str]:
        if self._namespaces:
            yield WORK
            return
        folder = tempfile.mkdtemp(dir=self._parent)
        if "users" in self._isolation.held:
            os.chown(folder, self._isolation.user, self._isolation.user)
        try:
            yield folder
        finally:
            remove_folder(folder)

    def _child(self, limits: dict[str, Any], files: list[int], folder: str, say_ready: int) -> None:
        say, (order, *own) = say_ready, files
        try:
            try:
                reset_signals()
                self._line.detach()
                if self._group is not None:
                    die_first()
                high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 64) for file in (*own, order, say_ready)]
                order, say = len(own), len(own) + 1
                for number, file in enumerate(high):
                    os.dup2(file, number, inheritable=number < order)
                os.closerange(say + 1, HIGHEST_FILE)
                if not self._namespaces:
                    os.environ["HOME"] = os.environ["TMPDIR"] = folder
                isolate_program(self._isolation, folder, limits, self._readable)
            except BaseException as error:
                os.write(say, f"{type(error).__name__}: {error}".encode())
                os._exit(125)
            os.close(say)
            with open(order, "rb") as stream:  # noqa: PTH123
                stream.seek(0)
                asked = json.load(stream)
            run_program(asked)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _watch(self, pid: int, limits: dict[str, Any], started: float) -> dict[str, Any]:
        # Python builds with old kernel headers lack os.pidfd_open.
        handle = kernel.checked(kernel.libc.syscall(PIDFD_OPEN, pid, 0), "pidfd_open")
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.register(self._line.fileno(), select.POLLIN)
        stopped, pause = "", FIRST_LOOK_S
        try:
            while (events := self._wait(poller, pause, pid)) is None or handle not in dict(events):
                if events:
                    order = self._line.recv(1)
                    if order == PAUSE:  # a paused program needs no sampling
                        stopped_now: list[int] = []
                        while (members := self._members(pid)) != stopped_now:  # a process may have forked meanwhile
                            _kill(stopped_now := members, signal.SIGSTOP)
                        order = self._line.recv(1)
                        _kill(members, signal.SIGCONT)
                        self._usage.resume()
                    if not order:  # the sandbox's owner is gone
                        sys.exit()
                    if order == KILL:
                        os.kill(pid, signal.SIGKILL)
                        break
                    continue
                pause = LOOK_S * random.uniform(0.5, 1.5)
                late = time.monotonic() - started > limits["wall_s"]
                stopped = "output" if events is None else "wall" if late else self._usage.exceeded_limit(pid, self._members(pid))
                if stopped:
                    _kill(self._members(pid))  # kill all before waiting for the first: others could still write
                    break
        finally:
            os.close(handle)
        _, status, usage = os.wait4(pid, 0)
        cpu_s = max(usage.ru_utime + usage.ru_stime, self._usage.cpu_s())
        if not stopped:
            out_of_time = cpu_s > limits["cpu_s"] or os.waitstatus_to_exitcode(status) == kernel.OUT_OF_TIME
            stopped = "cpu" if out_of_time else "memory" if self._group is not None and self._group.out_of_memory() else ""
        return {"exit": os.waitstatus_to_exitcode(status), "stopped": stopped, "cpu_s": cpu_s}

    def _wait(self, poller: select.poll, pause: float, pid: int) -> list[tuple[int, int]] | None:
        """Wait for events; None if the program's folder is full."""
        until, step = time.monotonic() + pause, pause if self._namespaces else DISK_LOOK_S
        while not (events := poller.poll(step * 1000)) and time.monotonic() < until:
            if self._usage.folder_is_full(lambda: self._members(pid)):
                return None
        return events

    def _members(self, pid: int) -> list[int]:
        if not self._namespaces:
            return list(dict.fromkeys([pid, *descendants()]))
        own = os.getpid()
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]  # noqa: PTH208


def descendants() -> list[int]:
    """Descendants of this process, orphans included: a subreaper inherits them."""
    found = _children(os.getpid())
    for process in found:
        found.extend(child for child in _children(process) if child not in found)
    return found


def _children(pid: int) -> list[int]:
    """Children of all threads of a process: a child belongs to the thread that forked it."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # ended meanwhile
        for thread in list_tasks(pid):
            with contextlib.suppress(OSError):
                found.extend(map(int, read_proc(pid, f"{thread}children").split()))
    return found


def _kill(processes: Iterable[int], how: int = signal.SIGKILL) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, how)


def kill_descendants() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while rest := descendants():
        _kill(rest)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of the program do not die: {rest}")
