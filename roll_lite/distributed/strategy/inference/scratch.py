"""A folder for the files that an engine's processes leave lying about: sockets, rendezvous files, caches."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRATCH = "ROLL_LITE_ENGINE_SCRATCH"
SHARED = Path("/dev/shm")
_LONGEST_BASE = 50  # a socket's path has at most 107 bytes, and the engines' own part of it has up to 36


class Scratch:
    """Made when an engine starts, removed when it is shut down or its host ends; by the engine's own processes if their host was killed."""

    def __init__(self, prefix: str, *variables: str) -> None:
        """`variables`: further environment variables that name the folder to the engine."""
        self._variables = ("TMPDIR", SCRATCH, *variables)
        base = tempfile.gettempdir()
        self.path = tempfile.mkdtemp(prefix=prefix, dir=base if len(base) <= _LONGEST_BASE else "/tmp")
        self._remove = weakref.finalize(self, _remove_in, os.getpid(), self.path)

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes started inside take the folder for their temporary one; the host keeps its own."""
        names = dict.fromkeys(self._variables, self.path)
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def remove(self) -> None:
        self._remove()


def _remove_in(pid: int, path: str) -> None:
    """Processes that were forked from the one that made the folder end without taking it away."""
    if os.getpid() == pid:
        clear(path)


def clear(path: str) -> None:
    """The folder, and the semaphores that are called after it."""
    shutil.rmtree(path, ignore_errors=True)
    for semaphore in SHARED.glob(f"sem.{Path(path).name}-*"):
        semaphore.unlink(missing_ok=True)


def name_semaphores() -> None:
    """In an engine's first process: its semaphores and its children's are called after the folder, whose removal is then theirs too.
    Python's resource tracker also removes them, unless it is killed with the rest."""
    multiprocessing.current_process()._config["semprefix"] = f"/{Path(os.environ[SCRATCH]).name}"  # type: ignore[attr-defined]
