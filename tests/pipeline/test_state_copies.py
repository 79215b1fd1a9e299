"""Copies of training ranks' state, with the real Megatron-Core and the real Ray: they outlive the ranks, and nothing is lost in them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_models import make_tiny_model

from roll_lite.config.loading import load_config
from roll_lite.distributed.cluster import ClusterSpec, RankFailed, start_cluster
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.distributed.worker import Worker
from roll_lite.observability.timers import StepTimers
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.checkpoint import Checkpoints
from roll_lite.pipeline.clusters import Model, Models, initialize
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.model import ModelRole, ModelWorker
from tests.pipeline.test_device_memory import batch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_new_ranks_go_on_from_a_copy_as_the_old_ones_would_have(ray_local: object, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    make_tiny_model(tmp / "model")
    settings = [f"model.path={tmp}/model", "actor_train.offload=true", "deterministic=true", "rollout.max_mismatch=null"]
    config = load_config("tiny_grpo", ROOT / "examples/configs", [*settings, "algorithm.mini_batches=1"])
    role = ModelRole(config.model, config.actor_train, 10, seed=1, deterministic=True)
    ranks = start_cluster(ClusterSpec("actor_train", anywhere(2)), ActorWorker, role, config.algorithm, 1)
    models = Models(Model(ranks, config.actor_train, ActorWorker))
    silent: Any = SimpleNamespace(
        timers=StepTimers(), ledger=SimpleNamespace(updates=lambda *_: None), credit=lambda *_: None, updates=lambda *_: None
    )
    checkpoints = Checkpoints(config, tmp)
    pipeline = RLVRPipeline(config, models, None, silent, checkpoints, BatchFiles(config, tmp))  # type: ignore[arg-type]

    def step() -> list[dict[str, str]]:
        pipeline.steps_done = 0  # it decides about the order of rows
        rows = batch()
        pipeline.compute_log_probs(rows)
        pipeline.assign_credit(rows)
        pipeline.train(rows)
        with models.actor.loaded(tuple(StateGroup)):
            return ranks.all(ModelWorker.replica_checksums)

    initialize(models.all)
    first = step()
    checkpoints.copy_state(models, {"prompts": 8}, {"steps_done": 1})
    straight = step()
    assert first != straight
    os.kill(ranks.all(Worker.place)[1].pid, signal.SIGKILL)
    with pytest.raises(RankFailed):
        step()
    ranks.rebuild()
    initialize(models.all)
    found = checkpoints.go_back(models)
    assert found is not None and (found["pipeline"], found["rollouts"]) == ({"steps_done": 1}, {"prompts": 8})
    assert step() == straight
    ranks.shutdown()
