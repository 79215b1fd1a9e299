"""What an engine's processes leave behind when they are killed."""

from __future__ import annotations

import subprocess
import sys

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
