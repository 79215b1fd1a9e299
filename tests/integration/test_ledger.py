"""Ledgers of whole runs, audited: synchronous, and asynchronous over a kill, resumed in another folder and in its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_harness import require

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "validation.enabled=false", "checkpoint.export_model=false")
FILTER = "rollout.filter={above: 0.1, below: 0.9, when_short: continue}"
ASYNC = ("rollout.supply=async", "rollout.max_staleness=2", "deterministic=false", FILTER)
PASSES = ("algorithm.mini_batches=2", "algorithm.ppo_epochs=2", "algorithm.old_log_probs=recompute")
STEPS = 8


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_grpo", f"run_dir={run_dir}", *SMALL, *overrides]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def run(run_dir: Path, *overrides: str) -> Path:
    """Its folder, once it has ended well."""
    done = subprocess.run(
        command(run_dir, *overrides), cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (run_dir / "latest").resolve()


def killed(run_dir: Path, after_step: int, *overrides: str) -> Path:
    """Folder of a run whose driver is killed in the step after that one."""
    process = subprocess.Popen(
        command(run_dir, *overrides), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    ledger, deadline = run_dir / "latest/ledger.jsonl", time.monotonic() + 240
    while not (ledger.exists() and f'"event": "step", "step": {after_step},' in ledger.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)  # its processes have the pipe open until they have ended
    return (run_dir / "latest").resolve()


def audited(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-I", "-S", "examples/audit.py", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_synchronous_run_adds_up(tmp_path: Path) -> None:
    require("vllm")
    folder = run(tmp_path, "steps=2")
    output = audited(folder)
    assert "steps: 2; 2 actor trained, 2 updates" in output and "(at most 0): 48 by 0" in output
    samples = [json.loads(line) for path in sorted((folder / "samples").glob("step_*.jsonl")) for line in path.read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    groups = {line["group"]: line for line in lines if line["event"] == "group"}
    assert len(samples) == 48 == sum(len(group["turns"]) for group in groups.values())
    for sample in samples:
        line = groups[sample["group"]]
        same = (line["domain"], line["epoch"], line["prompt"], line["step"], line["scores"][sample["index"]])
        assert same == tuple(sample[name] for name in ("domain", "epoch", "prompt_uid", "step", "score"))


@pytest.mark.nightly
def test_an_asynchronous_run_with_a_filter_adds_up_over_a_kill(tmp_path: Path) -> None:
    require("vllm")
    first = killed(tmp_path, STEPS - 3, f"steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=9", *ASYNC, *PASSES)
    assert "the run goes on, or was killed" in audited(first)
    second = run(tmp_path, f"steps={STEPS}", f"checkpoint.resume={first / 'checkpoints/step_000002'}", *ASYNC, *PASSES)
    output = audited(second)
    groups = [json.loads(line) for line in (second / "ledger.jsonl").read_text().splitlines() if '"continues"' in line]
    earliest = min(turn[1] for group in groups for turns in group.get("turns", []) for turn in turns)
    assert earliest < 2, "tokens of weights before the checkpoint's, which this run never had"
    assert f"goes on from step 2 of {first}; 3 later step(s) there do not count" in output
    assert f"steps: {STEPS}; {4 * STEPS} actor trained, {4 * STEPS} updates" in output
    assert "filtered: accuracy" in output
    assert run(tmp_path, f"steps={STEPS}", "checkpoint.resume=auto", *ASYNC, *PASSES) == first, "the newest with a checkpoint"
    output = audited(first)
    assert f"goes on from step 4 of {first}; 1 later step(s) there do not count" in output
    assert f"steps: {STEPS}; {4 * STEPS} actor trained, {4 * STEPS} updates" in output
