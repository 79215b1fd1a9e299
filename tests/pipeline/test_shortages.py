"""What a machine has too little of is named with the number and the remedy. tests/chaos/test_limits.py has whole runs."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support_disks import fill, small_disk

from roll_lite.distributed.place import Place
from roll_lite.files import replacing, write_whole
from roll_lite.pipeline import shortages as module
from roll_lite.pipeline.shortages import SPARE_BYTES, Shortages, check_machine, killed_for_memory

ANY: Any = None


def test_too_few_open_files_are_told_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roll_lite.cli", "run", "--config-name", "tiny_grpo", f"run_dir={tmp_path}/runs"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "ulimit -n = 100: a run needs 512 or more open files; raise the hard limit (ulimit -Hn 65536)" in done.stderr


def test_a_full_shared_memory_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_machine(ANY)) == []
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    (problem,) = check_machine(ANY)
    assert str(problem).startswith("/dev/shm: 3 MiB are free and an engine needs 16 MiB; remove files there, or enlarge it")


def test_what_ran_out_is_told_beside_the_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shortages = Shortages(tmp_path)
    assert shortages.behind(ValueError("another")) == ""
    assert "raise the limit (ulimit -n 65536)" in shortages.behind(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    assert "/dev/shm, where Ray keeps objects, is full" in shortages.behind(RuntimeError("the raylet died"))
    monkeypatch.undo()
    before = killed_for_memory()
    monkeypatch.setattr(module, "killed_for_memory", lambda: before + 2)
    assert "the kernel has killed 2 processes" in shortages.behind(RuntimeError("a rank died"))


@pytest.mark.usefixtures("ray_local")
def test_what_ran_out_on_another_node_is_told_with_its_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a node that gives no answer, as one that is lost, nothing is told."""
    monkeypatch.setattr(module, "ASK_SECONDS", 1.0)
    shortages, answers = Shortages(tmp_path), {"a": [(3, 1 << 30), (5, 4096)], "b": [(3, 1 << 30), (3, 1 << 30)]}
    lost = ray.remote(module.signs).options(resources={"nowhere": 1}).remote()
    monkeypatch.setattr(shortages, "_ask", lambda node: ray.put(answers[node].pop(0)) if node in answers else lost)
    shortages.watch([Place(node, pid, f"10.0.0.{number}") for number, node in enumerate("abc") for pid in (7, 8)])
    told = shortages.behind(RuntimeError("a rank died"))
    assert told == (
        ". /dev/shm, where Ray keeps objects, is full on 10.0.0.0: remove files there, or enlarge it"
        ". Memory was short: the kernel has killed 2 processes on 10.0.0.0 since the run's start"
    )
    ray.cancel(lost)
    monkeypatch.setattr(shortages, "_ask", lambda node: ray.get_actor("no such session"))
    assert shortages.behind(RuntimeError("a rank died")) == "", "Ray may have ended"


def test_a_file_that_is_not_written_leaves_no_draft(tmp_path: Path) -> None:
    for other_writers in (True, False):
        with pytest.raises(OSError, match="No space left"), replacing(tmp_path / "weights", other_writers) as draft:
            draft.write_bytes(bytes(100))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_has_room_for_the_end_of_a_run(tmp_path: Path) -> None:
    with small_disk(tmp_path, "4m"):
        shortages = Shortages(tmp_path)
        assert list(tmp_path.iterdir()) == []
        fill(tmp_path / "samples")
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "summary.json", "{}")
        shortages.release()
        write_whole(tmp_path / "summary.json", "x" * (SPARE_BYTES // 2))
