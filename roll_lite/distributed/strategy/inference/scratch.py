"""Temporary folder for an engine's sockets, rendezvous files, semaphores and caches."""

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

SCRATCH = "ROLL_LITE_ENGINE_SCRATCH"
_LOCK = ".host"
"""Lock file that the hosting process keeps locked while it lives."""
_LONGEST_BASE = 50  # a socket's path has at most 107 bytes, and the engines' own part of it has up to 36


class Scratch:
    """Temporary folder of an engine, removed when the engine shuts down or its hosting process ends. If the hosting process is killed, the
    engine's processes remove the folder. If there are none yet, the next engine of the same kind on this machine removes it."""

    def __init__(self, prefix: str, *variables: str) -> None:
        """`prefix`: start of the folder's name. `variables`: environment variables, besides TMPDIR, that the engine gets with the folder's
        path."""
        self._variables = ("TMPDIR", SCRATCH, *variables)
        base = tempfile.gettempdir()
        base = base if len(base) <= _LONGEST_BASE else "/tmp"
        for folder in Path(base).glob(f"{prefix}*"):
            _clear_if_abandoned(folder)
        lock = None
        while lock is None:
            self.path = tempfile.mkdtemp(prefix=prefix, dir=base)
            lock = _locked(self.path)
        self._remove = weakref.finalize(self, _remove_in, os.getpid(), self.path, lock)

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Make processes started inside the block use the folder as temporary folder. This process keeps its own."""
        names = dict.fromkeys(self._variables, self.path)
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        prefix = _call_semaphores(_semaphores_of(self.path))
        try:
            yield
        finally:
            _call_semaphores(prefix)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def remove(self) -> None:
        self._remove()


def _remove_in(pid: int, path: str, lock: int) -> None:
    """Remove the folder in process `pid`, which made it. Do nothing in a fork of that process."""
    if os.getpid() == pid:
        remove_folder(Path(path))
        os.close(lock)


def _locked(path: str) -> int | None:
    """Lock the folder and return the lock's descriptor. None if another process has just removed the folder as abandoned."""
    try:
        lock = os.open(f"{path}/{_LOCK}", os.O_CREAT | os.O_RDWR, 0o600)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # if the file system has no locks, no folder counts as abandoned
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
    """Name the semaphores of this process and its children after the scratch folder, so they are removed with it.

    An engine's first process calls this if it was started without multiprocessing or outside of `inherited`."""
    _call_semaphores(_semaphores_of(os.environ[SCRATCH]))


def _semaphores_of(path: str) -> str:
    return f"/{Path(path).name}"


def _call_semaphores(prefix: str) -> str:
    """Set the prefix of semaphore names in this process and in its multiprocessing children. Returns the old prefix."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, config["semprefix"] = config["semprefix"], prefix
    return str(before)
