"""The folder of an engine's files goes with the engine or with its host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_lite.distributed.session_guard import SHARED
from roll_lite.distributed.strategy.inference.scratch import Scratch

_HOST = """
import os
from pathlib import Path
from roll_lite.distributed.strategy.inference.scratch import Scratch

scratch = Scratch("rl-test-")
if os.fork() == 0:
    raise SystemExit  # which runs what is to run at the end of Python
os.wait()
print(scratch.path, Path(scratch.path).is_dir(), flush=True)
raise {error}
"""


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError", "SystemExit"])
def test_it_goes_with_a_host_that_does_not_shut_down_but_not_with_a_fork(error: str) -> None:
    done = subprocess.run([sys.executable, "-c", _HOST.format(error=error)], capture_output=True, text=True, check=False)
    path, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(path).exists()


def test_it_is_removed_once() -> None:
    scratch = Scratch("rl-test-")
    scratch.remove()
    Path(scratch.path).mkdir()
    scratch.remove()
    assert Path(scratch.path).is_dir()
    Path(scratch.path).rmdir()


_WAITS = """
import multiprocessing, os, signal
from roll_lite.distributed.strategy.inference.scratch import Scratch

scratch = Scratch("rl-test-")
with scratch.inherited():
    lock = multiprocessing.get_context("spawn").Lock()
outside = multiprocessing.get_context("spawn").Lock()
assert outside._semlock.name.startswith("/mp-"), outside._semlock.name
print(scratch.path, flush=True)
from multiprocessing.resource_tracker import _resource_tracker
if not {tracked}:
    os.kill(_resource_tracker._pid, signal.SIGKILL)
    os.unlink("/dev/shm/sem." + outside._semlock.name[1:])
signal.pause()
"""


def test_that_of_a_host_that_was_killed_goes_when_the_next_engine_starts(tmp: Path) -> None:
    """Nothing of its engine was there yet to take it away. Those of other hosts that live stay, whoever made them."""
    environment = {**os.environ, "TMPDIR": str(tmp)}
    programs = [_WAITS.format(tracked=tracked) for tracked in (False, True)]
    hosts = [subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) for program in programs]
    try:
        killed, other = (Path(host.stdout.readline().strip()) for host in hosts if host.stdout is not None)
        assert semaphores(killed) and semaphores(other)
        hosts[0].kill()
        hosts[0].wait()
        (tmp / "rl-test-of-another-make").mkdir()
        assert killed.is_dir() and other.is_dir()
        run = subprocess.run([sys.executable, "-c", _HOST.format(error="SystemExit")], env=environment, check=True, capture_output=True)
        assert b"True" in run.stdout
        assert sorted(tmp.glob("rl-test-*")) == sorted([other, tmp / "rl-test-of-another-make"])
        assert not semaphores(killed) and semaphores(other)
    finally:
        hosts[1].kill()
        hosts[1].wait()


def semaphores(folder: Path) -> list[Path]:
    return list(SHARED.glob(f"sem.{folder.name}-*"))
