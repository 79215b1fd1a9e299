"""Whole runs with a reward model, on each strategy that can hold one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support_models import hf_scores, make_tiny_reward_model, make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NIGHTLY = pytest.mark.nightly
STRATEGIES = {
    "hf": "devices: [2, 3], strategy: {name: hf}",
    "hf that leaves its devices": "devices: [0], offload: true",
    "megatron": "devices: [2, 3], strategy: {name: megatron, tensor_parallel: 2}",
}


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_grpo", f"run_dir={folder / 'runs'}"]
    small = ["rollout.prompts_per_step=6", "rollout.samples_per_prompt=4"]
    return subprocess.Popen(
        [*command, *small, *overrides], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hf that leaves its devices", *(pytest.param(name, marks=NIGHTLY) for name in ("hf", "megatron"))])
def test_two_domains_share_a_reward_model(tmp_path: Path, strategy: str) -> None:
    path = make_tiny_reward_model(tmp_path / "reward", "llama")
    process = start(
        tmp_path,
        "steps=2",
        f"reward_models={{toy: {{path: '{path}', dtype: float32, {STRATEGIES[strategy]}}}}}",
        "domains.repeat.reward={name: model, args: {model: toy}}",
        "domains.add.reward={name: model, args: {model: toy, scale: sigmoid}, format: {pattern: '^[0-9]+$', bonus: 0.5}}",
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    folder = (tmp_path / "runs" / "latest").resolve()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["rollout/failed"] for record in steps if "time/step" in record] == [0, 0]
    samples: list[dict[str, Any]] = [
        json.loads(line) for step in (1, 2) for line in (folder / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    ]
    scored = [sample for sample in samples if sample["domain"] in ("repeat", "add")]
    assert len(scored) == 32
    tokenizer = make_tokenizer()
    expected = hf_scores(path, [tokenizer(sample["prompt"] + sample["response"])["input_ids"] for sample in scored])
    assert [sample["details"]["reward_model"] for sample in scored] == pytest.approx(expected, abs=1e-4)
    plain = [(sample["score"], output) for sample, output in zip(scored, expected, strict=True) if sample["domain"] == "repeat"]
    assert all(score == pytest.approx(output, abs=1e-4) for score, output in plain)
    squashed = [sample["score"] for sample in scored if sample["domain"] == "add"]
    assert all(0 <= score <= 1 for score in squashed)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_goes_on_after_the_death_of_a_reward_models_process(tmp_path: Path) -> None:
    path = make_tiny_reward_model(tmp_path / "reward", "llama")
    process = start(
        tmp_path,
        "steps=1000",
        "validation.enabled=false",
        f"reward_models={{toy: {{path: '{path}', dtype: float32, devices: [2]}}}}",
        "domains.repeat.reward={name: model, args: {model: toy}}",
    )
    samples = tmp_path / "runs" / "latest" / "samples"

    def until_step(number: int) -> None:
        deadline = time.monotonic() + 200
        while not (samples / f"step_{number:06d}.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.1)

    try:
        until_step(2)
        tree = psutil.Process(process.pid).children(recursive=True)
        next(one for one in tree if "RewardModelWorker" in " ".join(one.cmdline())).kill()
        until_step(len(list(samples.glob("step_*.jsonl"))) + 3)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "domains.repeat.reward: 1 worker(s) died or hung and were replaced" in output
    steps = [json.loads(line) for line in (samples.parent / "metrics.jsonl").read_text().splitlines()]
    assert sum(record.get("domain/repeat/reward/workers_replaced", 0) for record in steps) == 1
    assert sum(record.get("domain/repeat/rollout/retries", 0) for record in steps) > 0
