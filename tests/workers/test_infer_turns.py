"""Engines that share a GPU start one after the other, and tell their memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from rollout_cases import toy_model
from support_scripted import ScriptedWorker, scripted_spec

from roll_lite.config.schema.models import InferRoleConfig
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.failures import MemberLost
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.strategy.inference.life import EngineState
from roll_lite.observability.device_memory import PeaksByPhase
from roll_lite.pipeline.clusters import Engines, Models
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.phases import PhaseWork


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
        assert Models(None, engines=engines).take_work() == {"actor_infer": [{}, {}, {}, {}]}, "there is no GPU"
    finally:
        engines.replicas.shutdown()


@pytest.mark.parametrize(("state", "leaves"), [("serving", True), ("updating", False), ("half updated", False)])
async def test_an_engine_stays_on_its_device_in_a_weight_update(state: str, leaves: bool) -> None:
    worker, moved = InferWorker.__new__(InferWorker), list[Any]()

    async def offload(parts: Any) -> None:
        moved.append(parts)

    worker._strategy = cast(Any, SimpleNamespace(life=SimpleNamespace(state=EngineState(state)), offload=offload))
    await worker.leave_device(("weights",))  # type: ignore[arg-type]
    assert moved == ([("weights",)] if leaves else [])


@pytest.mark.parametrize(("is_first", "version"), [(True, 0), (True, 1), (False, 0)])
async def test_what_an_engine_raises_before_its_first_weights_ends_the_run_only_if_all_would_raise_it(is_first: bool, version: int) -> None:
    worker, given_up = InferWorker.__new__(InferWorker), list[str]()
    worker._is_first, worker._version = is_first, version

    async def health() -> Any:
        return SimpleNamespace(alive=True)

    async def load(parts: Any) -> None:
        raise ValueError("no such device")

    worker._strategy = cast(Any, SimpleNamespace(health=health, load=load, fail=given_up.append, life=SimpleNamespace(failure=None)))
    with pytest.raises(ValueError if is_first and version == 0 else MemberLost, match="no such device"):
        await worker.load(())
    assert given_up == ([] if is_first and version == 0 else ["ValueError: no such device"])


class Told:
    """A strategy that tells its workers' memory once."""

    async def take_memory(self) -> PeaksByPhase:
        return {"generate": {"device": 5}}


@pytest.mark.parametrize(("lost", "asked"), [({1: "died"}, True), ({0: "died", 1: "died"}, False)])
async def test_engines_that_are_left_tell_their_memory(lost: dict[int, str], asked: bool) -> None:
    """Where all are lost, another call finds that out and says what follows."""
    worker = InferWorker.__new__(InferWorker)
    worker._strategy = cast(Any, Told())
    own = await worker.take_work()
    assert own == {"generate": PhaseWork(None, memory={"device": 5})}
    replicas = SimpleNamespace(name="actor_infer", lost=lost, world_size=2, each=lambda method: {0: own})
    work = Models(None, engines=cast(Any, SimpleNamespace(replicas=replicas))).take_work()
    assert work == ({"actor_infer": [own]} if asked else {})
