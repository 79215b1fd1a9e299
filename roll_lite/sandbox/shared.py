"""Locks and shared memory for multiprocessing, in files of the program's folder. They replace Python's, which need /dev/shm: landlock
denies access to it."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import tempfile
import threading
import time
from typing import Any

RECURSIVE = 0
SIZE = 64
LOOK_S = 1.0
"""Seconds after which a process that waits for a lock wakes up to handle signals."""
libc = ctypes.CDLL(None, use_errno=True)


class Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SemLock:
    """Replacement for `_multiprocessing.SemLock`, for forked processes only."""

    SEM_VALUE_MAX = 2**31 - 1
    handle = 0

    def __init__(self, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> None:
        self.kind, self.maxvalue, self.name = kind, maxvalue, None if unlink else name
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._semaphore = ctypes.byref(ctypes.c_char.from_buffer(self._memory))
        libc.sem_init(self._semaphore, 1, value)
        self._held, self._owner = 0, (0, 0)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if self.kind == RECURSIVE and self._is_mine():
            self._held += 1
            return True
        end = float("inf") if timeout is None else time.time() + timeout
        taken = libc.sem_trywait(self._semaphore) == 0
        while not taken and block and (now := time.time()) < end:
            until = min(end, now + LOOK_S)
            taken = libc.sem_timedwait(self._semaphore, ctypes.byref(Time(int(until), int(until % 1 * 1e9)))) == 0
        if taken:
            self._held, self._owner = self._held + 1, (os.getpid(), threading.get_ident())
        return taken

    def release(self) -> None:
        if self.kind == RECURSIVE:
            if not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            self._held -= 1
            if self._held:
                return
        elif self._get_value() >= self.maxvalue:
            raise ValueError("semaphore or lock released too many times")
        else:
            self._held -= 1
        libc.sem_post(self._semaphore)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def _count(self) -> int:
        return self._held

    def _is_mine(self) -> bool:
        return self._held > 0 and self._owner == (os.getpid(), threading.get_ident())

    def _get_value(self) -> int:
        value = ctypes.c_int()
        libc.sem_getvalue(self._semaphore, ctypes.byref(value))
        return value.value

    def _is_zero(self) -> bool:
        return self._get_value() == 0

    def _after_fork(self) -> None:
        self._held = 0


def share_in_files() -> None:
    modules: Any = [importlib.import_module(name) for name in ("_multiprocessing", "_posixshmem", "multiprocessing.heap")]
    locks, memory, heap = modules
    locks.SemLock, locks.sem_unlink = SemLock, lambda name: None
    memory.shm_open = lambda path, flags, mode=0o600: os.open(_file(path), flags | os.O_CLOEXEC, mode)
    memory.shm_unlink = lambda path: os.unlink(_file(path))  # noqa: PTH108
    heap.Arena._dir_candidates = []


def _file(name: str) -> str:
    return f"{tempfile.gettempdir()}/shared-{name.strip('/')}"
