"""Deterministic rollouts on the real engine: waves admitted while it is paused come out the same, to the last bit of the log-probs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_cases import changed, spec_of
from support_models import make_tiny_model

from roll_lite.config.schema.domains import DataConfig, DomainConfig, RewardConfig, RolloutConfig, SamplingConfig
from roll_lite.config.schema.models import ModelConfig, VllmStrategyConfig
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.dataflow import Batch
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.strategy.base import EngineSpec
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.rollout import RolloutWorker

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.usefixtures("ray_local")]


def one_run(model: ModelConfig, folder: Path) -> list[dict[str, Any]]:
    strategy = VllmStrategyConfig(kv_cache_mb=64, enforce_eager=True, max_running_requests=24)  # fewer than a wave: some must wait
    engines = start_cluster(ClusterSpec("actor_infer", anywhere(1)), InferWorker, EngineSpec(model, strategy, 64))
    domain = DomainConfig(
        data=DataConfig(train=folder / "train.jsonl"),
        sampling=SamplingConfig(max_tokens=40, temperature=0.7),
        reward=RewardConfig(name="exact"),
    )
    spec = changed(spec_of(model, folder), domains={"toy": domain}, rollout=RolloutConfig(samples_per_prompt=8), seed=5)
    spec = replace(spec, samples_folder=None)
    rollouts = start_cluster(ClusterSpec("rollouts", anywhere(1)), RolloutWorker, spec)
    try:
        engines.all(InferWorker.initialize)
        rollouts.one(RolloutWorker.prepare, {}, {})
        rollouts.one(RolloutWorker.initialize, engines.actors)
        columns = []
        for step in range(2):
            result = rollouts.one(RolloutWorker.next_batch, 8, step)
            (shard,) = Batch(result.rows, result.blocks).shards([np.arange(64)], ["input_ids", "rollout_log_probs"])
            batch = shard.materialize()
            columns.append({name: batch.ragged(name).values.tolist() for name in ("input_ids", "rollout_log_probs")})
        return columns
    finally:
        rollouts.shutdown()
        engines.shutdown()


def test_two_runs_agree_to_the_last_bit(tmp_path: Path) -> None:
    model = ModelConfig(path=make_tiny_model(tmp_path / "model"), dtype="float32")
    lines = [json.dumps({"prompt": f"{i} + {2 * i} =", "answer": str(3 * i)}) for i in range(30)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    first, second = (one_run(model, tmp_path) for _ in range(2))
    assert first == second
    assert len({tuple(columns["input_ids"]) for columns in first}) == 2
