"""What trainers of several ranks send, against the checkpoint that they have read: names, shapes and values, before and after all of them
have changed. The receiver keeps it as it comes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_ranks import RankPool
from support_models import by_checkpoint, load_hf, make_tiny_model, make_tiny_reward_model
from trainer_ranks import Trainer, nudge
from transformers import AutoModelForSequenceClassification

from roll_lite.config.schema.models import VllmStrategyConfig
from roll_lite.distributed.weight_sync.endpoints import WeightReceiver
from roll_lite.distributed.weight_sync.plan import TransferPlan, by_bucket

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]
NIGHTLY = pytest.mark.nightly

ONE_WORKER = VllmStrategyConfig()
TP2, PP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}


def taken(receiver: WeightReceiver, plan: TransferPlan) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for routes in by_bucket(plan.routes):
        receiver.load([route.plain() for route in routes], lambda again: None, held.update)
    receiver.finish(lambda: None)
    return held


async def assert_arrives(trainer: Trainer, model: Any, tied: bool = False) -> None:
    plan, membership = await trainer.plan()
    receiver = WeightReceiver()
    await asyncio.to_thread(receiver.connect, membership.plain(), plan.first_member(0))
    for _ in range(2):
        held = await asyncio.to_thread(taken, receiver, plan)
        expected = by_checkpoint(model.state_dict())
        if tied:
            del expected["lm_head.weight"]
        assert held.keys() == expected.keys()
        for name, tensor in held.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)
        with torch.no_grad():
            for parameter in model.parameters():
                nudge(parameter)
    await asyncio.to_thread(trainer.done.result)


@NIGHTLY
@pytest.mark.parametrize("layout", [TP2, PP2], ids=["TP2", "PP2"])
async def test_a_value_model(layout: dict[str, int], ranks: RankPool, tmp_path: Path) -> None:
    """A critic's or reward model's body and head."""
    path = make_tiny_reward_model(tmp_path / "model", "llama")
    trainer = Trainer(ranks, 2, path, tmp_path / "trainer", ONE_WORKER, "auto", torch.float32, value_init="reward_model", **layout)
    await assert_arrives(trainer, AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32))


@pytest.mark.parametrize("layout", [pytest.param(TP2, id="TP2", marks=NIGHTLY), pytest.param(PP2, id="PP2")])
async def test_tied_embeddings(layout: dict[str, int], ranks: RankPool, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", "qwen2")
    trainer = Trainer(ranks, 2, path, tmp_path / "trainer", ONE_WORKER, "gloo", torch.float32, **layout)
    await assert_arrives(trainer, load_hf(path), tied=True)


@NIGHTLY
async def test_experts_of_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", "qwen3_moe", tied=False)
    trainer = Trainer(ranks, 2, path, tmp_path / "trainer", ONE_WORKER, "auto", torch.float32, expert_parallel=2)
    await assert_arrives(trainer, load_hf(path))
