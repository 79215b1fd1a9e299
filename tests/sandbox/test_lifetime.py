"""Who starts a sandbox, and what is left when one of those who take part in it dies."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from sandbox.running import PATIENT, run

from roll_lite.sandbox import pool as pool_module
from roll_lite.sandbox.pool import Program, Sandbox, SandboxPool, SandboxTrouble
from roll_lite.sandbox.zygote import Zygote

LONG_S = 60.0
DAEMONS = """
import os, threading, time
open('left', 'w').write('x')
def start():
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(500)
            os._exit(0)
        os.wait()
thread = threading.Thread(target=start)
thread.start()
start()
time.sleep(500)
"""
SLEEPERS = 5
OWNER = """
    import sys, time
    from sandbox.running import PATIENT
    from roll_lite.sandbox.pool import Program, Sandbox
    sandbox = Sandbox(sys.argv[1])
    sandbox.start()
    sandbox.begin(Program({"kind": "script", "source": sys.argv[2]}, limits=PATIENT))
    time.sleep(500)
"""


def family_of(pid: int, at_least: int) -> list[psutil.Process]:
    """Once it has stopped growing."""
    deadline = time.monotonic() + LONG_S
    while True:
        found = psutil.Process(pid).children(recursive=True)
        time.sleep(0.3)
        if len(found) >= at_least and found == psutil.Process(pid).children(recursive=True):
            return found
        assert time.monotonic() < deadline, found


def folders_of(family: list[psutil.Process]) -> set[Path]:
    """As seen from here; behind a mount namespace there are none."""
    named = {Path(process.cwd()) for process in family if process.is_running()}
    return {folder for folder in named if folder.parent.name.startswith("code-")}


def test_a_killed_owner_leaves_nothing(sandbox: Sandbox) -> None:
    kind = str(sandbox._settings["walls"])
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    owner = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{textwrap.dedent(OWNER)}", kind, DAEMONS], stdin=subprocess.DEVNULL
    )
    try:
        family = family_of(owner.pid, 2 + SLEEPERS)
        folders = folders_of(family)
        assert kind == "namespaces" or any((folder / "left").exists() for folder in folders)
    finally:
        owner.kill()
        owner.wait()
    assert not psutil.wait_procs(family, timeout=LONG_S)[1]
    assert not any(folder.parent.exists() for folder in folders)


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_killed_interpreter_is_replaced_and_leaves_nothing(sandbox: Sandbox, which: str) -> None:
    """Two of its processes are trusted: the one that was started, and its child that forks the programs."""
    other = Sandbox(str(sandbox._settings["walls"]))
    try:
        other.start()
        assert other._process is not None
        outer = psutil.Process(other._process.pid)
        other.begin(Program({"kind": "script", "source": DAEMONS}, limits=PATIENT))
        family = family_of(outer.pid, 1 + SLEEPERS)
        folders = folders_of(family)
        (outer if which == "outer" else outer.children()[0]).kill()
        with pytest.raises(SandboxTrouble):
            other.finish()
        assert not psutil.wait_procs(family, timeout=LONG_S)[1]
        assert not any(folder.parent.exists() for folder in folders)
        assert run(other, "print(1)", PATIENT).stdout == b"1\n"
    finally:
        other.close()


def test_a_sandbox_outlives_the_thread_that_started_it(sandbox: Sandbox) -> None:
    """The kernel counts the end of that thread as the death of the parent."""
    from concurrent.futures import ThreadPoolExecutor

    other = Sandbox(str(sandbox._settings["walls"]))
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(other.start).result()
        assert other._process is not None
        before = other._process.pid
        assert run(other, "print(1)", PATIENT).stdout == b"1\n"
        assert other._process.pid == before
    finally:
        other.close()


def test_starting_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_S", 0.5)
    monkeypatch.setattr(pool_module, "BOOT", "import time; time.sleep(500)")
    before = psutil.Process().children()
    with pytest.raises(SandboxTrouble, match=r"the sandbox does not start: no word from the sandbox within 0.5 s"):
        SandboxPool(2).start()
    assert len(psutil.Process().children()) == len(before)


def test_folders_of_programs_go_while_others_run() -> None:
    """They do not gather."""
    sandbox = Sandbox("landlock")
    try:
        if sandbox.start().kind != "landlock":
            pytest.skip("not on this platform")
        places = [
            Path(run(sandbox, "import os\nos.makedirs('a/b', 0)\nprint(os.getcwd())", PATIENT).stdout.decode().strip()) for _ in range(9)
        ]
        home, deadline = places[0].parent, time.monotonic() + LONG_S
        assert home.name.startswith("code-") and not any(place.exists() for place in places)
        while list(home.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not list(home.iterdir())
    finally:
        sandbox.close()
    assert not home.exists()


def test_a_failed_fork_leaves_no_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise BlockingIOError("no more processes")

    zygote = object.__new__(Zygote)
    zygote._namespaces, zygote._usage = False, mock.Mock()
    monkeypatch.setattr(zygote, "_folder", lambda: contextlib.nullcontext(""))
    monkeypatch.setattr(os, "fork", fails)
    before = psutil.Process().num_fds()
    with pytest.raises(BlockingIOError):
        zygote._run({}, [])
    assert psutil.Process().num_fds() == before
