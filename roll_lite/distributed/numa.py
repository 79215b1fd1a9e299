from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def bind_to_gpu(properties: Any, root: Path = Path("/")) -> set[int]:
    """Bind this process, with later threads and children, to the CPUs of its GPU's NUMA node, where it then allocates host memory. Return
    the CPUs; empty if unchanged (one node, no information, bound by the user). `root`: of `sys` and `proc`."""
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    device, allowed = root / "sys/bus/pci/devices" / place, os.sched_getaffinity(0)
    try:
        node, near = int((device / "numa_node").read_text()), _numbers(device / "local_cpulist") & allowed
        group = (root / "proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        of_group = root / "sys/fs/cgroup" / group / "cpuset.cpus.effective"
        given = _numbers(of_group if of_group.is_file() else root / "sys/devices/system/cpu/online")
        if node < 0 or allowed != given or len(near) in (0, len(allowed)):
            return set()
    except (OSError, ValueError):
        return set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or its CPUs have changed
            os.sched_setaffinity(int(thread.name), near)
    return near


def _numbers(file: Path) -> set[int]:
    ends = [part.partition("-") for part in file.read_text().strip().split(",")]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}
