"""Log-probs computed while the rest of the batch was generated, against those of the whole batch. Real Megatron-Core, vLLM, Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from engine_harness import require

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("rollout.prompts_per_step=48", "rollout.samples_per_prompt=4", "validation.enabled=false", "steps=1", "batches.write=always")
OWN_DEVICES = ("algorithm.critic_warmup_steps=0", "actor_train.devices=[1,2]", "reference.devices=[3]", "critic.devices=[4]")


def run(run_dir: Path, *overrides: str) -> Path:
    """Its folder, once it has ended well."""
    command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_ppo", f"run_dir={run_dir}", *SMALL, *overrides]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return (run_dir / "latest").resolve()


def rows(run: Path) -> dict[int, dict[str, Any]]:
    """Those of the first step, by their numbers."""
    tables = [pq.read_table(file).to_pylist() for file in sorted((run / "batches" / "step_000001").glob("rows_*.parquet"))]
    return {row["sample"]: row for table in tables for row in table}


@pytest.mark.timeout(590)
def test_early_log_probs_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    """The run's own dump is trained on again, where nothing is early: the same samples, and the same numbers but for rounding."""
    require("vllm")
    few = "actor_infer.strategy.max_running_requests=1"  # so that a batch takes many of the seconds that lie between two looks
    early = run(tmp_path / "early", *OWN_DEVICES, few, "rollout.dump=true", "rollout.stream_log_probs=true")
    whole = run(tmp_path / "whole", *OWN_DEVICES, "mode=train_only", f"replay.path={early}")
    (metrics,) = [record for line in (early / "metrics.jsonl").read_text().splitlines() if "time/step" in (record := json.loads(line))]
    assert 48 <= metrics["rollout/early_samples"] < 192, "a quarter at least, and not all"
    mine, its = rows(early), rows(whole)
    assert mine.keys() == its.keys() and len(mine) > 0
    for sample, row in mine.items():
        for name in ("group", "input_ids", "response_mask", "rollout_log_probs", "score"):
            assert row[name] == its[sample][name], name
        for name in ("old_log_probs", "ref_log_probs", "values"):
            torch.testing.assert_close(torch.tensor(row[name]), torch.tensor(its[sample][name]), rtol=0, atol=1e-5)
