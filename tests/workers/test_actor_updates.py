"""When the actor stops early."""

from __future__ import annotations

import math
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.losses import PolicyGradientLossConfig
from roll_lite.config.schema.models import TrainRoleConfig
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.base import TrainResult
from roll_lite.workers.actor import ActorWorker, moved_too_far
from roll_lite.workers.model import TrainShare, Update
from roll_lite.workers.objectives import ActorLoss
from roll_lite.workers.phases import RankPhases


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
    """One that was skipped has moved nothing."""
    results = [TrainResult(sums((kl, 10.0)), 0.0, 1.0, 1e-3, skipped=math.isnan(kl)) for kl in (math.nan, 0.1, 3.0, 0.1)]
    made: list[int] = []

    def train(share: Any, loss: Any) -> Any:
        for number, result in enumerate(results):
            made.append(number)
            yield Update(0, result)

    def run(limit: float | None) -> int:
        made.clear()
        worker = SimpleNamespace(_train=train, loss=ActorLoss(), algorithm=AlgorithmConfig(early_stop_kl=limit))
        return len(ActorWorker.train(worker, None, 0.0))  # type: ignore[arg-type]

    assert run(0.2) == 3 and made == [0, 1, 2], "the last update was not made"
    assert run(None) == 4


def trained(results: list[TrainResult], losses: dict[int, float], supervised: DataProto | None = None) -> list[Update]:
    """By a worker with three samples in every mini-batch, and these rows beside them, whose strategy reports these results and knows these
    log-probs of each one's tokens."""
    rows = DataProto(
        {
            "sample": torch.tensor([4, 5, 6]),
            "domain_number": torch.zeros(3, dtype=torch.int64),
            "input_ids": Ragged.from_rows([torch.arange(length) for length in (2, 4, 3)]),
            "response_mask": Ragged.from_rows([torch.arange(length) > 0 for length in (2, 4, 3)]),
            "advantages": Ragged.from_rows([torch.full((length - 1,), 2.0) for length in (2, 4, 3)]),
        }
    )

    def forward(batch: DataProto, outputs: Any, plan: Any) -> DataProto:
        assert tuple(outputs) == ("log_probs",)
        found = [torch.full((int(length) - 1,), losses[int(sample)]) for sample, length in zip(batch["sample"], batch.lengths, strict=True)]
        return DataProto({"log_probs": Ragged.from_rows(found)})

    reports = iter(results)
    strategy = SimpleNamespace(
        plan=lambda *_: None,
        set_schedule=lambda _: None,
        forward=forward,
        train_step=lambda *_: next(reports),
        layout=SimpleNamespace(attention_parity_tokens=math.inf),
    )
    loss = ActorLoss(PolicyGradientLossConfig(), old_log_probs="current", measure_entropy=False)
    role = SimpleNamespace(config=TrainRoleConfig(), model_spec=SimpleNamespace(lora=None))
    phases = RankPhases("actor_train-0", Path("none"))
    worker: Any = SimpleNamespace(strategy=strategy, spec=role, loss=loss, algorithm=AlgorithmConfig(), phases=phases)
    worker._count = lambda *_: None
    for name in ("_train", "_row_losses", "_forward_budget", "_budget"):
        setattr(worker, name, MethodType(getattr(ActorWorker, name), worker))
    mini_batches = [MiniBatch(epoch, np.array([4, 5, 6]), np.array([0.5, 1.0, 0.25], dtype=np.float32)) for epoch in range(len(results))]
    shard: Any = SimpleNamespace(materialize=lambda: rows)
    return ActorWorker.train(worker, TrainShare(shard, mini_batches, 0, [] if supervised is None else [supervised] * len(results)), 0.0)


def test_the_first_skipped_update_of_several_is_told_with_the_loss_of_every_row() -> None:
    """-advantage x log-prob of each token, times the row's weight, summed over its tokens: 1, 3 and 2 of them."""
    fine, broken = (TrainResult({}, 0.0, 1.0, 1e-3, skipped) for skipped in (False, True))
    updates = trained([fine, broken, broken, fine, broken], {4: -0.5, 5: math.nan, 6: -0.25})
    assert [sorted(one.row_losses) for one in updates] == [[], [4, 5, 6], [], [], [4, 5, 6]]
    assert [one.epoch for one in updates] == list(range(5))
    told = updates[1].row_losses
    assert told[4] == pytest.approx(0.5) and math.isnan(told[5]) and told[6] == pytest.approx(2 * 0.25 * 2 * 0.25)
    assert all(one.peaks == {} and one.ratios is not None and not one.ratios.any() for one in updates), "ratios count in training alone"


def test_supervised_rows_have_a_loss_of_their_own() -> None:
    """Cross-entropy of the two tokens that are learned, times 0.5 each; the samples' losses are what they are without them."""
    ids, learned = (Ragged.from_rows([row, row]) for row in (torch.arange(4), torch.tensor([False, False, True, True])))
    columns = {"sample": torch.tensor([-2, -1]), "input_ids": ids, "response_mask": learned, "ptx_weight": torch.tensor([0.5, 0.5])}
    broken = TrainResult({}, 0.0, 1.0, 1e-3, True)
    (update,) = trained([broken], {4: -0.5, 5: -0.5, 6: -0.25, -2: -3.0, -1: math.nan}, DataProto(columns))
    assert update.row_losses.keys() == {4, 5, 6, -2, -1} and math.isnan(update.row_losses[-1])
    assert (update.row_losses[-2], update.row_losses[4]) == pytest.approx((3.0, 0.5))


@pytest.mark.parametrize(
    ("old", "told"), [("current", [True, False, False]), ("rollout", [True, False, False]), ("recompute", [False] * 3)]
)
def test_engine_and_trainer_are_compared_once_before_anything_is_learnt(old: Any, told: list[bool]) -> None:
    """Where the old log-probs are recomputed, credit has compared them before the first update."""
    loss = ActorLoss(old_log_probs=old)

    def train(share: Any, loss: ActorLoss) -> Any:
        for _ in range(3):
            loss.peaks.record("mismatch/max", torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))
            yield Update(0, TrainResult({**sums((0.1, 10.0)), "mismatch/mean#0": 1.0}, 0.0, 1.0, 1e-3))

    worker = SimpleNamespace(_train=train, loss=loss, algorithm=AlgorithmConfig(old_log_probs=old))
    updates = ActorWorker.train(worker, None, 0.0)  # type: ignore[arg-type]
    assert ["mismatch/mean#0" in update.result.metrics for update in updates] == told
    assert ["mismatch/max#0" in update.peaks for update in updates] == told
