"""Runs jobs inside somebody else's sandbox, of which nothing is asked but to run a Python program with a few files (`job.json` in,
`outcome.json` out). With the standard library alone; for SandboxFusion see `rewards/sandbox_fusion.py`.

How well a program is kept apart from the rest of the world is for that sandbox to say. Within it a program has its own process group and
folder and the job's limits; whatever may do as it likes there could write its own outcome.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_lite.sandbox.programs import run_program

PR_SET_DUMPABLE = 4
LOOK_S = 0.01


def main() -> None:
    """The job, from and to files in the current folder."""
    job = Path("job.json")
    asked = json.loads(job.read_text(encoding="utf-8"))
    job.unlink()  # a program that could read it would read the tests
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # nor from this process's memory
    outcome = _run_pair(asked) if "tests" in asked else _Running(asked).ended()
    Path("outcome.json").write_text(json.dumps(outcome), encoding="utf-8")


def _run_pair(asked: dict[str, Any]) -> dict[str, Any]:
    """What the tests say, with the program's time."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program, tests = _Running(asked["program"], ours.fileno()), _Running(asked["tests"], theirs.fileno())
    said, ran = tests.ended(), program.ended()
    stopped = said["stopped"] or ran["stopped"]
    return {**said, "stopped": stopped, "stderr": ran["stderr"], "cpu_s": said["cpu_s"] + ran["cpu_s"]}


@dataclass
class _Output:
    stdout: int
    stderr: int
    result: int

    def read(self, most: int) -> dict[str, str]:
        return {name: base64.b64encode(os.pread(file, most, 0)).decode("ascii") for name, file in vars(self).items()}

    def longest(self) -> int:
        return max(os.fstat(file).st_size for file in vars(self).values())


class _Running:
    """One program, started."""

    def __init__(self, asked: dict[str, Any], peer: int = -1) -> None:
        self._limits = asked["limits"]
        self._output = _Output(*(os.memfd_create("output") for _ in range(3)))
        self._folder = tempfile.mkdtemp()
        self._started = time.monotonic()
        stdin, artifact = (_memory_file(base64.b64decode(asked[name])) for name in ("stdin", "artifact"))
        files = [stdin, *vars(self._output).values(), peer if peer >= 0 else artifact]
        self._pid = os.fork()
        if self._pid == 0:
            self._become(asked, files)
        os.close(stdin)
        os.close(artifact)

    def _become(self, asked: dict[str, Any], files: list[int]) -> None:
        try:
            os.setsid()
            high = [os.dup2(file, 64 + place) for place, file in enumerate(files)]
            for number, file in enumerate(high):
                os.dup2(file, number)
            os.closerange(len(files), 64 + len(files))
            os.chdir(self._folder)
            os.environ["HOME"] = os.environ["TMPDIR"] = self._folder
            tempfile.tempdir = None  # told from the environment once more
            self._set_limits(bool(asked["address_space"]))
            run_program(asked["order"])
        finally:
            os._exit(1)

    def _set_limits(self, address_space: bool) -> None:
        limits = self._limits
        for which, value in {
            resource.RLIMIT_AS if address_space else resource.RLIMIT_DATA: limits["memory_mb"] << 20,
            resource.RLIMIT_CPU: int(limits["cpu_s"]) + 1,
            resource.RLIMIT_FSIZE: max(limits["file_mb"] << 20, (limits["output_kb"] + 1) << 10),
            resource.RLIMIT_NOFILE: limits["open_files"],
            resource.RLIMIT_CORE: 0,
        }.items():
            resource.setrlimit(which, (value, value))

    def ended(self) -> dict[str, Any]:
        """Wait for its end, or for its time to be up."""
        limits, stopped, most = self._limits, "", self._limits["output_kb"] * 1024
        while not (found := os.wait4(self._pid, os.WNOHANG))[0]:
            if time.monotonic() - self._started > limits["wall_s"]:
                stopped = "wall"
                os.killpg(self._pid, signal.SIGKILL)
                found = os.wait4(self._pid, 0)
                break
            time.sleep(LOOK_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # what it has left running
        shutil.rmtree(self._folder, ignore_errors=True)
        _, status, usage = found
        cpu_s = usage.ru_utime + usage.ru_stime
        stopped = stopped or ("cpu" if cpu_s > limits["cpu_s"] else "output" if self._output.longest() > most else "")
        plain = {"exit": os.waitstatus_to_exitcode(status), "stopped": stopped, "seconds": time.monotonic() - self._started, "cpu_s": cpu_s}
        return plain | self._output.read(most)


def _memory_file(content: bytes) -> int:
    file = os.memfd_create("input")
    os.write(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    return file
