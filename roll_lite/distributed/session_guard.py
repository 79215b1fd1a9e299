"""Guard process that cleans up after a driver's Ray session and records its death.

A second guard survives if the first is killed with the driver. Every Ray worker imports this file: standard library only.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "ROLL_LITE_SESSION"
KILLED = "failed: the driver was killed"
SHARED = Path("/dev/shm")
GRACE_SECONDS = 3.0
PATIENCE_SECONDS = 20.0
QUIET_SCANS = 3
FOLDER_SECONDS = 1.0


def keep_exit_codes() -> None:
    """Restore default handling of SIGCHLD, although adopted orphans stay zombies. Ray 2.60 with its subreaper ignores SIGCHLD: subprocess
    would report exit code 0 for every child."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def session_processes(mark: str, folder: Path) -> list[int]:
    """Return the session's pids: processes with the mark in their environment, or Ray's workers with open files in the session's folder (a
    process title may have overwritten the mark)."""
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
    """Kill the session's processes until several scans in a row find none: a dying process may start another, and during exec a process's
    environment is empty."""
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
    """Return False if the driver died, True if it reported its end or the session is cleaned up. Meanwhile, replace the other guard if it
    dies."""
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
            pipe = None  # a pipe may close just before the driver dies: wait for the death
        if other in ready:
            os.close(other)
            other = None
        if not folder.exists():  # cleaned up by the other guard or the driver
            return True


def remove_session(folder: Path) -> None:
    for inside in folder.glob("*/"):
        remove_folder(inside)
    shutil.rmtree(folder, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder and the semaphores named after it (strategy/inference/scratch.py)."""
    shutil.rmtree(folder, ignore_errors=True)
    for semaphore in SHARED.glob(f"sem.{folder.name}-*"):
        semaphore.unlink(missing_ok=True)


def record_death(summary: Path) -> None:
    """Set "exit" in a killed driver's summary.json from "running" to KILLED."""
    try:
        told = json.loads(summary.read_text(encoding="utf-8"))
        if told["exit"] == "running":
            draft = summary.with_name(f".{summary.name}.{os.getpid()}")
            draft.write_text(json.dumps({**told, "exit": KILLED}, indent=2) + "\n", encoding="utf-8")
            draft.replace(summary)
    except (OSError, ValueError, KeyError):  # not written yet, or the disk is full
        return


def second_guard() -> tuple[int, bool]:
    """Fork a second guard. Both return (pidfd of the other, whether this is the new guard)."""
    first = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), sys.stdin.fileno())
        return first, True
    os.close(first)
    return os.pidfd_open(child), False


def main() -> None:
    driver, mark, folder, *summary = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *map(Path, sys.argv[4:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    done = wait_for_driver(driver, folder)
    if summary and not done:
        record_death(summary[0])
    end_processes(mark, folder, GRACE_SECONDS if done else 0.0)
    remove_session(folder)


if __name__ == "__main__":
    main()
