from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from roll_lite.sandbox.cgroup import Group
from roll_lite.sandbox.filesystem import BLOCK, fits

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
STACK = 25
FORKED_AND_NO_MORE = 0x40
OF_MAPPING = 512
MOST_MAPPINGS = 65530
LONGEST_MAPS = 1 << 20


class Usage:
    def __init__(self, group: Group | None, namespaces: bool) -> None:
        self._group = group
        self._namespaces = namespaces
        self._seen: dict[tuple[int, int], float] = {}
        """CPU seconds at the last sample, by (pid, start time): the only record of a child whose parent never waits for it."""
        self._unseen_s = 0.0
        self._looked = 0.0
        with open("/proc/self/statm", "rb") as stream:  # noqa: PTH123
            self._own_pages = int(stream.read().split()[1])
            """Resident pages of this interpreter, which forked programs share."""
        self._own_stack = _fields(os.getpid())[STACK]
        self._mappings: dict[tuple[int, int], int] = {}
        """{(pid, start time): number of memory mappings}. Each sample counts those of one random process."""
        with socket.socketpair()[0] as one:
            self._socket_bytes = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def begin(self, limits: dict[str, Any], folder: str) -> None:
        self._limits, self._folder = limits, folder
        self._free = 0 if self._namespaces else _free_bytes(folder)
        self._seen.clear()
        self._mappings.clear()
        self._unseen_s, self._looked = 0.0, time.monotonic()
        if self._group is not None:
            self._group.begin(limits)

    def resume(self) -> None:
        self._looked = time.monotonic()

    def exceeded_limit(self, first: int, members: Sequence[int]) -> str:
        """Name of an exceeded limit, or "". `members`: pids of the program's processes; `first`: pid of its first process."""
        limits = self._limits
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        cpu, memory, threads = 0.0, self._in_sockets(), 0
        counted = random.choice(members) if members else -1
        for process in members:
            if self.folder_is_full(lambda: members):
                return "output"
            try:
                fields = _fields(process)
                thread = _living_thread(process, fields)
                status = read_status(process, thread)
                shown = _fields(process, thread)
            except OSError:  # ended meanwhile
                continue
            key = process, int(fields[19])
            if process == counted:
                self._mappings[key] = _mappings(process, thread)
            # The stack of a fork without exec starts at this interpreter's address; if addresses are hidden, a flag is set.
            is_forked = shown[STACK] == self._own_stack if shown[STACK] != b"0" else int(shown[6]) & FORKED_AND_NO_MORE
            memory += max(0, int(shown[21]) - (self._own_pages if is_forked else 0)) * PAGE + self._mappings.get(key, 0) * OF_MAPPING
            memory += (status.get(b"VmPTE:", 0) + status.get(b"VmSwap:", 0)) << 10
            threads += status.get(b"Threads:", 1)
            used = [int(fields[place]) / TICKS for place in (11, 12, 13, 14)]
            cpu += sum(used)
            if key not in self._seen and process != first and fields[0] == b"R":
                self._unseen_s += max(0.0, since - used[0] - used[1]) * _share(process)
            self._seen[key] = used[0] + used[1]
        if max(cpu, self.cpu_s()) > limits["cpu_s"]:
            return "cpu"
        if memory > limits["memory_bytes"]:
            return "memory"
        if self._namespaces:
            return ""
        if threads > limits["processes"] + 1:
            return "processes"
        deleted, sockets = self._open_files(members)
        if memory + sockets * self._socket_bytes > limits["memory_bytes"]:
            return "memory"
        return "" if self._fits(deleted) else "output"

    def folder_is_full(self, members: Callable[[], Iterable[int]]) -> bool:
        """Return True if the program's folder exceeds a limit; always False with namespaces, where the kernel enforces the limits.

        The folder is measured only if free disk space has changed by more than a quarter of the limit: others' deletions can hide what the
        program writes.
        """
        if self._namespaces or abs(self._free - (free := _free_bytes(self._folder))) <= self._limits["folder_bytes"] // 4:
            return False
        self._free = free
        return not self._fits(0) or not self._fits(self._open_files(members())[0])

    def _fits(self, deleted: int) -> bool:
        return fits(self._folder, self._limits["folder_bytes"] - deleted, self._limits["folder_files"])

    def _open_files(self, members: Iterable[int]) -> tuple[int, int]:
        """Bytes of deleted files still open or mapped, and number of sockets."""
        device, found, inside = os.stat(self._folder).st_dev, dict[int, int](), f"{self._folder}/".encode()  # noqa: PTH116
        sockets = set[int]()
        for process in members:
            try:
                # Read before the open files: a file opened and mapped in between would count as mapped only, with the largest size.
                maps = read_proc(process, f"{_living_thread(process, _fields(process))}maps", LONGEST_MAPS)
                for thread in list_tasks(process):  # threads may have separate open files, and the main one may have ended
                    for name in os.listdir(f"/proc/{process}/{thread}fd"):  # noqa: PTH208
                        with contextlib.suppress(FileNotFoundError):
                            seen = os.stat(f"/proc/{process}/{thread}fd/{name}")  # noqa: PTH116
                            if seen.st_dev == device and seen.st_nlink == 0 and stat.S_ISREG(seen.st_mode):
                                found[seen.st_ino] = seen.st_blocks * BLOCK
                            if stat.S_ISSOCK(seen.st_mode):
                                sockets.add(seen.st_ino)
                if len(maps) == LONGEST_MAPS:
                    found[0] = sys.maxsize
                for line in maps.split(b"\n"):
                    words = line.split(maxsplit=5)
                    if len(words) == 6 and words[5].startswith(inside) and words[5].endswith(b" (deleted)"):
                        found.setdefault(int(words[4]), self._limits["file_bytes"])  # perhaps mapped only in part: assume the largest
            except PermissionError:
                if os.getuid() != 0 and _has_memory(process):  # an ending process, which has no memory, hides its files too
                    found[0] = sys.maxsize
            except OSError:  # ended meanwhile
                continue
        return sum(found.values()), len(sockets)

    def cpu_s(self) -> float:
        seen = sum(self._seen.values())
        return seen + self._unseen_s if self._group is None else max(seen, self._group.cpu_s())

    def _in_sockets(self) -> int:
        """Upper bound of the program's socket buffers, which are charged to no process. 0 without namespaces, as other programs' buffers
        would count."""
        if not self._namespaces:
            return 0
        with open("/proc/net/sockstat", encoding="ascii") as stream:  # noqa: PTH123
            return int(stream.readline().split()[2]) * self._socket_bytes


def _free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bfree * found.f_frsize


def read_proc(process: int, name: str, most: int = -1) -> bytes:
    with open(f"/proc/{process}/{name}", "rb") as stream:  # noqa: PTH123
        return stream.read(most)


def _fields(process: int, thread: str = "") -> list[bytes]:
    return read_proc(process, f"{thread}stat").rpartition(b")")[2].split()


def list_tasks(process: int) -> list[str]:
    return [f"task/{name}/" for name in os.listdir(f"/proc/{process}/task")]  # noqa: PTH208


def _living_thread(process: int, fields: list[bytes]) -> str:
    """Path, relative to /proc/PID, of a living thread if the main thread has ended (/proc/PID then shows no memory); else ""."""
    if fields[0] != b"Z":
        return ""
    for thread in list_tasks(process):
        with contextlib.suppress(OSError):
            if _fields(process, thread)[0] not in (b"Z", b"X"):
                return thread
    return ""


def read_status(process: int, thread: str = "") -> dict[bytes, int]:
    """Numbers of /proc/PID/status, split only at line feeds: process names may contain other line ends."""
    lines = [line.split() for line in read_proc(process, f"{thread}status").split(b"\n")]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _has_memory(process: int) -> bool:
    try:
        return b"VmSize:" in read_status(process)
    except OSError:  # ended meanwhile
        return False


def _mappings(process: int, thread: str) -> int:
    try:
        maps = read_proc(process, f"{thread}maps", LONGEST_MAPS)
    except OSError:  # ended meanwhile, or not visible
        return 0
    return MOST_MAPPINGS if len(maps) == LONGEST_MAPS else maps.count(b"\n")


def _share(process: int) -> float:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        running, waiting, *_ = map(int, read_proc(process, "schedstat").split())
        return running / (running + waiting)
    return 1.0
