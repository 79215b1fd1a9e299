from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from roll_lite.sandbox.filesystem import claim, claimed_by_none

PREFIX = "roll-lite-"
WANTED = "+memory +pids"
SLACK_BYTES = 32 << 20
REMOVAL_S = 2.0


class Group:
    """Control group (cgroup v2) that counts and limits the resources of a sandbox's program. Its files are opened early: the isolated
    sandbox cannot reach them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._claim = claim(folder)
        self._open = {"cgroup.procs": os.open(f"{folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)}
        self._open["cpu.stat"] = os.open(f"{folder}/cpu.stat", os.O_RDONLY | os.O_CLOEXEC)
        for name in ("memory.max", "memory.swap.max", "memory.events", "pids.max"):
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY if name == "memory.events" else os.O_WRONLY
                self._open[name] = os.open(f"{folder}/{name}", flags | os.O_CLOEXEC)
        self._before_s, self._killed_before = 0.0, 0

    @property
    def counts(self) -> tuple[str, ...]:
        found = {"computing": "cpu.stat", "memory": "memory.max", "processes": "pids.max"}
        return tuple(what for what, name in found.items() if name in self._open)

    def begin(self, limits: Mapping[str, Any]) -> None:
        most = limits["memory_bytes"] + limits["folder_bytes"] + 3 * limits["file_bytes"] + SLACK_BYTES
        for name, value in {"memory.max": most, "memory.swap.max": 0, "pids.max": limits["processes"] + 2}.items():
            if name in self._open:
                os.pwrite(self._open[name], str(value).encode(), 0)
        self._before_s, self._killed_before = self._total_s(), self._killed()

    def enter(self) -> None:
        os.write(self._open["cgroup.procs"], b"0")

    def cpu_s(self) -> float:
        """CPU time since `begin`, without this process, which is in the group too."""
        return self._total_s() - self._before_s

    def out_of_memory(self) -> bool:
        return self._killed() > self._killed_before

    def _total_s(self) -> float:
        return self._read("cpu.stat").get("usage_usec", 0) / 1e6 - time.process_time()

    def _killed(self) -> int:
        return self._read("memory.events").get("oom_kill", 0)

    def _read(self, name: str) -> dict[str, int]:
        if name not in self._open:
            return {}
        lines = os.pread(self._open[name], 4096, 0).decode().splitlines()
        return {key: int(value) for key, _, value in (line.partition(" ") for line in lines)}


def die_first() -> None:
    """Make the kernel kill this process first when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:  # noqa: PTH123
        stream.write("1000")


def make_group() -> Group | None:
    """Create a control group beside or below this process's; None if forbidden."""
    for parent in _parents():
        with contextlib.suppress(OSError):
            for old in claimed_by_none(parent, PREFIX):
                with contextlib.suppress(OSError):
                    os.rmdir(old)  # noqa: PTH106
            with contextlib.suppress(OSError), open(f"{parent}/cgroup.subtree_control", "w", encoding="ascii") as stream:  # noqa: PTH123
                stream.write(WANTED)
            folder = f"{parent}/{PREFIX}{os.getpid()}"
            os.mkdir(folder)  # noqa: PTH102
            try:
                return Group(folder)
            except OSError:
                remove_group(folder)
    return None


def remove_group(folder: str) -> None:
    deadline = time.monotonic() + REMOVAL_S
    while os.path.exists(folder) and time.monotonic() < deadline:  # noqa: PTH110
        try:
            os.rmdir(folder)  # noqa: PTH106
        except OSError:
            time.sleep(0.01)


def _parents() -> list[str]:
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as stream:  # noqa: PTH123
            own = next(line.rstrip("\n")[3:] for line in stream if line.startswith("0::"))
        with open("/proc/self/mountinfo", encoding="utf-8") as stream:  # noqa: PTH123
            mounts = [line.split() for line in stream if " - cgroup2 " in line]
    except (OSError, StopIteration):
        return []
    for fields in mounts:
        root, point = fields[3], fields[4]
        if own == root or own.startswith(f"{root.rstrip('/')}/"):
            place = f"{point}/{own[len(root.rstrip('/')) :].strip('/')}".rstrip("/")
            # Below a group that itself has processes, the kernel grants fewer controllers.
            return [os.path.dirname(place), place] if os.getuid() != 0 and place != point else [place]  # noqa: PTH120
    return []
