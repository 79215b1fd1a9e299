"""Descendants of a process, without a pid namespace. Needs a subreaper, which inherits processes that lose their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import time

PATIENCE_S = 5.0


def can_be_followed() -> bool:
    """True if this kernel lists the children of a process."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # noqa: PTH110


def descendants() -> list[int]:
    """Descendants of this process."""
    found = _children(os.getpid())
    for process in found:
        found.extend(child for child in _children(process) if child not in found)
    return found


def _children(pid: int) -> list[int]:
    """Children of all threads of a process: a child belongs to the thread that forked it."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:  # ended meanwhile
        return found
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as stream:  # noqa: PTH123
            found.extend(map(int, stream.read().split()))
    return found


def kill_descendants() -> None:
    """Kill all descendants; TimeoutError if some do not die."""
    deadline = time.monotonic() + PATIENCE_S
    while rest := descendants():
        for process in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of the program do not die: {rest}")
