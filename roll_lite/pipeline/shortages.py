"""Detect shortages of open files, shared memory or memory, before a run and after its failure; reserve resources to record its end."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from roll_lite.config.problems import Problem
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.session_guard import SHARED

if TYPE_CHECKING:  # ray takes seconds to import, and `check` needs none
    import ray

    from roll_lite.distributed.place import Place

LEAST_FILES = 512
"""Open files that a process of a small run may need."""
SPARE_FILES = 64
"""Files held open until a run ends, so that the driver can then record the end."""
SPARE_BYTES = 1 << 20
"""The same for a full disk: bytes held in the run's folder."""
LEAST_SHARED = 16 << 20
"""Bytes in /dev/shm that an engine needs for queues and semaphores."""
ASK_SECONDS = 5.0


def check_machine(_config: RunConfig | None = None) -> Iterator[Problem]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ray raises the soft limit to this one
    if 0 <= files < LEAST_FILES:
        yield Problem("ulimit -n", f"a run needs {LEAST_FILES} or more open files; raise the hard limit (ulimit -Hn 65536)", files)
    free = shutil.disk_usage(SHARED).free
    if free < LEAST_SHARED:
        remedy = "remove files there, or enlarge it (mount -o remount,size=1G /dev/shm; docker run --shm-size=1g)"
        yield Problem(str(SHARED), f"{free >> 20} MiB are free and an engine needs {LEAST_SHARED >> 20} MiB; {remedy}")


class Shortages:
    """Finds shortages behind a failure; reserves open files and disk space for the run's end."""

    def __init__(self, folder: Path) -> None:
        self._killed = killed_for_memory()
        self._others: dict[str, tuple[str, ray.ObjectRef]] = {}
        """{node: (address, its `signs` at the start)}, without the driver's."""
        self._spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE_FILES)]
        with suppress(OSError), TemporaryFile(dir=folder) as file:  # a full disk is told at the run's first file
            os.posix_fallocate(file.fileno(), 0, SPARE_BYTES)
            self._spare.append(os.dup(file.fileno()))

    def watch(self, places: Iterable[Place]) -> None:
        import ray

        if not ray.is_initialized():
            return
        here = ray.get_runtime_context().get_node_id()
        addresses = {place.node: place.address for place in places if place.node != here}
        self._others = {node: (address, self._ask(node)) for node, address in addresses.items()}

    def release(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def behind(self, error: Exception) -> str:
        """Return sentences on likely causes of a failure; "" without a sign of shortage."""
        found = ""
        if os.strerror(errno.EMFILE) in str(error):
            found += ". Processes may open too few files here: raise the limit (ulimit -n 65536) and start the run again"
        places = [("the driver's machine", killed_for_memory() - self._killed, shutil.disk_usage(SHARED).free)]
        with suppress(Exception):  # Ray may have ended
            places += self._elsewhere()
        for where, killed, free in places:
            if free < 1 << 20:
                found += f". {SHARED}, where Ray keeps objects, is full on {where}: remove files there, or enlarge it"
            if killed > 0:
                found += f". Memory was short: the kernel has killed {killed} processes on {where} since the run's start"
        return found

    def _ask(self, node: str) -> ray.ObjectRef:
        import ray

        from roll_lite.distributed.place import on_node

        return ray.remote(signs).options(num_cpus=0, scheduling_strategy=on_node(node)).remote()

    def _elsewhere(self) -> Iterator[tuple[str, int, int]]:
        """Yield (address, processes killed since the start, free bytes) of other nodes that answer."""
        import ray
        from ray.exceptions import RayError

        if not self._others or not ray.is_initialized():
            return
        asked = [(address, before, self._ask(node)) for node, (address, before) in self._others.items()]
        ray.wait([now for *_, now in asked], num_returns=len(asked), timeout=ASK_SECONDS)
        for address, before, now in asked:
            with suppress(RayError):  # no answer
                (killed_before, _), (killed, free) = ray.get([before, now], timeout=0)
                yield address, killed - killed_before, free


def signs() -> tuple[int, int]:
    """Return (processes that the kernel killed for memory, free bytes in /dev/shm)."""
    return killed_for_memory(), shutil.disk_usage(SHARED).free


def killed_for_memory() -> int:
    with suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(found[1])
    return 0
