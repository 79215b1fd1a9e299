"""Run a job inside a remote sandbox that can only run a Python program with a few files (`job.json` in, `outcome.json` out).

Uses the standard library only; see `rewards/code/backends.py`. The remote sandbox isolates programs from the outside world. Here each
program gets a process group, a folder, the job's limits, and a fresh interpreter that never had the tests in memory.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from roll_lite.sandbox.kernel import OUT_OF_TIME, PR_SET_DUMPABLE, memory_file, prctl

LOOK_S = 0.01
LINGER_S = 0.2
ORDER = 5
"""File descriptor from which a program's process reads what to run (see programs.py); the program gets 0 to 4."""
BOOT = f"""
import json, sys
sys.path.insert(0, sys.argv[1])
from roll_lite.sandbox.programs import run_program
del sys.path[0]
with open({ORDER}) as stream: order = json.load(stream)
run_program(order)
"""


def main(harness: str) -> None:
    """Run the job in `job.json` of the current folder and write `outcome.json`. `harness`: zip file with the package roll_lite.sandbox."""
    job = Path("job.json")
    asked = json.loads(job.read_text(encoding="utf-8"))
    job.unlink()  # contains the tests, which a program must not read
    with contextlib.suppress(OSError):
        prctl(PR_SET_DUMPABLE, 0)  # nor may it read this process's memory
    harness = str(Path(harness).resolve())
    outcome = _run_pair(asked, harness) if "tests" in asked else _Running(asked, harness).ended()
    Path("outcome.json").write_text(json.dumps(outcome), encoding="utf-8")


def _run_pair(asked: dict[str, Any], harness: str) -> dict[str, Any]:
    """Run a program and its tests. Returns the tests' outcome with the program's stderr and the CPU time of both."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program, tests = _Running(asked["program"], harness, ours.fileno()), _Running(asked["tests"], harness, theirs.fileno())
    said, ran = tests.ended(), program.ended(LINGER_S)
    stopped = said["stopped"] or ran["stopped"]
    return {**said, "stopped": stopped, "stderr": ran["stderr"], "cpu_s": said["cpu_s"] + ran["cpu_s"]}


class _Running:
    def __init__(self, asked: dict[str, Any], harness: str, peer: int = -1) -> None:
        self._limits = asked["limits"]
        self._output = {name: os.memfd_create("output") for name in ("stdout", "stderr", "result")}
        self._folder = tempfile.mkdtemp()
        self._started = time.monotonic()
        inputs = (base64.b64decode(asked["stdin"]), base64.b64decode(asked["artifact"]), json.dumps(asked["order"]).encode())
        stdin, artifact, order = map(memory_file, inputs)
        files = [stdin, *self._output.values(), peer if peer >= 0 else artifact, order]
        self._pid = os.fork()
        if self._pid == 0:
            self._become(files, harness, bool(asked["address_space"]))
        for file in (stdin, artifact, order):
            os.close(file)

    def _become(self, files: list[int], harness: str, address_space: bool) -> None:
        """Replace this process, whose memory contains the job, by a fresh interpreter."""
        try:
            os.setsid()
            for number, file in enumerate([os.dup2(file, 64 + place) for place, file in enumerate(files)]):
                os.dup2(file, number)
            os.closerange(len(files), 64 + len(files))
            os.chdir(self._folder)
            os.environ["HOME"] = os.environ["TMPDIR"] = self._folder
            self._set_limits(address_space)
            os.execv(sys.executable, [sys.executable, "-c", BOOT, harness])
        finally:
            os._exit(1)

    def _set_limits(self, address_space: bool) -> None:
        limits = self._limits
        for which, value in {
            resource.RLIMIT_AS if address_space else resource.RLIMIT_DATA: 2 * limits["memory_mb"] << 20,  # as in local sandboxes
            resource.RLIMIT_CPU: int(limits["cpu_s"]) + 1,
            resource.RLIMIT_FSIZE: max(limits["file_mb"] << 20, (limits["output_kb"] + 1) << 10),
            resource.RLIMIT_NOFILE: limits["open_files"],
            resource.RLIMIT_CORE: 0,
        }.items():
            resource.setrlimit(which, (value, value))

    def ended(self, patience: float | None = None) -> dict[str, Any]:
        """Wait for the process's end and return the outcome. The process is killed at its time limit (reported as "wall") or after
        `patience` seconds."""
        limits, stopped, most = self._limits, "", self._limits["output_kb"] * 1024
        until = min(self._started + limits["wall_s"], time.monotonic() + (limits["wall_s"] if patience is None else patience))
        while not (found := os.wait4(self._pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                stopped = "wall" if patience is None else ""
                os.killpg(self._pid, signal.SIGKILL)
                found = os.wait4(self._pid, 0)
                break
            time.sleep(LOOK_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # leftover processes
        shutil.rmtree(self._folder, ignore_errors=True)
        _, status, usage = found
        cpu_s, ended = usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status)
        said = {name: os.pread(file, most + 1, 0) for name, file in self._output.items()}
        stopped = stopped or ("cpu" if cpu_s > limits["cpu_s"] or ended == OUT_OF_TIME else "")
        stopped = stopped or ("output" if max(map(len, said.values())) > most else "")
        packed = {name: base64.b64encode(content[:most]).decode("ascii") for name, content in said.items()}
        return {"exit": ended, "stopped": stopped, "seconds": time.monotonic() - self._started, "cpu_s": cpu_s, **packed}
