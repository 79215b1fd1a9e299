"""Whole runs that get SIGTERM: they save their state within the deadline, and the same command goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from roll_lite.pipeline.checkpoint_files import finished_checkpoints
from tests.chaos.test_engine_restarts import wait_until
from tests.chaos.test_training_ranks import DIES_IN_A_CALL, SETTINGS, assert_equal
from tests.integration.test_lost_in_sync import DIES
from tests.integration.test_runs import Run, until_gone

ROOT = Path(__file__).resolve().parents[2]
PREEMPTED = 75


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("overrides", "steps", "waits_s"),
    [
        pytest.param(["actor_train.devices=2"], [5], 0.0, id="as its samples come"),
        pytest.param(["checkpoint.asynchronous=true"], [2, 4, 6], 0.5, id="while it trains"),
        pytest.param(
            ["actor_train.offload=true", "actor_infer.offload=true", "actor_train.devices=[0]", "actor_infer.devices=[0]"],
            [2, 5],
            1.0,
            id="on shared devices",
        ),
    ],
)
@pytest.mark.usefixtures("signals_arrive")
def test_a_run_saves_its_state_and_goes_on(
    tmp_path: Path, overrides: list[str], steps: list[int], waits_s: float, undisturbed: Any
) -> None:
    quiet = undisturbed("tiny_grpo", *SETTINGS, *overrides, "steps=7")
    settings = ["tiny_grpo", *SETTINGS, *overrides, "steps=7", "checkpoint.resume=auto"]
    for step in steps:
        with Run(tmp_path / "preempted", *settings) as run:
            run.wait_for_step(step)
            time.sleep(waits_s)
            processes = run.tree()
            started = time.monotonic()
            run.process.send_signal(signal.SIGTERM)
            code, output = run.finish(60)
            assert code == PREEMPTED and "SIGTERM: saved the state after step" in output, output
            assert time.monotonic() - started < 30
            assert run.summary()["exit"] == "interrupted" and until_gone(processes, 60) == []
            assert len(finished_checkpoints(run.folder)) <= 2
            last = [line["step"] for line in run.metrics() if "time/step" in line][-1]
            assert finished_checkpoints(run.folder)[-1].name == f"step_{last:06d}", "nothing that was done is lost"
    with Run(tmp_path / "preempted", *settings) as run:
        code, output = run.finish(400)
        assert code == 0, output
        assert_equal(run, quiet)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("supply", "prompts"), [("sync", 6), ("async", 12)])
@pytest.mark.usefixtures("signals_arrive")
def test_a_run_that_is_preempted_time_and_again_within_one_step_gets_on(tmp_path: Path, supply: str, prompts: int) -> None:
    """A step takes longer than each of them lives: one sample after the other is generated."""
    slow = [f"domains.{name}.sampling={{max_tokens: 60, min_tokens: 60}}" for name in ("add", "make", "repeat")]
    slow += ["deterministic=false", "actor_infer.strategy.max_running_requests=1", "checkpoint.every=1"]
    settings = [
        "tiny_grpo",
        *SETTINGS,
        *slow,
        f"rollout.prompts_per_step={prompts}",
        "steps=2",
        "validation.every=0",
        f"rollout.supply={supply}",
        "checkpoint.resume=auto",
    ]
    continued = []
    for _ in range(3):
        with Run(tmp_path, *settings) as run:
            run.wait_for_step(1)
            wait_until(run, lambda: (run.folder / "checkpoints/step_000001/files.json").exists())
            wait_until(run, lambda: not continued or any("resumed after step 1" in line for line in run._output))  # noqa: B023
            time.sleep(4.0)
            run.process.send_signal(signal.SIGTERM)
            code, output = run.finish(60)
        assert code == PREEMPTED and "SIGTERM: saved the state after step 1" in output, output
        continued += [0, *map(int, re.findall(r"(\d+) samples that were under way continue", output))][-1:]
    with Run(tmp_path, *settings) as run:
        code, output = run.finish(400)
    assert code == 0, output
    continued += map(int, re.findall(r"(\d+) samples that were under way continue", output))
    assert continued[0] == 0 < continued[1] < continued[2] < continued[3], continued
    audit = subprocess.run([sys.executable, "examples/audit.py", run.folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert audit.returncode == 0 and "the ledger adds up" in audit.stdout, audit.stdout


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("signals_arrive")
def test_a_run_saves_its_state_in_the_middle_of_an_update_of_weights(tmp_path: Path) -> None:
    """The trainers wait in a transfer for an engine that hangs; without a break they would wait until its time-out."""
    path = os.pathsep.join([str(DIES), *filter(None, [os.environ.get("PYTHONPATH")])])
    hangs = {"DIES_MARK": str(tmp_path / "hangs"), "DIES_AFTER_UPDATES": "2", "DIES_VICTIM": "nobody", "PYTHONPATH": path}
    with Run(tmp_path, "tiny_grpo", *SETTINGS, "steps=7", "weight_sync.bucket_mb=1", environment=hangs) as run:
        while not (tmp_path / "hangs").exists():
            assert run.process.poll() is None, run.finish()[1]
            time.sleep(0.05)
        started = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish(100)
    assert code == PREEMPTED and "SIGTERM: saved the state after step 2" in output, output
    assert time.monotonic() - started < 30


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("signals_arrive")
def test_a_save_that_exceeds_the_deadline_is_told_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    """A rank hangs as it saves. The run does not start it again, since nobody would wait for that."""
    path = os.pathsep.join([str(DIES_IN_A_CALL), *filter(None, [os.environ.get("PYTHONPATH")])])
    hangs = {"DIES_MARK": str(tmp_path / "hangs"), "DIES_IN": "save_checkpoint", "DIES_AT_CALL": "2", "HANGS": "1", "PYTHONPATH": path}
    settings = ["actor_train.devices=2", "steps=1000", "checkpoint.every=3", "checkpoint.on_sigterm_s=6"]
    with Run(tmp_path, "tiny_grpo", *SETTINGS, *settings, environment=hangs) as run:
        run.wait_for_step(5)
        processes = run.tree()
        started = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish(100)
        seconds = time.monotonic() - started
    assert code == 1 and re.search(r"checkpoint.on_sigterm_s: [56](\.\d+)? s", output) and "starts again" not in output, output
    assert seconds < 30 and (tmp_path / "hangs").exists()
    assert [saved.name for saved in finished_checkpoints(run.folder)] == ["step_000003"]
    assert "step_000003" in output.splitlines()[-1] and until_gone(processes, 60) == []
