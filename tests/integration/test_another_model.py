"""A run whose engines hold another model than its trainer: what must never complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_runs import SMALL, Run

OTHER_ROPE = "{hf_overrides: {rope_parameters: {rope_type: default, rope_theta: 3.0}}}"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("old", ["rollout", "recompute", "current"])
def test_an_engine_with_another_rope_ends_the_run_at_its_first_batch(tmp_path: Path, old: str) -> None:
    run = Run(
        tmp_path,
        "tiny_grpo",
        *SMALL,
        "steps=3",
        "checkpoint.every=1",
        f"algorithm.old_log_probs={old}",
        f"actor_infer.strategy.engine_args={OTHER_ROPE}",
    )
    code, output = run.finish()
    assert code == 1, output
    assert "engines and trainer disagree about the tokens of the first batch" in output and "rollout.max_mismatch allows 0.01" in output
    assert "engine_args change the model" in output
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == 0 and summary["exit"].startswith("failed: engines and trainer disagree")
    assert not (run.folder / "model").exists() and not list(run.folder.glob("checkpoints/*/state.json")), "nothing of it is kept"
