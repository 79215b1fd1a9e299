"""Planted faults: each is named with its value and what to do. Limits, disks, ports, packages and processes are real ones."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll_lite.distributed.strategy.inference.settings import check_version
from roll_lite.doctor import machine, packages
from roll_lite.doctor.machine import (
    alone,
    check_clock,
    check_engines,
    check_gpus,
    check_ports,
    check_sandbox,
    check_space,
    check_versions,
    judge_gpus,
    links_of,
)
from roll_lite.doctor.packages import Diagnosis

GIB = 1 << 30
SPACE = "import json, pathlib, sys; from roll_lite.doctor.machine import check_space; {}"
SPACE = SPACE.format("print(json.dumps([vars(one) for one in check_space(pathlib.Path(sys.argv[1]))]))")
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPHB\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tPHB\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
DRIVER = "| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |"


def by_check(found: Iterable[Diagnosis]) -> dict[str, Diagnosis]:
    return {one.check: one for one in found}


def plant_package(folder: Path, name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


def space_in_child(folder: Path, *before: str, files: int | None = None) -> dict[str, Diagnosis]:
    limit = None if files is None else (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)))
    command = [*before, sys.executable, "-c", SPACE, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, env=environment, check=True)
    return by_check(Diagnosis(**one) for one in json.loads(done.stdout))


def test_this_environment_has_the_right_versions() -> None:
    (versions,) = check_versions()
    assert versions.status == "ok" and "torch 2." in versions.value and versions.value.startswith("python 3.")


def test_a_wrong_version_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_package(tmp_path, "torch", "2.9.0", monkeypatch)
    needed = ["torch>=2.11,<2.15", "not-there>=1", "also-not-there; extra == 'other'"]
    monkeypatch.setattr(packages.metadata, "requires", lambda _: needed)
    wrong, missing, _ = check_versions()
    assert (wrong.check, wrong.status, wrong.value) == ("torch", "fault", "2.9.0, supported is <2.15,>=2.11")
    assert wrong.remedy.endswith("pip install 'torch<2.15,>=2.11'")
    assert (missing.check, missing.status, missing.value) == ("not-there", "fault", "not installed, supported is >=1")


def test_an_engine_in_another_version_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_package(tmp_path, "vllm", "0.40.0", monkeypatch)
    vllm = by_check(check_engines())["vllm"]
    assert vllm.status == "fault" and vllm.value == "vllm 0.40.0 is installed, roll_lite supports vllm >=0.32,<0.33"


def test_an_engine_that_is_not_installed_is_a_fault_only_if_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        return check_version(("no-such-engine",), ("1", "2"), "it")

    monkeypatch.setitem(machine.ENGINES, "vllm", lambda: "0.32.0")  # type: ignore[misc]
    monkeypatch.setitem(machine.ENGINES, "sglang", absent)  # type: ignore[misc]
    assert [(one.check, one.status, one.value) for one in check_engines()] == [("vllm", "ok", "0.32.0"), ("sglang", "ok", "not installed")]
    monkeypatch.setitem(machine.ENGINES, "vllm", absent)  # type: ignore[misc]
    assert [(one.check, one.status) for one in check_engines()] == [("vllm", "fault"), ("sglang", "fault")]


def test_few_open_files(tmp_path: Path) -> None:
    found = space_in_child(tmp_path, files=300)["open files"]
    assert found.status == "fault" and found.value == "300 at most" and "ulimit -Hn 65536" in found.remedy


@pytest.mark.parametrize(("megabytes", "status", "remedy"), [(8, "fault", "an engine needs 16 MiB"), (64, "warning", "--shm-size=1g")])
def test_a_small_shared_memory_and_a_full_disk(tmp_path: Path, megabytes: int, status: str, remedy: str) -> None:
    """On file systems of their own, which end with the child."""
    mounts = f'mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && mount -t tmpfs -o size=8m tmpfs {tmp_path} && exec "$@"'
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("no mount namespaces can be made here")
    found = space_in_child(tmp_path / "runs", "unshare", "--mount", "bash", "-c", mounts, "bash")
    assert found["shared memory"].status == status and remedy in found["shared memory"].remedy
    assert found["room"].status == "warning" and " 0.0 GiB of disk" in found["room"].value and "run_dir" in found["room"].remedy


def test_enough_room_is_measured(tmp_path: Path) -> None:
    found = by_check(check_space(tmp_path))
    assert {"room", "shared memory", "open files"} == set(found) and found["open files"].status == "ok"


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = check_ports([port])
        assert found.status == "warning" and found.value == f"of {port} taken: {port}" and "another --port" in found.remedy
    (found,) = check_ports([port])
    assert found.status == "ok"


def test_a_clock_behind_the_files_is_told(tmp_path: Path) -> None:
    newest = tmp_path / "newest.py"
    newest.touch()
    (right,) = check_clock(newest)
    os.utime(newest, (time.time() + 3600,) * 2)
    (wrong,) = check_clock(newest)
    assert right.status == "ok" and wrong.status == "warning" and "time server" in wrong.remedy


def test_a_sandbox_without_walls_is_told() -> None:
    (found,) = check_sandbox("none")
    assert found.status == "warning" and found.value.startswith("none, holds: nothing") and "refuse to start" in found.remedy


def test_the_sandbox_here_is_the_one_of_runs() -> None:
    (found,) = check_sandbox()
    assert found.value.partition(",")[0] in ("namespaces", "landlock")


def test_links_between_gpus_are_read_from_the_matrix() -> None:
    assert links_of(TOPOLOGY) == ["NV18", "SYS"]
    assert links_of("") == []


def test_gpus_that_work() -> None:
    gpus, link = judge_gpus("torch 2.13.0 for CUDA 13.0; driver", [("H100", 79 * GIB, 80 * GIB)] * 3, [], TOPOLOGY)
    assert (gpus.status, gpus.value) == ("ok", "3 x H100, torch 2.13.0 for CUDA 13.0; driver")
    assert (link.status, link.value) == ("ok", "NV18, SYS")
    (alone_,) = judge_gpus("torch", [("H100", 80 * GIB, 80 * GIB)], [], "")
    assert alone_.status == "ok"


def test_gpus_in_use_and_without_peer_access() -> None:
    gpus, link = judge_gpus("torch", [("H100", 79 * GIB, 80 * GIB), ("H100", 10 * GIB, 80 * GIB)], ["0-1"], "")
    assert gpus.status == "warning" and gpus.remedy.startswith("GPU 1 has 10 GiB free: end the processes")
    assert link.status == "warning" and link.value == "unknown to nvidia-smi" and "no peer access between 0-1" in link.remedy


def test_gpus_that_torch_cannot_use_are_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that says it is there, and the torch of this environment, in its own process."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{DRIVER}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine, "Path", lambda _: SimpleNamespace(glob=lambda _: ["/dev/nvidia0"]))
    (found,) = check_gpus()
    assert found.status == "fault" and "lock file for GPUs" in found.remedy
    assert found.value == (
        f"torch cannot use them: torch {torch.__version__} is a build for CPUs; Driver Version: 550.54.15      CUDA Version: 12.4"
    )


def test_without_gpus_runs_go_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Path", lambda _: SimpleNamespace(glob=lambda _: []))
    (found,) = check_gpus()
    assert (found.status, found.value) == ("ok", "none, runs go on the CPU (gloo)")


def test_an_amd_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Path", lambda _: SimpleNamespace(glob=lambda pattern: ["/dev/kfd"] if pattern == "kfd" else []))
    (found,) = check_gpus()
    assert found.status == "ok" and found.value.startswith(
        "an AMD GPU (/dev/kfd), on which nothing is tested; without torch for ROCm, runs"
    )


def test_a_separate_process_that_crashes_or_hangs() -> None:
    assert alone(os.path.basename, "a/b") == "b"
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        alone(os._exit, 3)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no answer within 0.5 s"):
        alone(time.sleep, 600, limit_s=0.5)
    assert time.monotonic() - started < 60
