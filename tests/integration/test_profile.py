"""Profiler traces, speed and memory of a run. Real Megatron-Core, vLLM, SGLang, Ray."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_harness import require

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(590)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_writes_a_trace_of_every_process_that_computes(engine: Any, tmp_path: Path) -> None:
    """Two ranks train, one engine generates; of the second step alone."""
    require(engine)
    small = ["rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "validation.enabled=false", "steps=2", "actor_train.devices=2"]
    run = [f"run_dir={tmp_path}", "profile.steps=[2]", f"actor_infer.strategy.name={engine}", "trackers=[{name: jsonl}]"]
    command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_grpo", *small, *run]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = (tmp_path / "latest").resolve() / "profiles"
    assert [file.name for file in folder.iterdir()] == ["step_000002"]
    found = {}
    for file in sorted((folder / "step_000002").iterdir()):
        with gzip.open(file) as trace:
            found[file.name] = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert list(found) == ["actor_infer-0-0.json.gz", "actor_train-0.json.gz", "actor_train-1.json.gz"]
    in_training = {"sync_weights", "train", "aten::mm", "autograd::engine::evaluate_function: MulBackward0"}
    assert all(in_training <= found[f"actor_train-{rank}.json.gz"] for rank in (0, 1))
    assert "aten::copy_" in found["actor_infer-0-0.json.gz"]
    assert "profiler traces are in" in done.stdout and "is missing" not in done.stdout
    lines = (tmp_path / "latest/metrics.jsonl").read_text().splitlines()
    (last,) = [record for line in lines if (record := json.loads(line))["step"] == 2]
    assert last["actor/tflops"] > 0 and last["actor/tokens_per_second"] > 0
    assert last["memory/resident_megabytes/actor_train/train"] > 100 and "actor/mfu" not in last
