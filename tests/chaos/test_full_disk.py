"""Whole runs on a disk that becomes full: the run names it, what was saved before stays, and the summary tells how the run ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import support_disks
from engine_harness import require

from roll_lite.pipeline.checkpoint_files import check_sums, finished_checkpoints, read_list, record
from tests.integration.test_runs import SMALL, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """24 MB, room for two checkpoints and some of a third."""
    with support_disks.small_disk(tmp_path / "disk", "24m") as disk:
        yield disk


@pytest.mark.nightly
def test_a_disk_without_room_for_the_model_is_named_and_the_end_is_recorded(small_disk: Path) -> None:
    require("vllm")
    with Run(small_disk, "tiny_grpo", *SMALL, "batches.write=never", "steps=4") as run:
        run.wait_for_step(2)
        support_disks.fill(small_disk / "filler", leaving=400_000)  # for what the last steps write, not for the model
        code, output = run.finish()
    assert code == 1 and "the run failed: " in output and "could not be recorded" not in output, output
    assert "No space left" in run.summary()["exit"] and not list(run.folder.glob("**/*.partial"))


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
