"""Whole runs of a model with experts, which trainer and engines share out to their ranks and workers, each in its own way."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_harness import Make, require
from support_models import make_tiny_model

from tests.integration.test_runs import SMALL, Run

STEPS = 3


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "trainer", "engines", "transport"),
    [
        pytest.param("vllm", "{expert_parallel: 2}", 2, "gloo", id="vllm-EP2 to two engines"),
        pytest.param("sglang", "{tensor_parallel: 2, sequence_parallel: true, expert_parallel: 2}", 1, "auto", id="sglang-TP2 x EP2"),
    ],
)
def test_experts_reach_the_workers_that_have_them(make: Make, trainer: str, engines: int, transport: str, tmp_path: Path) -> None:
    """Every update is read back from the engines, whole, and compared with what the trainer has."""
    require(make)
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", hidden=128, layers=3, tied=False, num_experts=8, sharpness=2.0)
    settings = [
        f"model.path={model}",
        "actor_train.devices=2",
        f"actor_train.strategy={trainer}",
        f"actor_infer.devices={2 * engines}",
        f"actor_infer.strategy={make}",
        "actor_infer.strategy.tensor_parallel=2",
        "actor_infer.strategy.expert_parallel=2",
        f"weight_sync.transport={transport}",
        "weight_sync.verify=full",
        "actor_train.optimizer.lr=1e-3",
        "algorithm.entropy_coef=0.3",  # a random model has no answer right
        f"steps={STEPS}",
    ]
    run = Run(tmp_path, "tiny_grpo", *SMALL, *settings)
    code, output = run.finish(500)
    assert code == 0, output
    steps = [record for record in run.metrics() if "time/step" in record]
    assert [record["sync/version"] for record in steps] == list(range(STEPS))
    assert all(record["mismatch/mean"] < 1e-4 for record in steps), "log-probs of rollouts are the trainer's"
    assert all(record["actor/grad_norm"] > 0 for record in steps), "every update brings other weights"
