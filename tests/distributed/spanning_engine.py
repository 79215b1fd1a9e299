"""A program: an engine with a worker on each of two Ray nodes, against the Hugging Face model. `spanning_engine.py MAKE FOLDER NAME`"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psutil
import ray
from engine_harness import PROMPT, SHARPNESS, export_plan, random_state
from support_models import load_hf, make_model, make_tiny_model

from roll_lite.config.schema.models import ModelConfig, SglangStrategyConfig, VllmStrategyConfig
from roll_lite.config.schema.run import PlacementConfig, RayConfig
from roll_lite.data.samples import GenerationRequest, Sampling
from roll_lite.distributed.cluster import Cluster, ClusterSpec, RankFailed, actor_options, start_cluster
from roll_lite.distributed.liveness import is_running
from roll_lite.distributed.placement import Placement
from roll_lite.distributed.ray_session import ray_session
from roll_lite.distributed.strategy.base import EngineSpec, TrainStrategy
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.weight_sync.endpoints import WeightSender
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, plan_transfers
from roll_lite.distributed.weight_sync.update import checksum, require_equal
from roll_lite.distributed.worker import ROLE
from roll_lite.workers.infer import InferWorker

LENGTH, PATIENCE_S = 24, 60.0


class Trainer:
    """One rank that owns everything."""

    def __init__(self) -> None:
        self.state = random_state("qwen2", True, 0)

    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        return export_plan(self.state)

    def export_bucket(self, tensors: Sequence[ExportedTensor]) -> dict[str, Any]:
        return {tensor.name: self.state[tensor.name] for tensor in tensors}


def greedy(engines: Cluster[InferWorker], name: str) -> list[int]:
    engines.one(InferWorker.submit, [GenerationRequest(name, PROMPT, Sampling(0.0, LENGTH))])
    while not (answer := engines.one(InferWorker.collect))[0].turns:
        pass
    collected, block = answer
    (turn,) = collected.turns
    assert turn.error is None, turn.error
    return block.ragged("input_ids").rows()[turn.tokens.row].tolist()[len(PROMPT) :]


def expected(model: Any) -> list[int]:
    import torch

    return model.generate(torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False)[0, len(PROMPT) :].tolist()


def processes(role: str) -> list[psutil.Process]:
    """Of a role: its actor's and all that it has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(ROLE) == role:
                found.append(process)
        except psutil.Error:
            continue
    return found


def update(engines: Cluster[InferWorker], seed: int) -> None:
    trainer = Trainer()
    sender = WeightSender(cast(TrainStrategy, trainer), 0)
    plan = plan_transfers(sender.export_plan(1 << 20), {0: 2})
    membership = plan.membership(1, "auto", "127.0.0.1", sender.host("127.0.0.1", PATIENCE_S), PATIENCE_S)
    trainer.state = random_state("qwen2", True, seed)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(sender.connect, plan, membership)
        joined = engines.one(InferWorker.connect_weights, plan.first_member(0), membership)
        assert joined.failure is None, joined.failure
        joining.result(PATIENCE_S)
        sending = pool.submit(sender.send)
        updated = engines.one(InferWorker.update_weights, plan.routes, 1)
        assert updated.failure is None, updated.failure
        sending.result(PATIENCE_S)
    held = engines.one(InferWorker.weight_checksums, list(trainer.state))
    require_equal({name: checksum(tensor) for name, tensor in trainer.state.items()}, held, "actor_infer[0]", 1)
    sender.leave()


def until_gone(ended: list[psutil.Process]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := [process for process in ended if is_running(process)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def lost_while_it_starts(engines: Cluster[InferWorker], role: str) -> None:
    """The further node's actor is killed while the engine waits for its workers: the start fails, and says why."""
    starting = engines.start_all(InferWorker.initialize)
    deadline = time.monotonic() + PATIENCE_S
    while not (hosts := [one for one in processes(f"{role}-0.node") if "EnginePartWorker.start" in " ".join(one.cmdline())]):
        assert time.monotonic() < deadline, "its actor was not started"
        time.sleep(0.1)
    hosts[0].kill()
    try:
        starting.result()
    except RankFailed as error:
        assert re.search(r"the engine's part on its node 1 \(\S+\): its process died", str(error)), error
    else:
        raise AssertionError("the engine started without a part of it")
    ended = [*processes(f"{role}-0.node"), *processes(role)]
    engines.shutdown()
    until_gone(ended)


def lost_with_its_part(engines: Cluster[InferWorker], role: str) -> None:
    """A worker of the further node is killed: that is the end of the engine, and nothing of it stays on any node."""
    of_part, of_engine = processes(f"{role}-0.node"), processes(role)
    workers = [process for process in of_part if "EnginePartWorker" not in " ".join(process.cmdline())]
    assert workers and of_engine, (of_part, of_engine)
    max(workers, key=lambda process: process.memory_info().rss).kill()
    try:
        ray.get(engines.actors[0].until_death.remote(), timeout=PATIENCE_S)
    except ray.exceptions.RayTaskError as error:
        assert "part on its node 1" in str(error.cause), error
    else:
        raise AssertionError("until_death returned")
    ray.kill(engines.actors[0])  # as the fleet does
    until_gone([*of_part, *of_engine])


def main(make: str, folder: Path, role: str) -> None:
    make_tiny_model(folder, "qwen2", True, sharpness=SHARPNESS)
    kind = {"vllm": VllmStrategyConfig, "sglang": SglangStrategyConfig}[make]
    strategy = kind(tensor_parallel=2, kv_cache_mb=64, max_running_requests=4)
    with ray_session(RayConfig(), None) as session:
        assert not session.started
        place = Placement({role: 2}, 60.0, PlacementConfig(nodes=2, devices_per_node=1))
        assert place.devices[0].node != place.devices[1].node
        (slots,) = place.slots_by_node(role, 2)
        part = actor_options(ClusterSpec(f"{role}-0.node", slots), 1)
        spec = EngineSpec(ModelConfig(path=folder, dtype="float32"), strategy, 128)
        lost_while_it_starts(start_cluster(ClusterSpec(role, slots[:1]), InferWorker, spec, [[part]]), role)
        engines = start_cluster(ClusterSpec(role, slots[:1]), InferWorker, spec, [[part]])
        started = time.monotonic()
        (told,) = engines.all(InferWorker.initialize)
        assert told.nodes == {device.node for device in place.devices.values()} and told == engines.one(InferWorker.place)
        print(f"started in {time.monotonic() - started:.1f} s", file=sys.stderr)
        assert greedy(engines, "before") == expected(load_hf(folder))
        update(engines, seed=3)
        changed = expected(make_model("qwen2", True, seed=3, sharpness=SHARPNESS).eval())
        assert greedy(engines, "after") == changed != expected(load_hf(folder))
        engines.one(InferWorker.offload, tuple(EngineMemory))
        engines.one(InferWorker.load, tuple(EngineMemory))
        assert greedy(engines, "awake") == changed
        lost_with_its_part(engines, role)
        place.release()
    print("spans two nodes")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
