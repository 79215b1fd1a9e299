"""Whole runs of a model with experts whose updates use the engine's, or those of the pass that took the old log-probs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_harness import require
from support_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize("word", ["rollout", "train"])
def test_updates_with_other_experts_than_the_routers(tmp_path: Path, word: str) -> None:
    """In float32 engine and trainer choose alike with the same weights, so that a step's first update reroutes next to nothing; the second
    one, after large steps that an entropy bonus takes, would reroute many."""
    require("sglang")
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", hidden=128, layers=4, tied=False, num_experts=8, sharpness=2.0)
    command = [
        sys.executable,
        "examples/start_rlvr_pipeline.py",
        "--config-name",
        "tiny_grpo",
        f"run_dir={tmp_path}",
        f"model.path={model}",
    ]
    options = ["actor_infer.strategy.name=sglang", "steps=2", "rollout.prompts_per_step=8", "validation.enabled=false"]
    options += [
        "algorithm.old_log_probs=recompute",
        "algorithm.mini_batches=2",
        "algorithm.entropy_coef=0.3",
        "actor_train.optimizer.lr=1e-3",
    ]
    subprocess.run([*command, *options, f"algorithm.routing_replay={word}"], cwd=ROOT, check=True, timeout=240)
    steps, updates = (lines_of(tmp_path / "latest" / name) for name in ("metrics.jsonl", "updates.jsonl"))
    assert [update["actor/rerouted"] for update in updates[::2]] == pytest.approx([0, 0], abs=1e-3)
    assert all(update["actor/rerouted"] > 0.01 for update in updates[1::2])
    assert all(step["mismatch/mean"] < 1e-4 for step in steps)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
