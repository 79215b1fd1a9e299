"""A folder for the files that an engine's processes leave lying about: sockets, rendezvous files, caches."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

SCRATCH = "ROLL_LITE_ENGINE_SCRATCH"
_LONGEST_BASE = 50  # a socket's path has at most 107 bytes, and the engines' own part of it has up to 36


class Scratch:
    """Made when an engine starts, removed when it is shut down; by the engine's own processes if their host was killed."""

    def __init__(self, prefix: str, *variables: str) -> None:
        """`variables`: further environment variables that name the folder to the engine."""
        self._variables = ("TMPDIR", SCRATCH, *variables)
        base = tempfile.gettempdir()
        self.path = tempfile.mkdtemp(prefix=prefix, dir=base if len(base) <= _LONGEST_BASE else "/tmp")

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
        shutil.rmtree(self.path, ignore_errors=True)
