"""How much memory the ranks of a step really hold, where actor, reference and critic share one device. Real Megatron-Core, real Ray.

On a CPU the host's copies of what leaves "the device" lie in the same memory, and stay there; what was on the device is seen coming
and going in the resident memory of the processes, with at least the size of the gradients.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from support_models import make_tiny_model

from roll_lite.config.device_phases import Phase
from roll_lite.config.loading import load_config
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.dataflow import Batch, put_block
from roll_lite.distributed.placement import anywhere
from roll_lite.observability.timers import StepTimers
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.clusters import Model, Models, loaded, states
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.model import CriticWorker, ModelRole, ModelWorker, ReferenceWorker

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
SAMPLES, TOKENS = 8, 24


@dataclass
class Watch:
    """Resident memory of processes, a hundred times a second."""

    pids: dict[str, int]
    seen: list[dict[str, float]] = field(default_factory=list)

    def now(self) -> dict[str, float]:
        return {name: psutil.Process(pid).memory_info().rss / MIB for name, pid in self.pids.items()}

    @contextmanager
    def looking(self) -> Iterator[list[dict[str, float]]]:
        end, seen = threading.Event(), []

        def look() -> None:
            while not end.wait(0.01):
                seen.append(self.now())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield seen
        finally:
            end.set()
            thread.join()


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.arange(SAMPLES)
    rows = {
        "sample": numbers,
        "group": numbers // 4,
        "prompt_length": torch.full((SAMPLES,), 8),
        "response_length": torch.full((SAMPLES,), TOKENS - 8),
        "policy_tokens": torch.full((SAMPLES,), TOKENS - 8),
        "domain_number": torch.zeros(SAMPLES, dtype=torch.int64),
        "truncated": torch.zeros(SAMPLES, dtype=torch.bool),
        "reward": (numbers % 2).float(),
        "train_weight": torch.ones(SAMPLES),
        "temperature": torch.ones(SAMPLES),
    }
    ids = [torch.randint(5, 100, (TOKENS,), generator=generator) for _ in range(SAMPLES)]
    tokens = {
        "input_ids": Ragged.from_rows(ids),
        "response_mask": Ragged.from_rows([torch.arange(TOKENS) >= 8] * SAMPLES),
        "rollout_log_probs": Ragged.from_rows([torch.zeros(TOKENS - 1)] * SAMPLES),
    }
    return Batch(DataProto(rows), [put_block(DataProto({"sample": numbers, **tokens}))])


@pytest.fixture
def pipeline(ray_local: object, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RLVRPipeline]:
    """Three roles on device 0, with 20 million parameters each."""
    monkeypatch.chdir(ROOT)
    make_tiny_model(tmp / "model", hidden=512, layers=8)
    shared = [f"{role}.{setting}" for role in ("actor_train", "reference", "critic") for setting in ("offload=true", "devices=[0]")]
    config = load_config(
        "tiny_ppo",
        ROOT / "examples/configs",
        [*shared, "algorithm.critic_warmup_steps=0", "algorithm.mini_batches=1", "rollout.max_mismatch=null"],
    )

    def model(name: str, role: Any, worker: Any, *arguments: Any) -> Model[Any]:
        settings = ModelRole(config.model.model_copy(update={"path": tmp / "model"}), role, 10, seed=1, deterministic=False)
        made = Model(start_cluster(ClusterSpec(name, anywhere(1)), worker, settings, *arguments), role, worker)
        made.ranks.all(ModelWorker.initialize)
        made.ranks.all(ModelWorker.offload, states(Phase.TRAIN))
        return made

    actor = model("actor_train", config.actor_train, ActorWorker, config.algorithm, 1)
    reference = model("reference", config.reference, ReferenceWorker)
    critic = model("critic", config.critic, CriticWorker, config.algorithm, 1)
    ledger = SimpleNamespace(updates=lambda *_: None)
    silent = SimpleNamespace(timers=StepTimers(), ledger=ledger, credit=lambda *_: None, updates=lambda *_: None)
    models = Models(actor, reference, critic)
    files = BatchFiles(config, tmp)
    yield RLVRPipeline(config, models, None, silent, None, files)  # type: ignore[arg-type]
    for one in models.all:
        one.ranks.shutdown()


@pytest.mark.slow
def test_one_roles_state_is_there_at_a_time(pipeline: RLVRPipeline) -> None:
    actor, critic = pipeline.models.actor, pipeline.models.critic
    assert critic is not None

    def step() -> None:
        rows = batch()
        pipeline.compute_log_probs(rows)
        pipeline.assign_credit(rows)
        pipeline.train(rows)
        pipeline.steps_done += 1

    step()  # what is made once is made by now
    pids = {role.ranks.name: ray.get(role.ranks.actors[0].__ray_call__.remote(lambda self: os.getpid())) for role in (actor, critic)}
    watch = Watch(pids)
    with loaded(actor, states(Phase.SYNC_WEIGHTS)):
        plan = actor.ranks.all(ActorWorker.export_plan, 1 << 30)[0]
    gradients = sum(np.prod(tensor.shape) for tensor in plan.tensors) * 4 / MIB
    assert gradients > 60
    away = watch.now()

    def are_there(seen: dict[str, float]) -> set[str]:
        return {name for name, resident in seen.items() if resident > away[name] + 0.7 * gradients}

    assert are_there(watch.now()) == set()
    with loaded(actor, states(Phase.TRAIN)), loaded(critic, states(Phase.TRAIN)):
        assert are_there(watch.now()) == set(pids), "this is what two at a time would look like"
    with watch.looking() as seen:
        step()
    present = [are_there(sample) for sample in seen]
    assert {name for names in present for name in names} == set(pids), "each was there"
    assert max(map(len, present)) == 1, "and never both"
    assert are_there(watch.now()) == set(), "and both have left"
