from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from roll_lite.sandbox.cgroup import remove_group
from roll_lite.sandbox.kernel import KILL, memory_file, read_line

ROOT = str(Path(__file__).resolve().parents[2])
BOOT = """
import sys
sys.path[0] = sys.argv[1]  # instead of the current folder
import json
from roll_lite.sandbox.zygote import main
settings = json.loads(sys.argv[2])
main(settings["control"], settings)
"""
START_S = 60.0
GRACE_S = 10.0
LINGER_S = 0.2
START_ATTEMPTS = 3
"""Attempts to start a sandbox: a loaded machine may be slow, or lack namespaces until the kernel removes old ones."""


class SandboxTrouble(Exception):
    """Failure to run a program. `suspected`: the program may be the cause."""

    def __init__(self, cause: str, suspected: bool = False) -> None:
        super().__init__(cause)
        self.suspected = suspected


class SandboxDied(SandboxTrouble):
    """Error: the sandbox died or stopped answering. A retry shows whether the program is the cause."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program, for all its processes together unless stated otherwise."""

    cpu_s: float = 5.0
    wall_s: float = 15.0
    memory_mb: int = 512
    """Memory of all processes, each of which may reserve twice as much address space."""
    output_kb: int = 1024
    file_mb: int = 16
    folder_mb: int = 64
    processes: int = 64
    """Processes and threads besides the first."""
    open_files: int = 64
    """Maximum open files per process. Low, because socket buffers are charged to no process."""


@dataclass(frozen=True)
class Program:
    """Program to run. `order`: its kind and arguments, see `MODES` in programs.py."""

    order: dict[str, Any]
    stdin: bytes = b""
    artifact: bytes = b""
    """Compiled program, passed as file descriptor 4."""
    address_space: bool = True
    limits: Limits = field(default_factory=Limits)


HARMLESS = Program({"kind": "script", "source": ""})


@dataclass(frozen=True)
class Pair:
    program: Program
    tests: Program


@dataclass(frozen=True)
class Outcome:
    exit: int
    """Exit status, or minus the signal's number."""
    stopped: str
    """Limit that ended the program: cpu, wall, memory, processes, output, sandbox (the program ended its sandbox), or ""."""
    stdout: bytes
    stderr: bytes
    result: bytes
    """Output of the program to file descriptor 3."""
    seconds: float
    cpu_s: float


Ended: TypeAlias = Outcome | SandboxTrouble


REQUIRED = {
    "files": "programs could read and write the user's files",
    "network": "programs could open connections",
    "processes": "programs could see or signal other processes, or outlive their test",
}
OPTIONAL = {"system calls": "more of the kernel is within reach", "users": "programs run as the user who started this"}
ALWAYS = "CPU time, memory, processes, size of files and folder, open files, output and wall-clock time limited; clean environment"


@dataclass(frozen=True)
class Protections:
    kind: str
    held: dict[str, str]
    why_not: Sequence[str] = ()
    counted: Sequence[str] = ()
    """Resources that a control group counts exactly; others are sampled about twenty times a second."""

    @property
    def missing(self) -> list[str]:
        return [name for name in REQUIRED if not self.held.get(name)]

    def describe(self) -> str:
        holds = "; ".join(f"{name}: {by}" for name, by in self.held.items())
        lacks = "; ".join(f"{name} ({what})" for name, what in {**REQUIRED, **OPTIONAL}.items() if not self.held.get(name))
        reasons = f" [{'; '.join(self.why_not)}]" if self.why_not else ""
        counted = f" ({', '.join(self.counted)} by a control group)" if self.counted else ""
        return f"holds: {holds or 'nothing'}; limits: {ALWAYS}{counted}. missing: {lacks or 'nothing'}{reasons}"

    def refuse_missing(self, allowed: bool, place: str = "reward code") -> None:
        if self.missing and not allowed:
            raise ValueError(
                f"{place}: this machine cannot isolate programs: {self.describe()}. "
                "Run where user namespaces or landlock and seccomp are available, use a remote sandbox (reward code: backend: {url: ...}), "
                "or accept the risk with allow_unprotected: true"
            )


class Sandbox:
    """Preloaded interpreter (zygote.py) that runs programs, one at a time."""

    def __init__(self, walls: str = "namespaces", readable: Sequence[str] = (), python_path: Sequence[str] = ()) -> None:
        """`walls`: strongest isolation to try. `readable`: further folders that programs may read; `python_path`: also for imports."""
        self._settings: dict[str, Any] = {
            "walls": walls,
            "readable": [*readable, *python_path],
            "python_path": list(python_path),
            "control_group": True,
            # Without walls, an outer sandbox isolates programs, which then use the environment of its image.
            "environment": dict(os.environ) if walls == "none" else {"PATH": "/usr/local/bin:/usr/bin:/bin"},
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._running: tuple[Program, list[int], float] | None = None
        self._companion: Sandbox | None = None
        self._group = ""
        self.protections: Protections | None = None

    def start(self) -> Protections:
        self.close()
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as said, theirs:
            command = [getattr(sys, "_base_executable", "") or sys.executable, "-s", "-S", "-B", "-c", BOOT]
            settings = json.dumps(self._settings | {"control": theirs.fileno()})
            try:
                self._process = subprocess.Popen(
                    [*command, ROOT, settings],
                    pass_fds=[theirs.fileno()],
                    env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                )
            except OSError as error:
                ours.close()
                raise SandboxTrouble(f"no interpreter can be started: {error}") from error
            theirs.close()
            self._line = ours
            try:
                hello = self._hear(START_S)
            except SandboxTrouble as trouble:
                self._process.kill()
                self.close()
                said.seek(0)
                last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise SandboxTrouble(f"the sandbox does not start: {'; '.join(filter(None, [str(trouble), last]))}") from trouble
        self._group = hello.pop("group")
        self.protections = Protections(**hello)
        return self.protections

    def begin(self, program: Program, peer: int = -1) -> None:
        """Start a program; `fileno()` becomes readable at its end. `peer`: socket passed as file descriptor 4."""
        self.ensure_started()
        assert self._line is not None
        limits = program.limits
        ordered = {
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": max(limits.file_mb << 20, (limits.output_kb + 1) << 10),
            "folder_bytes": limits.folder_mb << 20,
            "folder_files": 4096,
            "processes": limits.processes,
            "open_files": limits.open_files,
            "address_space": program.address_space,
        }
        files = [memory_file(json.dumps(program.order).encode()), memory_file(program.stdin), memory_file(), memory_file(), memory_file()]
        if program.artifact:
            files.append(memory_file(program.artifact))
        sent = files if peer < 0 else [*files, peer]
        self._running = (program, files, time.monotonic() + limits.wall_s + GRACE_S)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))
        try:
            self._line.sendmsg([json.dumps(ordered).encode()], [rights])
        except OSError as error:
            self._forget()
            raise SandboxDied(f"the sandbox died: {error}") from error

    def finish(self, patience: float | None = None) -> Outcome:
        """Wait for the program's end; kill it after `patience` seconds. SandboxTrouble if the sandbox does not report the end."""
        assert self._running is not None and self._line is not None
        program, files, deadline = self._running
        try:
            if patience is not None and not select.select([self._line], [], [], patience)[0]:
                self.order(KILL)
                deadline = min(deadline, time.monotonic() + GRACE_S)
            report = self._hear(max(0.1, deadline - time.monotonic()))
            if "trouble" in report:
                raise SandboxTrouble(f"the program could not be started: {report['trouble']}")
            most = program.limits.output_kb * 1024
            stdout, stderr, result = (os.pread(file, most, 0) for file in files[2:5])
            stopped = report["stopped"] or ("output" if max(os.fstat(file).st_size for file in files[2:5]) > most else "")
            return Outcome(report["exit"], stopped, stdout, stderr, result, report["seconds"], report["cpu_s"])
        except SandboxTrouble:
            self.close()
            raise
        finally:
            self._forget()

    def order(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # `finish` notices a dead sandbox
            if self._line is not None:
                self._line.send(what)

    def printed(self) -> bytes:
        assert self._running is not None
        program, (_, _, stdout, *_), _ = self._running
        most = program.limits.output_kb * 1024
        return os.pread(stdout, most, max(0, os.fstat(stdout).st_size - most))

    def run(self, program: Program) -> Outcome:
        self.begin(program)
        return self.finish()

    def fileno(self) -> int:
        assert self._line is not None
        return self._line.fileno()

    @property
    def companion(self) -> Sandbox:
        if self._companion is None:
            self._companion = Sandbox()
            self._companion._settings = self._settings
        return self._companion

    @property
    def deadline(self) -> float:
        return self._running[2] if self._running else 0.0

    def close(self) -> None:
        self._forget()
        if self._companion is not None:
            self._companion.close()
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._group:
            remove_group(self._group)
            self._group = ""

    def ensure_started(self) -> None:
        """Start the sandbox unless it runs. SandboxTrouble if it does not start, or lacks a protection it had before."""
        if self._running is not None:  # the wait for an earlier program was interrupted
            self.close()
        if self._line is not None and self._process is not None and self._process.poll() is None:
            return
        before = self.protections
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                now = self.start()
                if before is None or not (lost := [name for name in now.missing if name not in before.missing]):
                    return
                self.close()
                self.protections = before
                raise SandboxTrouble(f"the sandbox was started again without protections that it had: {', '.join(lost)}")
            except SandboxTrouble:
                if attempt == START_ATTEMPTS:
                    raise

    def _forget(self) -> None:
        if self._running is not None:
            for file in self._running[1]:
                os.close(file)
            self._running = None

    def _hear(self, seconds: float) -> dict[str, Any]:
        try:
            heard = read_line(self.fileno(), time.monotonic() + seconds)
        except TimeoutError as error:
            raise SandboxDied(f"no word from the sandbox within {seconds:g} s") from error
        except OSError as error:
            raise SandboxDied(f"no word from the sandbox: {error}") from error
        if not heard.endswith(b"\n"):
            raise SandboxDied("the sandbox died")
        return dict(json.loads(heard))


def ended_its_sandbox(job: Program | Pair) -> Outcome:
    limits = job.limits if isinstance(job, Program) else job.program.limits
    return Outcome(-signal.SIGKILL, "sandbox", b"", b"", b"", limits.wall_s, limits.cpu_s)


class SandboxPool:
    def __init__(self, size: int = 1, allow_unprotected: bool = False, **settings: Any) -> None:
        self._sandboxes = [Sandbox(**settings) for _ in range(size)]
        self._allow_unprotected = allow_unprotected

    def start(self) -> Protections:
        """Start all sandboxes. ValueError if required protections are missing, unless `allow_unprotected`."""
        try:
            protections, *_ = [sandbox.start() for sandbox in self._sandboxes]
            protections.refuse_missing(self._allow_unprotected)
        except (SandboxTrouble, ValueError):
            self.close()
            raise
        return protections

    def describe(self) -> str:
        protections = self._sandboxes[0].protections
        return protections.describe() if protections is not None else "not started"

    def run(self, job: Program | Pair) -> Outcome:
        sandbox = self._sandboxes[0]
        self._begin(sandbox, job)
        return self._finish(sandbox, job)

    def run_many(self, jobs: Sequence[Program | Pair]) -> list[Ended]:
        outcomes: list[Ended] = [SandboxTrouble("not run")] * len(jobs)
        waiting = list(enumerate(jobs))[::-1]
        free, busy = list(self._sandboxes), dict[int, tuple[Sandbox, int]]()
        while waiting or busy:
            while waiting and free:
                sandbox, (place, job) = free.pop(), waiting.pop()
                try:
                    busy[self._begin(sandbox, job).fileno()] = sandbox, place
                except SandboxTrouble as trouble:
                    outcomes[place] = trouble
                    free.append(sandbox)
            for file in self._ended(busy):
                sandbox, place = busy.pop(file)
                try:
                    outcomes[place] = self._finish(sandbox, jobs[place])
                except SandboxDied:
                    outcomes[place] = self._once_more(jobs[place], sandbox)
                except SandboxTrouble as trouble:
                    outcomes[place] = trouble
                free.append(sandbox)
        return outcomes

    def _begin(self, sandbox: Sandbox, job: Program | Pair) -> Sandbox:
        """Start a job and return the sandbox to wait for. A Pair (a program, and tests that talk to it over a socket) runs in two
        sandboxes, and ends with its tests."""
        if isinstance(job, Program):
            sandbox.begin(job)
            return sandbox
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                for one in (sandbox, sandbox.companion):  # both before the program's wall-clock limit runs
                    one.ensure_started()
                sandbox.begin(job.program, ours.fileno())
                sandbox.companion.begin(job.tests, theirs.fileno())
            except SandboxTrouble:
                sandbox.close()
                raise
        return sandbox.companion

    def _finish(self, sandbox: Sandbox, job: Program | Pair) -> Outcome:
        if isinstance(job, Program):
            return sandbox.finish()
        try:
            said = sandbox.companion.finish()
            ran = sandbox.finish(LINGER_S)
        except SandboxTrouble:
            sandbox.close()
            raise
        return replace(said, stopped=said.stopped or ran.stopped, stderr=ran.stderr, cpu_s=said.cpu_s + ran.cpu_s)

    def _once_more(self, job: Program | Pair, sandbox: Sandbox) -> Ended:
        """Retry a job whose sandbox died. If it dies again but can run a harmless program, the job is the cause."""
        try:
            self._begin(sandbox, job)
            return self._finish(sandbox, job)
        except SandboxDied as death:
            try:
                sandbox.run(HARMLESS)
            except SandboxTrouble:
                return death
            return ended_its_sandbox(job)
        except SandboxTrouble as trouble:
            return trouble

    def _ended(self, busy: dict[int, tuple[Sandbox, int]]) -> list[int]:
        if not busy:
            return []
        patience = min(sandbox.deadline for sandbox, _ in busy.values()) - time.monotonic()
        poller = select.poll()
        for file in busy:
            poller.register(file, select.POLLIN)
        heard = [file for file, _ in poller.poll(max(0.0, patience) * 1000)]
        late = [file for file, (sandbox, _) in busy.items() if sandbox.deadline <= time.monotonic()]
        return list(dict.fromkeys([*heard, *late]))

    def close(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()
