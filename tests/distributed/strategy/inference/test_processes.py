"""Which ends of processes are an engine's end, and what killed ones leave behind."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from roll_lite.distributed.strategy.inference.processes import EngineProcesses, shared_memory

MAPS = """
from multiprocessing import resource_tracker, shared_memory

memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")  # as if its tracker had been killed with it
print("ready", flush=True)
input()
"""


def test_shared_memory_of_killed_processes_is_gone_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", MAPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        (file,) = shared_memory(process.pid)
        processes = EngineProcesses()
        processes.watch([process.pid])
        assert file.exists()
        processes.kill()
        assert not file.exists()
        processes.kill()  # once more, of processes that are gone
        assert process.wait(10) < 0


HAS_CHILD = """
import subprocess, sys

child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
child.wait()
input()
"""
WAITS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize(
    ("child", "needed"),
    [(WAITS, True), ([*WAITS, "torch/_inductor/compile_worker/__main__.py", "--workers=2"], False), (["sleep", "60"], False)],
    ids=["worker", "idle compile worker", "compiler"],
)
def test_an_engine_runs_on_when_a_helper_ends(child: list[str], needed: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", HAS_CHILD, *child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        started = psutil.Process(int(engine.stdout.readline()))
        processes = EngineProcesses()
        processes.watch([engine.pid])
        assert processes.running()
        started.kill()
        psutil.wait_procs([started], 10)
        assert processes.running() is not needed
        engine.kill()
        engine.wait(10)
        assert not processes.running()
