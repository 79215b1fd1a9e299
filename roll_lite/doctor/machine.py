"""Checks of one machine that take seconds."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from subprocess import getoutput
from typing import Any

from roll_lite.config.schema.run import RayConfig
from roll_lite.distributed.session_guard import SHARED
from roll_lite.distributed.strategy.build import ENGINES
from roll_lite.distributed.strategy.inference.settings import NotInstalled
from roll_lite.doctor.packages import ABSENT, Diagnosis, wrong_packages
from roll_lite.pipeline.node_facts import GIB, LEAST_DISK_GIB, MOST_CLOCK_SECONDS, Scout, installed
from roll_lite.pipeline.shortages import check_machine as find_shortages
from roll_lite.sandbox.pool import Sandbox, SandboxTrouble

PORTS = 6379, 8265, 8700
"""Default ports of Ray's head node, its dashboard and `roll-lite view`. A run's own Ray takes ports from the system."""
TAKEN = "if that is neither Ray nor `roll-lite view`, give those another --port"
NO_ENGINE = "install one engine (roll-lite docs environment); without any there is only mode=train_only"
SMALL = f"Ray's objects go to the temporary folder, which is slower; enlarge {SHARED} (docker run --shm-size=1g)"
DISK = "remove files, or have runs write elsewhere (run_dir)"
NO_CODE = "code rewards and Python tools refuse to start (roll-lite docs code_reward)"
SET_CLOCK = "set the clock, or have a time server keep it: logs mislead, and TLS connections may be refused"

SECONDS = 60.0
LEAST_FREE = 0.9
"""Free fraction of GPU memory below which another process counts as using the GPU."""
DRIVER = re.compile(r"Driver Version: *\S+ +CUDA Version: *[\d.]+")
GPU_STACK = "install a lock file for GPUs (roll-lite docs environment) and a driver for its CUDA version; if they fit, look at dmesg"
Memory = tuple[str, int, int]
"""(name, free bytes, total bytes) of a GPU."""


def alone(function: Callable[..., Any], *arguments: Any, limit_s: float = SECONDS) -> Any:
    """Call a function in a separate process. RuntimeError if it crashes or takes longer than `limit_s`."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        return pool.submit(function, *arguments).result(limit_s)
    except TimeoutError:
        for process in pool._processes.values():
            process.kill()
        raise RuntimeError(f"no answer within {limit_s:g} s") from None
    finally:
        pool.shutdown(wait=False)


def check_versions() -> Iterator[Diagnosis]:
    yield from wrong_packages()
    yield Diagnosis("versions", ", ".join(f"{name} {version.split()[0]}" for name, version in installed().items()))


def check_engines() -> Iterator[Diagnosis]:
    absent = []
    for name, version in ENGINES.items():
        try:
            yield Diagnosis(name, version())
        except NotInstalled:
            absent.append(name)
        except RuntimeError as error:
            yield Diagnosis(name, str(error), "install a version that is supported (roll-lite docs environment)")
    for name in absent:
        yield Diagnosis(name, ABSENT, NO_ENGINE if len(absent) == len(ENGINES) else "")


def check_gpus() -> Iterator[Diagnosis]:
    devices = Path("/dev")
    if not any(devices.glob("nvidia[0-9]*")):
        amd = "an AMD GPU (/dev/kfd), on which nothing is tested; without torch for ROCm" if any(devices.glob("kfd")) else "none"
        yield Diagnosis("gpus", f"{amd}, runs go on the CPU (gloo)")
        return
    driver = "".join(DRIVER.findall(getoutput(f"timeout {SECONDS:g} nvidia-smi"))) or "nvidia-smi tells no driver"
    try:
        torch, gpus, blind = alone(ask_torch)
    except RuntimeError as error:
        yield Diagnosis("gpus", f"torch cannot use them: {error}; {driver}", GPU_STACK)
    else:
        yield from judge_gpus(f"{torch}; {driver}", gpus, blind, getoutput(f"timeout {SECONDS:g} nvidia-smi topo -m"))


def ask_torch() -> tuple[str, list[Memory], list[str]]:
    """Open each GPU. Return (torch's version, GPUs, pairs such as `0-1` that cannot read each other's memory)."""
    import torch

    cuda, numbers = torch.cuda, range(torch.cuda.device_count())
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is a build for CPUs")
    cuda.init()
    memory = [(cuda.get_device_name(number), *cuda.mem_get_info(number)) for number in numbers]
    blind = [f"{a}-{b}" for a in numbers for b in numbers if a < b and not cuda.can_device_access_peer(a, b)]
    return f"torch {torch.__version__} for CUDA {torch.version.cuda}", memory, blind


def judge_gpus(versions: str, gpus: list[Memory], blind: list[str], topology: str) -> Iterator[Diagnosis]:
    """Report GPUs, free memory and links. `versions`: torch and driver; `blind`: pairs without peer access; `topology`: output of
    `nvidia-smi topo -m`."""
    used = [f"GPU {n} has {free / GIB:.0f} GiB free" for n, (_, free, total) in enumerate(gpus) if free < LEAST_FREE * total]
    remedy = f"{', '.join(used)}: end the processes that nvidia-smi lists, or leave these out by CUDA_VISIBLE_DEVICES" if used else ""
    yield Diagnosis("gpus", f"{len(gpus)} x {' and '.join(sorted({name for name, *_ in gpus}))}, {versions}", remedy, "warning")
    if len(gpus) > 1:
        remedy = f"no peer access between {', '.join(blind)}, which send through host memory: look at IOMMU and ACS" if blind else ""
        yield Diagnosis("links", ", ".join(links_of(topology)) or "unknown to nvidia-smi", remedy, "warning")


def links_of(topology: str) -> list[str]:
    """Return the kinds of links between GPUs, as in `nvidia-smi topo -m`: NV18 means 18 NVLinks, PIX to SYS are PCIe."""
    rows = re.findall(r"^\W*GPU\d+\s+(.*\bX\b.*)$", topology, re.MULTILINE)
    return sorted({cell for row in rows for cell in row.split()[: len(rows)]} - {"X"})


def check_space(run_folder: Path) -> Iterator[Diagnosis]:
    """Check memory, disk, shared memory and open files."""
    facts, problems = Scout().look(run_folder, []), {problem.path: problem.message for problem in find_shortages()}
    room = f"{facts.memory_gib:.1f} GiB of memory and {facts.disk_gib:.1f} GiB of disk are free, {os.cpu_count()} CPU cores"
    yield Diagnosis("room", room, DISK if facts.disk_gib < LEAST_DISK_GIB else "", "warning")
    free, short = shutil.disk_usage(SHARED).free, problems.get(str(SHARED))
    small = SMALL if free < RayConfig().object_store_mb << 20 else ""
    yield Diagnosis("shared memory", f"{free / GIB:.2f} GiB free", short or small, "fault" if short else "warning")
    yield Diagnosis("open files", f"{resource.getrlimit(resource.RLIMIT_NOFILE)[1]} at most", problems.get("ulimit -n", ""))


def check_ports(ports: Sequence[int] = PORTS) -> Iterator[Diagnosis]:
    taken = []
    for port in ports:
        with socket.socket() as tried:
            if not tried.connect_ex(("127.0.0.1", port)):
                taken.append(str(port))
    yield Diagnosis("ports", f"of {', '.join(map(str, ports))} taken: {', '.join(taken) or 'none'}", TAKEN if taken else "", "warning")


def check_sandbox(walls: str = "namespaces") -> Iterator[Diagnosis]:
    """Start a sandbox. `walls`: the strongest kind of isolation to try."""
    sandbox = Sandbox(walls)
    try:
        found = sandbox.start()
    except SandboxTrouble as trouble:
        yield Diagnosis("sandbox", str(trouble), NO_CODE, "warning")
    else:
        sandbox.close()
        value = f"{found.kind}, {found.describe() if found.missing else 'isolates ' + ', '.join(found.held)}"
        yield Diagnosis("sandbox", value, NO_CODE if found.missing else "", "warning")


def check_clock(newest: Path = Path(__file__)) -> Iterator[Diagnosis]:
    """Check that the clock is not behind the modification time of the installed file `newest`."""
    value = f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"
    yield Diagnosis("clock", value, SET_CLOCK if newest.stat().st_mtime - time.time() > MOST_CLOCK_SECONDS else "", "warning")


def check_machine(run_folder: Path) -> Iterator[Diagnosis]:
    """Run all checks of this machine, except Ray's and ports."""
    return chain(check_versions(), check_engines(), check_gpus(), check_space(run_folder), check_sandbox(), check_clock())
