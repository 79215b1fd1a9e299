from __future__ import annotations

import fcntl
import multiprocessing
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from roll_lite.distributed.session_guard import remove_folder
from roll_lite.files import changed_environment

SCRATCH = "ROLL_LITE_ENGINE_SCRATCH"
_LOCK = ".host"
_LONGEST_BASE = 50  # socket paths have at most 107 bytes, and engines append up to 36


class Scratch:
    """Temporary folder of an engine: sockets, rendezvous files, semaphores, caches. Removed at shutdown or, if the hosting process is
    killed, by the engine's processes or the next engine."""

    def __init__(self, prefix: str, *variables: str) -> None:
        """`variables`: environment variables that get the path besides TMPDIR."""
        self._variables = ("TMPDIR", SCRATCH, *variables)
        base = tempfile.gettempdir()
        base = base if len(base) <= _LONGEST_BASE else "/tmp"
        for folder in Path(base).glob(f"{prefix}*"):
            _clear_if_abandoned(folder)
        lock = None
        while lock is None:
            self.path = tempfile.mkdtemp(prefix=prefix, dir=base)
            lock = _locked(self.path)
        self.remove = weakref.finalize(self, _remove_in, os.getpid(), self.path, lock)

    @contextmanager
    def inherited(self) -> Iterator[None]:
        prefix = _call_semaphores(f"/{Path(self.path).name}")
        try:
            with changed_environment(dict.fromkeys(self._variables, self.path)):
                yield
        finally:
            _call_semaphores(prefix)


def _remove_in(pid: int, path: str, lock: int) -> None:
    """Remove the folder in the process that made it: forks inherit this finalizer."""
    if os.getpid() == pid:
        remove_folder(Path(path))
        os.close(lock)


def _locked(path: str) -> int | None:
    """Return the lock's descriptor; None if another process has just removed the folder."""
    try:
        lock = os.open(f"{path}/{_LOCK}", os.O_CREAT | os.O_RDWR, 0o600)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # on file systems without locks, no folder counts as abandoned
        fcntl.flock(lock, fcntl.LOCK_EX)
    if not Path(path).exists():
        os.close(lock)
        return None
    return lock


def _clear_if_abandoned(folder: Path) -> None:
    with suppress(OSError):  # another user's folder, already removed, or locked by a living host
        lock = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(folder)
        finally:
            os.close(lock)


def name_semaphores() -> None:
    """Name this process's semaphores after the scratch folder, with which they are removed; for engine processes started without
    multiprocessing or outside `inherited`."""
    _call_semaphores(f"/{Path(os.environ[SCRATCH]).name}")


def _call_semaphores(prefix: str) -> str:
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, config["semprefix"] = config["semprefix"], prefix
    return str(before)
