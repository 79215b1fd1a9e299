"""What an engine leaves behind, by what the operating system says: processes, files of shared memory, folders."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

GONE_S = 10.0
"""Seconds until the last is gone; those of Python's resource trackers among them."""
_SHARED = Path("/dev/shm")


class Traces:
    """Of all that is started with `folder` for its temporary folder. Other engines may run beside it, in other processes too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._shared = set(_SHARED.iterdir())
        self._children = set(psutil.Process().children(recursive=True))

    def processes(self) -> list[psutil.Process]:
        """Children of this process that were not there before, and whoever inherited the folder, even from a parent that is gone."""
        new = set(psutil.Process().children(recursive=True)) - self._children
        inherited = {process for process in psutil.process_iter() if self._inherited(process)}
        return [process for process in new | inherited if _runs(process) and not _serves_this_process(process)]

    def shared(self) -> list[Path]:
        """New ones that no process uses: what others have made meanwhile, they use, or it goes with a folder of theirs, as the semaphores
        of an engine that a run has lost."""
        new = set(_SHARED.iterdir()) - self._shared
        unused = new - _in_use() if new else set()
        return sorted(path for path in unused if not self._is_of_others(path))

    def _is_of_others(self, path: Path) -> bool:
        """Called after a folder that is somebody's who lives: of an engine, or in that of a run."""
        name = path.name.removeprefix("sem.").rpartition("-")[0]
        places = os.walk("/tmp") if name.startswith("rl-") else ()  # which passes over what goes meanwhile
        found = [Path(place) / name for place, folders, _ in places if name in folders]
        return any(_is_lived_in(one) or _is_lived_in(one.parent) for one in found if not one.is_relative_to(self._folder))

    def folders(self) -> list[Path]:
        return sorted(self._folder.glob("rl-*"))

    def all(self) -> list[object]:
        return [*self.processes(), *self.shared(), *self.folders()]

    def assert_none(self) -> None:
        _assert_gone(self.all)

    def assert_nothing_shared(self) -> None:
        _assert_gone(self.shared)

    def _inherited(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TMPDIR", "").startswith(str(self._folder))
        except psutil.Error:
            return False


def _assert_gone(found: Callable[[], Sequence[object]]) -> None:
    deadline = time.monotonic() + GONE_S
    while found() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = found()
    assert not left, left


@contextmanager
def nothing_left_behind(folder: Path) -> Iterator[Traces]:
    """By engines that are started and ended inside."""
    traces = Traces(folder)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield traces
    finally:
        tempfile.tempdir = before
    traces.assert_none()


def _in_use() -> set[Path]:
    """Files of shared memory that some process has mapped."""
    found = set()
    for pid in psutil.pids():
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {_SHARED}/" in line}
    return found


def _is_lived_in(folder: Path) -> bool:
    """By an engine's processes, whose temporary folder it is, or a run's guard, which has been told of it."""
    for process in psutil.process_iter() if folder != Path("/tmp") else ():
        try:
            if str(folder) in process.cmdline() or Path(process.environ().get("TMPDIR", "/")).is_relative_to(folder):
                return True
        except psutil.Error:
            continue
    return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _serves_this_process(process: psutil.Process) -> bool:
    """Python's resource tracker, and the sender that a session's engines share."""
    try:
        return process.ppid() == os.getpid() and ("resource_tracker" in " ".join(process.cmdline()) or process.pid in _multiprocessing())
    except psutil.NoSuchProcess:
        return True


def _multiprocessing() -> set[int | None]:
    from engine_harness import SenderProcess

    shared = SenderProcess._shared
    return {shared.process.pid} if shared is not None else set()
