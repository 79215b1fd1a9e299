"""When the actor stops early."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.distributed.strategy.base import TrainResult
from roll_lite.workers.actor import ActorWorker, moved_too_far
from roll_lite.workers.objectives import ActorLoss


def sums(*by_domain: tuple[float, float]) -> dict[str, float]:
    found: dict[str, float] = {"actor/loss": 1.0}
    for number, (kl, tokens) in enumerate(by_domain):
        found |= {f"actor/approx_kl#{number}": kl, f"actor/tokens#{number}": tokens}
    return found


@pytest.mark.parametrize(
    ("metrics", "limit", "far"),
    [
        (sums((1.0, 10.0), (0.0, 10.0)), 0.04, True),
        (sums((1.0, 10.0), (0.0, 10.0)), 0.05, False),
        (sums((1.0, 10.0)), None, False),
        (sums((0.0, 0.0)), 0.1, False),
        (sums((math.nan, 10.0)), 0.1, True),
    ],
)
def test_how_far_is_too_far(metrics: dict[str, float], limit: float | None, far: bool) -> None:
    assert moved_too_far(metrics, limit) is far


def test_the_rest_of_the_updates_is_left_out_once_the_policy_has_moved_too_far() -> None:
    results = [TrainResult(sums((kl, 10.0)), 0.0, 1.0, 1e-3) for kl in (0.1, 3.0, 0.1)]
    made: list[int] = []

    def train(share: Any, loss: Any, outputs: Any) -> Any:
        for number, result in enumerate(results):
            made.append(number)
            yield SimpleNamespace(epoch=0), result

    def run(limit: float | None) -> int:
        made.clear()
        worker = SimpleNamespace(_train=train, loss=ActorLoss(), algorithm=AlgorithmConfig(early_stop_kl=limit))
        return len(ActorWorker.train(worker, None, 0.0))  # type: ignore[arg-type]

    assert run(0.2) == 2 and made == [0, 1], "the third update was not made"
    assert run(None) == 3


@pytest.mark.parametrize(
    ("old", "told"), [("current", [True, False, False]), ("rollout", [True, False, False]), ("recompute", [False] * 3)]
)
def test_engine_and_trainer_are_compared_once_before_anything_is_learnt(old: Any, told: list[bool]) -> None:
    """Where the old log-probs are recomputed, credit has compared them before the first update."""
    loss = ActorLoss(old_log_probs=old)

    def train(share: Any, loss: ActorLoss, outputs: Any) -> Any:
        for _ in range(3):
            loss.peaks.record("mismatch/max", torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))
            yield SimpleNamespace(epoch=0), TrainResult({**sums((0.1, 10.0)), "mismatch/mean#0": 1.0}, 0.0, 1.0, 1e-3)

    worker = SimpleNamespace(_train=train, loss=loss, algorithm=AlgorithmConfig(old_log_probs=old))
    updates = ActorWorker.train(worker, None, 0.0)  # type: ignore[arg-type]
    assert ["mismatch/mean#0" in update.result.metrics for update in updates] == told
    assert ["mismatch/max#0" in update.peaks for update in updates] == told
