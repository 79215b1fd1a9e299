"""Runs on a machine that is suspended, whose clock jumps, that has too little memory, shared memory or files, or read-only folders.
test_full_disk.py has full disks, tests/pipeline/test_shortages.py what is checked before a run starts."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from engine_harness import require

from roll_lite.pipeline.checkpoint_files import check_sums, finished_checkpoints, read_list, record
from tests.chaos.test_engine_restarts import whole
from tests.integration.test_lost_engines import SETTINGS
from tests.integration.test_runs import SMALL, Run, command_of, until_gone, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SUSPENDED_S = 25.0
"""Longer than an engine may be silent, and than any request of Ray's takes."""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
MEMORY_GROUPS_V2 = Path("/sys/fs/cgroup"), "memory.max"


def newest_is_whole(folder: Path) -> int:
    """Check the newest checkpoint; returns its step."""
    saved = finished_checkpoints(folder)[-1]
    wanted = read_list(saved)
    assert wanted is not None
    check_sums(saved, wanted, [(name, record(saved / name)) for name in wanted])
    return int(saved.name.removeprefix("step_"))


@pytest.mark.nightly
@pytest.mark.parametrize("jump", [3600.0, -7200.0])
def test_a_suspended_laptop_goes_on_and_nothing_is_given_up(tmp_path: Path, jump: float) -> None:
    """All processes stop, and the wall clock is another one when they go on."""
    require("vllm")
    path = os.pathsep.join([str(Path(__file__).parent / "clock_jumps"), *filter(None, [os.environ.get("PYTHONPATH")])])
    file = tmp_path / "jump"
    with Run(tmp_path, "tiny_grpo", *SETTINGS, "steps=12", environment={"PYTHONPATH": path, "CLOCK_JUMP": str(file)}) as run:
        run.wait_for_step(3)
        processes = run.tree()
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()
        file.write_text(str(jump))
        time.sleep(SUSPENDED_S)
        for process in reversed(processes):
            with suppress(psutil.Error):
                process.resume()
        code, output = run.finish()
    assert code == 0 and "is lost" not in output, output
    assert len(whole(run)) == 12 and run.summary()["wall_s"]["total"] < 300
    begun, ended = (run.samples(step)[0]["asked_at"] for step in (1, 12))
    assert abs(ended - begun - jump) < 300, "the clock has jumped"


@pytest.fixture
def read_only() -> Iterator[list[Path]]:
    """Folders to make writable again."""
    mounted: list[Path] = []
    yield mounted
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["checkpoints", "samples", "."])
def test_a_folder_that_becomes_read_only_is_named_and_the_last_checkpoint_stays(tmp_path: Path, name: str, read_only: list[Path]) -> None:
    require("vllm")
    with Run(tmp_path, "tiny_grpo", *SMALL, "steps=100000", "checkpoint.every=1") as run:
        run.wait_for_step(3)
        place = run.folder / name
        made = subprocess.run(["mount", "--bind", str(place), str(place)], check=False, capture_output=True, text=True)
        if made.returncode:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"nothing can be mounted here: {made.stderr}")
        read_only.append(place)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
        code, output = run.finish()
    told = [line for line in output.splitlines() if line.startswith("the run failed: ")]
    assert code == 1 and len(told) == 1 and f"Read-only file system: '{run.folder}" in told[0] and "Traceback" not in output, output
    if name == ".":
        assert f"the end of the run could not be recorded in {run.folder}: " in output
    else:
        assert f"Read-only file system: '{place}" in run.summary()["exit"]
    assert f"step_{newest_is_whole(run.folder):06d}" in output.splitlines()[-1]


@pytest.mark.nightly
def test_a_process_that_was_killed_for_want_of_memory_is_told(tmp_path: Path) -> None:
    require("vllm")
    groups, limit = MEMORY_GROUPS if MEMORY_GROUPS[0].is_dir() else MEMORY_GROUPS_V2
    group = groups / f"rl-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text("2000M")
    except OSError as error:
        assert "CI" not in os.environ, "where memory can be limited, this test must not be skipped"
        pytest.skip(f"no group of limited memory can be made here: {error}")
    try:
        with Run(tmp_path, "tiny_grpo", *SMALL, "steps=3") as run:
            (group / "cgroup.procs").write_text(str(run.process.pid))
            code, output = run.finish()
    finally:
        deadline = time.monotonic() + 30
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()
    assert code == 1 and "Memory was short: the kernel has killed" in output, output
    assert "Memory was short: the kernel has killed" in run.summary()["exit"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["", "RolloutWorker", "ActorWorker"])
def test_a_process_that_may_open_no_more_files_ends_the_run_with_the_remedy(tmp_path: Path, name: str) -> None:
    """The driver (no name) has spare files, to record the end and to clean up."""
    require("vllm")
    with Run(tmp_path, "tiny_grpo", *SMALL, "steps=100000", "checkpoint.every=1") as run:
        run.wait_for_step(3)
        processes = run.tree()
        process = worker(processes, name) if name else psutil.Process(run.process.pid)
        files = process.num_fds()
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
        code, output = run.finish()
    told = [line for line in output.splitlines() if line.startswith("the run failed: ")]
    assert code == 1 and len(told) == 1 and "Too many open files" in told[0] and "raise the limit (ulimit -n 65536)" in told[0], output
    assert all(noise not in output for noise in ("Traceback", "(raylet)", "cleaning up failed", "the kernel has killed")), output
    assert "raise the limit (ulimit -n 65536)" in run.summary()["exit"] and (run.folder / "failure.txt").stat().st_size
    assert f"step_{newest_is_whole(run.folder):06d}" in output.splitlines()[-1]
    assert until_gone(processes, 60) == []


SMALL_SHARED = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=3g tmpfs /dev/shm && exec "$@"', "sh"]
"""Gives the command that follows a /dev/shm of its own, large enough for Ray to keep objects there."""


@pytest.mark.nightly
@pytest.mark.parametrize("copies", [0, 1])
def test_a_full_shared_memory_costs_an_engine_nothing_and_a_copy_of_weights_the_run(tmp_path: Path, copies: int) -> None:
    """Without copies nothing new goes to /dev/shm, not even at an engine's restart. Copies kill Ray's raylet, and the run says why."""
    require("vllm")
    settings = ["rollout.prompts_per_step=8", "actor_train.devices=2", f"checkpoint.in_memory_every={copies}", "checkpoint.every=1"]
    with Run(tmp_path, "tiny_grpo", *SMALL, *settings, "steps=14", prefix=SMALL_SHARED) as run:
        run.wait_for_step(3)
        processes = run.tree()
        with pytest.raises(OSError, match="No space left"), Path(f"/proc/{run.process.pid}/root/dev/shm/filler").open("wb") as filler:
            while True:
                filler.write(bytes(1 << 20))
        if not copies:
            for process in processes:
                if "EngineCore" in " ".join(command_of(process)):
                    process.kill()
        code, output = run.finish()
    assert "Traceback" not in output and "Unhandled error" not in output, output
    if copies:
        full = "/dev/shm, where Ray keeps objects, is full on the driver's machine: remove files there, or enlarge it"
        assert code == 1 and full in run.summary()["exit"], output
        assert f"step_{newest_is_whole(run.folder):06d}" in output.splitlines()[-1]
    else:
        assert code == 0 and "actor_infer[0] serves again" in output and len(whole(run)) == 14, output
    assert until_gone(processes, 60) == []
