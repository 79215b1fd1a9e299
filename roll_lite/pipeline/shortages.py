"""Detect shortages of open files, shared memory or memory, before a run and after its failure; reserve resources to record its end."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from roll_lite.config.problems import Problem
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.session_guard import SHARED

LEAST_FILES = 512
"""Open files that a process of a small run may need."""
SPARE_FILES = 64
"""Files held open until a run ends: closing them lets the driver record the end if too many are open."""
SPARE_BYTES = 1 << 20
"""Bytes held in the run's folder until a run ends, to record the end on a full disk."""
LEAST_SHARED = 16 << 20
"""Bytes in /dev/shm that an engine needs for queues and semaphores."""


def check_machine(_config: RunConfig | None = None) -> Iterator[Problem]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ray raises the soft limit to this one
    if 0 <= files < LEAST_FILES:
        yield Problem("ulimit -n", f"a run needs {LEAST_FILES} or more open files; raise the hard limit (ulimit -Hn 65536)", files)
    free = shutil.disk_usage(SHARED).free
    if free < LEAST_SHARED:
        remedy = "remove files there, or enlarge it (mount -o remount,size=1G /dev/shm; docker run --shm-size=1g)"
        yield Problem(str(SHARED), f"{free >> 20} MiB are free and an engine needs {LEAST_SHARED >> 20} MiB; {remedy}")


class Shortages:
    """Finds shortages behind a failure; reserves open files and disk space for the run's end. Create it at the start."""

    def __init__(self, folder: Path) -> None:
        self._killed = killed_for_memory()
        self._spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE_FILES)]
        with suppress(OSError), TemporaryFile(dir=folder) as file:  # a full disk is told at the run's first file
            os.posix_fallocate(file.fileno(), 0, SPARE_BYTES)
            self._spare.append(os.dup(file.fileno()))

    def release(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def behind(self, error: Exception) -> str:
        """Return sentences on likely causes of a failure; "" without a sign of shortage."""
        found = ""
        if os.strerror(errno.EMFILE) in str(error):
            found += ". Processes may open too few files here: raise the limit (ulimit -n 65536) and start the run again"
        if shutil.disk_usage(SHARED).free < 1 << 20:
            found += f". {SHARED}, where Ray keeps objects, is full: remove files there, or enlarge it"
        if (killed := killed_for_memory() - self._killed) > 0:
            found += f". Memory was short: the kernel has killed {killed} processes on the driver's machine since the run's start"
        return found


def killed_for_memory() -> int:
    with suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(found[1])
    return 0
