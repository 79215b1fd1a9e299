"""Engines that share a GPU start one after the other."""

from __future__ import annotations

from pathlib import Path

import ray
from rollout_cases import toy_model
from support_scripted import ScriptedWorker, scripted_spec

from roll_lite.config.schema.models import InferRoleConfig
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.placement import anywhere
from roll_lite.pipeline.clusters import Engines


def test_each_device_has_one_engine_that_starts(ray_local: object, tmp_path: Path) -> None:
    """Of two devices and two engines on each, in the order of their ranks."""
    spec = scripted_spec(toy_model(tmp_path), max_model_len=128, sharers=2)
    engines = Engines(start_cluster(ClusterSpec("actor_infer", anywhere(4)), ScriptedWorker, spec), InferRoleConfig(), turns=2)
    try:
        ready = {actor.until_ready.remote(): rank for rank, actor in enumerate(engines.replicas.actors)}
        engines.start_first_ones().result()
        first, _ = ray.wait(list(ready), num_returns=2, timeout=60)
        assert sorted(ready[ref] for ref in first) == [0, 2]
        assert ray.wait([ref for ref in ready if ref not in first], timeout=0)[0] == []
        engines.initialize_later_ones()
        assert len(ray.wait(list(ready), num_returns=4, timeout=60)[0]) == 4
    finally:
        engines.replicas.shutdown()
