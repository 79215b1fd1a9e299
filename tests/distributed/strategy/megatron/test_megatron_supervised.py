"""Supervised rows beside the policy's, through the actor's own training: the gradient is the policy's plus coef times that of transformers'
cross-entropy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_cases import assert_same, batch_of, hf_log_probs, own_gradients, shard, started, tiny
from megatron_ranks import RankPool
from support_models import load_hf

from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.losses import PolicyGradientLossConfig
from roll_lite.config.schema.models import ModelConfig, OptimizerConfig, TrainRoleConfig
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.models.hf_config import read_hf_config
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.model import ModelRole, TrainShare, Update
from roll_lite.workers.objectives import ActorLoss
from roll_lite.workers.phases import RankPhases

NO_CLIPPING = OptimizerConfig(lr=1e-30, clip_grad=0.0)
COEF, WEIGHT = 0.7, 0.25
LEARNED = [(range(5, 11), 2), (range(40, 44), 0), (range(60, 70), 7)]
"""Token ids, and the first that is learned."""


def supervised() -> DataProto:
    rows = [torch.tensor(list(ids)) for ids, _ in LEARNED]
    masks = [torch.arange(len(ids)) >= first for ids, first in LEARNED]
    targets = sum(int(mask[1:].sum()) for mask in masks)
    return DataProto(
        {
            "sample": torch.arange(-3, 0),
            "input_ids": Ragged.from_rows(rows),
            "response_mask": Ragged.from_rows(masks),
            "temperature": torch.ones(3),
            "ptx_weight": torch.full((3,), COEF / targets),
        }
    )


def by_hugging_face(path: Path, batch: DataProto) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The policy's loss, the mean cross-entropy by transformers' own labels, and the gradient of policy + COEF * cross-entropy."""
    model = load_hf(path)
    policy = torch.zeros(())
    for row in range(len(batch)):
        ids, mask = batch.ragged("input_ids").row(row), batch.ragged("response_mask").row(row)[1:]
        log_probs, _ = hf_log_probs(model, ids, batch.tensor("temperature")[row])
        policy = policy - WEIGHT * (batch.ragged("advantages").row(row) * log_probs * mask).sum()
    total, count = torch.zeros(()), 0
    for ids, first in LEARNED:
        tokens = torch.tensor([list(ids)])
        labels = tokens.clone()
        labels[:, :first] = -100
        targets = len(ids) - max(first, 1)
        total, count = total + targets * model(input_ids=tokens, labels=labels).loss, count + targets
    (policy + COEF * total / count).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return policy.item(), float(total.detach()) / count, gradients


def trained(path: Path, layout: dict[str, Any]) -> tuple[list[Update], dict[str, torch.Tensor]]:
    """The second data-parallel rank has no row of the policy's, and one of the supervised."""
    strategy = started(path, NO_CLIPPING, distributed_optimizer=False, **layout)
    halves = strategy.layout.data_size == 2
    own = shard(batch_of().with_columns(domain_number=torch.zeros(6, dtype=torch.int64)), strategy, [6, 0] if halves else None)
    further = shard(supervised(), strategy, [2, 1] if halves else None)
    samples = own.tensor("sample").numpy()
    weights = np.full(len(samples), WEIGHT, dtype=np.float32)
    worker: Any = ActorWorker.__new__(ActorWorker)
    role = TrainRoleConfig(train_micro_batch_tokens=20)
    worker.strategy, worker.spec = strategy, ModelRole(ModelConfig(path=path), role, total_updates=0, seed=0, deterministic=False)
    worker.phases, worker._architecture = RankPhases("actor_train-0", Path("none")), read_hf_config(path)
    worker.algorithm = AlgorithmConfig(old_log_probs="current")
    worker.loss = ActorLoss(PolicyGradientLossConfig(), old_log_probs="current", measure_entropy=False)
    share: Any = SimpleNamespace(materialize=lambda: own)
    return worker.train(TrainShare(share, [MiniBatch(0, samples, weights)], 0, [further]), 0.0), own_gradients(strategy)


LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "DP2": {"data": 2},
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "CP2": {"context_parallel": 2},
    "VPP2": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
}
NIGHTLY = ("CP2", "VPP2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in LAYOUTS])
def test_the_gradient_is_hugging_faces(ranks: RankPool, tmp_path: Path, name: str) -> None:
    path, batch = tiny(tmp_path / "model", "qwen3", layers=4 if name == "VPP2" else 2), batch_of()
    options = {size: value for size, value in LAYOUTS[name].items() if size != "data"}
    policy, cross_entropy, expected = by_hugging_face(path, batch)
    gathered: dict[str, torch.Tensor] = {}
    for updates, gradients in ranks(1 if name == "one rank" else 2, trained, path, options):
        (update,) = updates
        metrics, targets = update.result.metrics, 4 + 3 + 3
        assert metrics["actor/ptx_tokens"] == targets
        assert metrics["actor/ptx_loss"] / targets == pytest.approx(cross_entropy, rel=1e-5)
        assert metrics["actor/policy_loss"] == pytest.approx(policy, rel=1e-5, abs=1e-5)
        assert metrics["actor/loss"] == pytest.approx(policy + COEF * cross_entropy, rel=1e-5, abs=1e-5)
        assert update.result.loss == pytest.approx(metrics["actor/loss"], rel=1e-5, abs=1e-5)
        counted = sum(int(batch.ragged("response_mask").row(row)[1:].sum()) for row in range(len(batch)))
        assert metrics["actor/tokens#0"] == counted, "the policy's own"
        assert update.ratios is not None and int(update.ratios.sum()) in (counted, 0), "and ratios are of these alone"
        gathered |= gradients
    assert_same(gathered, expected)
