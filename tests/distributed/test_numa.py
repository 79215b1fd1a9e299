"""Threads near their GPU: a made-up machine of two NUMA nodes over the real CPUs of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll_lite.distributed.numa import bind_to_gpu

CPUS = sorted(os.sched_getaffinity(0))
GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU is no two nodes")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def machine(root: Path, node: int = 1, near: str = str(CPUS[-1]), cpus: list[int] = CPUS) -> Path:
    device = root / "sys/bus/pci/devices/0000:dc:00.0"
    write(device / "numa_node", str(node))
    write(device / "local_cpulist", near)
    write(root / "proc/self/cgroup", "0::/system.slice/ray.service")
    write(root / "sys/fs/cgroup/system.slice/ray.service/cpuset.cpus.effective", ",".join(map(str, cpus)))
    return root


def bound(root: Path, cpus: list[int] | None) -> tuple[set[int], list[set[int]]]:
    """In a process that the user has bound to `cpus`: what is returned, and the CPUs of a thread from before, of one from afterwards, and
    of a process from afterwards."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    goes, before = threading.Event(), []
    thread = threading.Thread(target=lambda: (goes.wait(), before.append(os.sched_getaffinity(0))))
    thread.start()
    returned = bind_to_gpu(GPU, root)
    goes.set()
    thread.join()
    later: list[set[int]] = []
    another = threading.Thread(target=lambda: later.append(os.sched_getaffinity(0)))
    another.start()
    another.join()
    command = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return returned, [*before, *later, {int(number) for number in said.split()}]


def in_a_process(root: Path, cpus: list[int] | None = None) -> tuple[set[int], list[set[int]]]:
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        return alone.submit(bound, root, cpus).result()


def test_all_threads_run_on_the_gpus_node(tmp_path: Path) -> None:
    near = {CPUS[-1]}
    assert in_a_process(machine(tmp_path)) == (near, [near] * 3)


def test_a_node_may_have_cpus_that_the_process_has_not(tmp_path: Path) -> None:
    assert in_a_process(machine(tmp_path, near=f"{CPUS[-1]},{CPUS[-1] + 1}-{CPUS[-1] + 64}"))[0] == {CPUS[-1]}


UNCHANGED: dict[str, Callable[[Path], Path]] = {
    "no such device": lambda root: root,
    "no node": lambda root: machine(root, node=-1),
    "one node": lambda root: machine(root, node=0, near=",".join(map(str, CPUS))),
    "a node without CPUs for this process": lambda root: machine(root, near=str(CPUS[-1] + 1)),
    "an empty list": lambda root: machine(root, near=""),
    "bound by the user": lambda root: machine(root, cpus=[*CPUS, CPUS[-1] + 1]),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_nothing_changes(tmp_path: Path, name: str) -> None:
    assert bind_to_gpu(GPU, UNCHANGED[name](tmp_path)) == set()
    assert os.sched_getaffinity(0) == set(CPUS)


def test_what_the_user_has_bound_stays(tmp_path: Path) -> None:
    assert in_a_process(machine(tmp_path), [CPUS[0]]) == (set(), [{CPUS[0]}] * 3)
