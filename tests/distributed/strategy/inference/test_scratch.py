"""The folder of an engine's files goes with the engine or with its host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
