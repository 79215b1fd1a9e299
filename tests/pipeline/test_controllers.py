"""The driver's own state: KL controllers and reward moments, stepped once per step and saved. Clusters are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_lite.config.loading import load_config
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.proto import DataProto
from roll_lite.distributed.dataflow import Batch
from roll_lite.distributed.strategy.base import TrainResult
from roll_lite.observability.timers import StepTimers
from roll_lite.pipeline import rlvr
from roll_lite.pipeline.rlvr import RLVRPipeline, per_token
from roll_lite.workers.model import Update

ROOT = Path(__file__).resolve().parents[2]
NOTHING_SAID = {"resumed": lambda *_: None, "skipped": lambda *_: None}
ADAPTIVE = "{name: adaptive, target: 0.1, horizon: 100}"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    terms = [f"algorithm.{term}={{coef: 0.5, controller: {ADAPTIVE}}}" for term in ("kl_in_reward", "kl_in_loss")]
    return load_config(
        "tiny_ppo", ROOT / "examples/configs", [*terms, "algorithm.reward.normalize={over: running}", "rollout.max_mismatch=null"]
    )


def pipeline(config: RunConfig, checkpoints: Any = None, **parts: Any) -> RLVRPipeline:
    ledger = SimpleNamespace(updates=lambda *_: None)
    silent = SimpleNamespace(timers=StepTimers(), ledger=ledger, credit=lambda *_: None, updates=lambda *_: None, **NOTHING_SAID)
    return RLVRPipeline(config, SimpleNamespace(critic=None, **parts), None, silent, checkpoints, None)  # type: ignore[arg-type]


def batch(samples: int) -> Batch:
    """So many that train, and five that do not: nothing was measured on those."""
    weights = torch.cat([torch.ones(samples), torch.zeros(5)])
    return Batch(DataProto({"sample": torch.arange(samples + 5), "train_weight": weights}))


def test_mistake_11_the_controller_of_the_reward_is_stepped_once_per_step_over_all_domains_and_ranks(config: RunConfig) -> None:
    """KL of 0.2 per token over two ranks and three domains: twice the target, so the limit of 0.2 times 20 / 100 samples."""
    reports = [
        SimpleNamespace(
            block=None,
            mismatch={},
            sums={"credit/kl_in_reward#0": 3.0, "credit/tokens#0": 10.0, "credit/kl_in_reward#1": 0.0, "credit/tokens#1": 0.0},
        ),
        SimpleNamespace(block=None, mismatch={}, sums={"credit/kl_in_reward#2": 1.0, "credit/tokens#2": 10.0}),
    ]
    actor = SimpleNamespace(ranks=SimpleNamespace(heads_scatter=lambda *_: reports), shards=lambda *_: [])
    made = pipeline(config, actor=actor)
    rows = batch(20)
    rows.add = lambda blocks: None  # type: ignore[method-assign]
    made.assign_credit(rows)
    assert made.kl_in_reward.coef == 0.5, "while the critic warms up"
    made.steps_done = config.algorithm.critic_warmup_steps
    made.assign_credit(rows)
    assert made.kl_in_reward.coef == pytest.approx(0.5 * (1 + 0.2 * 0.2))
    assert made.kl_in_loss.coef == 0.5


def test_the_controller_of_an_abs_term_looks_at_a_kl(config: RunConfig) -> None:
    """|log-ratio| has mean 0.2, above the target of 0.1, where k3 is 0.02, below it."""
    sums = {"credit/kl_in_reward#0": 2.0, "credit/kl_ref#0": 0.2, "credit/tokens#0": 10.0}
    actor = SimpleNamespace(
        ranks=SimpleNamespace(heads_scatter=lambda *_: [SimpleNamespace(block=None, mismatch={}, sums=sums)]), shards=lambda *_: []
    )
    term = config.algorithm.kl_in_reward.model_copy(update={"estimator": "abs"})
    made = pipeline(config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_in_reward": term})}), actor=actor)
    rows = batch(20)
    rows.add = lambda blocks: None  # type: ignore[method-assign]
    made.steps_done = config.algorithm.critic_warmup_steps
    made.assign_credit(rows)
    assert made.kl_in_reward.coef == pytest.approx(0.5 * (1 - 0.2 * 0.2))


def test_the_controller_of_the_loss_sees_all_updates_but_those_that_were_skipped(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(kl: float, skipped: bool = False) -> Update:
        return Update(0, TrainResult({"actor/kl_ref#0": kl, "actor/tokens#0": 10.0}, 0.0, 1.0, 1e-3, skipped), {})

    monkeypatch.setattr(rlvr, "take_turns", lambda *_: [[[update(0.5), update(float("nan"), skipped=True), update(1.0)]]])
    monkeypatch.setattr(RLVRPipeline, "cut", lambda self, batch: [None] * 3)
    actor = SimpleNamespace(ranks=SimpleNamespace(start_scatter=lambda *_: None), shares=lambda *_: [])
    made = pipeline(config, actor=actor)
    made.batch_files = SimpleNamespace(write_supervised=lambda *_: None, write_skipped=lambda *_: None)  # type: ignore[assignment]
    made.steps_done = config.algorithm.critic_warmup_steps
    made.train(batch(50))
    assert made.kl_in_loss.coef == pytest.approx(0.5 * (1 - 0.2 * 0.5)), "1.5 / 20 is below 0.1 by more than a fifth"


@pytest.mark.parametrize(("mini_batches", "first"), [(4, [(20 - 2) * 2 * 4, 20 * 2 * 4]), (1, [(20 - 2) * 2, 20 * 2])])
def test_the_schedules_place_follows_from_the_step_whatever_was_left_out_before(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, mini_batches: int, first: list[int]
) -> None:
    """Of an actor that starts after two steps, and of a critic, in step 21 with two epochs."""
    told: list[int] = []
    role = SimpleNamespace(ranks=SimpleNamespace(start_scatter=lambda *_: None), shares=lambda *given: told.append(given[-1]) or [])
    monkeypatch.setattr(rlvr, "take_turns", lambda *_: [[[]], [[]]])
    monkeypatch.setattr(RLVRPipeline, "cut", lambda self, batch: [])
    algorithm = config.algorithm.model_copy(update={"mini_batches": mini_batches, "ppo_epochs": 2, "critic_warmup_steps": 2})
    made = pipeline(config.model_copy(update={"algorithm": algorithm}), actor=role)
    made.models.critic = role  # type: ignore[assignment]
    made.batch_files = SimpleNamespace(write_supervised=lambda *_: None)  # type: ignore[assignment]
    made.steps_done = 20
    made.train(batch(5))
    assert told == first


def test_mistake_11_controllers_and_moments_go_through_the_checkpoint(config: RunConfig) -> None:
    first = pipeline(config)
    first.steps_done = 7
    first.kl_in_reward.coef, first.kl_in_loss.coef = 0.25, 0.75
    first.shaping.load_state_dict({"running": {"count": 9, "mean": 0.3, "squares": 2.0}})
    saved = first.state_dict()
    second = pipeline(config, checkpoints=SimpleNamespace(load=lambda clusters, source: saved, continues_in_folder=False, newest=None))
    second.resume()
    assert second.steps_done == 7
    assert (second.kl_in_reward.coef, second.kl_in_loss.coef) == (0.25, 0.75)
    assert second.state_dict() == saved
    del saved["kl_in_reward"]  # as Checkpoints does where its settings have changed
    third = pipeline(config, checkpoints=SimpleNamespace(load=lambda clusters, source: saved, continues_in_folder=False, newest=None))
    third.resume()
    assert (third.kl_in_reward.coef, third.kl_in_loss.coef) == (0.5, 0.75)


def test_a_mean_over_tokens_is_taken_over_sums() -> None:
    parts = [{"kl#0": 1.0, "n#0": 10.0, "kl#1": 3.0, "n#1": 10.0}, {"kl#0": 0.0, "n#0": 20.0}]
    assert per_token(parts, "kl", "n") == pytest.approx(0.1)
    assert per_token([], "kl", "n") == 0.0
