"""Whole runs on a disk that becomes full: the run names it, what was saved before stays, and the summary tells how the run ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import require

from roll_lite.pipeline.checkpoint_files import check_sums, finished_checkpoints, read_list, record
from tests.integration.test_runs import SMALL, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """12 MB, room for two checkpoints and a half."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)], check=False, capture_output=True, text=True)
    if mounted.returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no file system can be mounted here: {mounted.stderr}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.nightly
@pytest.mark.parametrize("asynchronous", ["false", pytest.param("true", marks=pytest.mark.nightly)])
def test_a_full_disk_is_named_and_the_last_checkpoint_stays(small_disk: Path, asynchronous: str) -> None:
    require("vllm")
    every = ["checkpoint.every=1", "checkpoint.keep=20", f"checkpoint.asynchronous={asynchronous}", "steps=12"]
    with Run(small_disk, "tiny_grpo", *SMALL, *every) as run:
        code, output = run.finish()
    told = [line for line in output.splitlines() if line.startswith("the run failed: ")]
    assert code == 1 and len(told) == 1 and "the disk is full" in told[0], output
    assert "Traceback" not in output
    assert run.summary()["exit"].startswith("failed: ")
    saved = finished_checkpoints(run.folder)
    assert saved and not list(run.folder.glob("checkpoints/*.partial"))
    wanted = read_list(saved[-1])
    assert wanted is not None
    check_sums(saved[-1], wanted, [(name, record(saved[-1] / name)) for name in wanted])
    assert f"checkpoint.resume={saved[-1]}" in output
