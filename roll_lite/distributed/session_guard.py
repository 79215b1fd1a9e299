"""Ends what a dead driver left behind: every process of its Ray session, and the session's temporary folder.

Ray's own processes die with their driver within seconds, but not all that they started, and nobody removes the folder. So
a session starts this file as a small process of its own, with the standard library only. It waits until the driver is gone
(however it ended) or says that it is done, then kills every process that carries the session's mark in its environment,
which everything that Ray starts has inherited, or is known by its open files. It has a twin, for who kills the driver may kill a
guard as well; where both were killed, the next session on this machine ends what it finds.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "ROLL_LITE_SESSION"
SHARED = Path("/dev/shm")
GRACE_SECONDS = 3.0
"""After an orderly end, processes get this long to leave by themselves."""
PATIENCE_SECONDS = 20.0
QUIET_SCANS = 3
FOLDER_SECONDS = 1.0
"""Between looks at whether the folder is still there."""


def session_processes(mark: str, folder: Path) -> list[int]:
    """Processes of this user that belong to the session: started with its mark, or, where a process has written its title over its
    environment, titled by Ray and holding files of the session's folder open."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") or _is_titled_user(entry, folder):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def _is_titled_user(process: Path, folder: Path) -> bool:
    if not (process / "cmdline").read_bytes().startswith(b"ray::"):
        return False
    for handle in (process / "fd").iterdir():
        try:
            if handle.readlink().is_relative_to(folder):
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def end_processes(mark: str, folder: Path, grace_s: float) -> None:
    """Until none is seen for a while: a process that is about to die may still start another one, and one that is just starting a
    program shows an empty environment for a moment."""
    start = time.monotonic()
    unseen = 0
    while unseen < QUIET_SCANS and time.monotonic() - start < PATIENCE_SECONDS:
        left = session_processes(mark, folder)
        unseen = 0 if left else unseen + 1
        if time.monotonic() - start >= grace_s:
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.1)


def wait_for_driver(driver: int, folder: Path) -> bool:
    """True: the driver said that it is done. False: it is gone. Returns twice, in two processes that watch over each other as well: the
    driver may be killed together with one of them."""
    try:
        handle = os.pidfd_open(driver)
    except ProcessLookupError:
        return False
    pipe: int | None = sys.stdin.fileno()
    other: int | None = None
    while True:
        if other is None:
            other, is_new = second_guard()
            pipe = None if is_new else pipe
        watched = [handle, other] if pipe is None else [handle, other, pipe]
        ready, _, _ = select.select(watched, [], [], FOLDER_SECONDS)
        if handle in ready:
            return False
        if pipe in ready:
            if os.read(sys.stdin.fileno(), 1):
                return True
            pipe = None  # It may close without a word a moment before the driver is gone: its death is what counts.
        if other in ready:
            os.close(other)
            other = None
        if not folder.exists():  # the other one, or the driver, has done the work
            return True


def remove_session(folder: Path) -> None:
    """And what belongs to the engines whose hosts were killed: their folders are in it."""
    for inside in folder.glob("*/"):
        remove_folder(inside)
    shutil.rmtree(folder, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """And the semaphores that are called after it: an engine's are (strategy/inference/scratch.py)."""
    shutil.rmtree(folder, ignore_errors=True)
    for semaphore in SHARED.glob(f"sem.{folder.name}-*"):
        semaphore.unlink(missing_ok=True)


def second_guard() -> tuple[int, bool]:
    """A handle of the other process, and whether this one is the new one."""
    first = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), sys.stdin.fileno())
        return first, True
    os.close(first)
    return os.pidfd_open(child), False


def main() -> None:
    driver, mark, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    done = wait_for_driver(driver, folder)
    end_processes(mark, folder, GRACE_SECONDS if done else 0.0)
    remove_session(folder)


if __name__ == "__main__":
    main()
