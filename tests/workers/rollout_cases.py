"""A rollout worker with what it needs around it: two domains, engine workers with scripted engines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from support_models import make_tokenizer
from support_scripted import ScriptedWorker, scripted_spec

from roll_lite.config.loading import load_config
from roll_lite.config.schema.domains import DataConfig, DomainConfig, RewardConfig, RolloutConfig, SamplingConfig
from roll_lite.config.schema.models import InferRoleConfig, ModelConfig, VllmStrategyConfig
from roll_lite.distributed.cluster import Cluster, ClusterSpec, start_cluster
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.strategy.base import EngineSpec
from roll_lite.distributed.strategy.inference import requests as in_flight
from roll_lite.files import CONFIGS
from roll_lite.scheduler.engines import Collected
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.rollout import RolloutSpec, RolloutWorker

USER = "tests.workers.reward_functions"


def toy_model(folder: Path) -> ModelConfig:
    """Of which there is no more than the tokenizer."""
    make_tokenizer().save_pretrained(folder)
    return ModelConfig(path=folder, dtype="float32")


def domain(folder: Path, name: str, share: float, reward: str, validation: int = 0) -> DomainConfig:
    files = {"train": 40, "validation": validation}
    for split, count in files.items():
        lines = [json.dumps({"prompt": f"{name} {i}", "answer": str(i)}) for i in range(count)]
        (folder / f"{name}_{split}.jsonl").write_text("\n".join(lines))
    return DomainConfig(
        data=DataConfig(train=folder / f"{name}_train.jsonl", validation=folder / f"{name}_validation.jsonl" if validation else None),
        sampling=SamplingConfig(max_tokens=32),
        reward=RewardConfig(name=reward),
        share=share,
    )


class DoomedWorker(ScriptedWorker):
    """Hands out parts of responses early, and ends when it is to and its caller has two parts of each."""

    _number: int | None = None
    _times = 0

    def __init__(self, spec: EngineSpec) -> None:
        in_flight.BEGUN_POLL_S, in_flight.PARTS_EVERY = 0.3, 1
        super().__init__(spec)

    async def end_once_parts_are_out(self, number: int) -> None:
        self._number = number

    async def collect(self, most_blocks: int = 1, max_wait_s: float = 10.0) -> tuple[Any, ...]:
        if self._number is not None and self._times >= 2:  # whoever asks again has what it was given before
            os.kill(os.getpid(), self._number)
        collected, *blocks = await super().collect(most_blocks, max_wait_s)
        assert isinstance(collected, Collected)
        self._times += bool(collected.parts)
        return collected, *blocks


@contextmanager
def engines(model: ModelConfig, replicas: int, worker: type[InferWorker] = ScriptedWorker, **script: Any) -> Iterator[Cluster[InferWorker]]:
    spec = scripted_spec(model, max_model_len=128, **script)
    cluster = start_cluster(ClusterSpec("actor_infer", anywhere(replicas)), worker, spec)
    try:
        cluster.all(InferWorker.initialize)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def rollouts(spec: RolloutSpec, infer: Cluster[InferWorker]) -> Iterator[Cluster[RolloutWorker]]:
    cluster = start_cluster(ClusterSpec("rollouts", anywhere(1)), RolloutWorker, spec)
    try:
        cluster.one(RolloutWorker.prepare, {}, {})
        cluster.one(RolloutWorker.initialize, infer.group.actors)
        yield cluster
        cluster.one(RolloutWorker.shutdown)
    finally:
        cluster.shutdown()


def spec_of(model: ModelConfig, folder: Path) -> RolloutSpec:
    config = load_config("tiny_grpo", CONFIGS, files=False)
    domains = {"long": domain(folder, "long", 3, f"{USER}.length", validation=5), "math": domain(folder, "math", 1, f"{USER}.tricky")}
    rollout = RolloutConfig(samples_per_prompt=4)
    own = {"model": model, "domains": domains, "rollout": rollout, "seed": 3, "deterministic": True, "steps": None}
    own |= {"actor_infer": role_of(), "limits": config.limits.model_copy(update={"engine_silence": 0.0})}
    return RolloutSpec(config.model_copy(update=own), folder / "samples")


def role_of(restarts: int = 0, running: int | None = None) -> InferRoleConfig:
    strategy = VllmStrategyConfig().model_copy(update={"max_running_requests": running})
    return InferRoleConfig(restarts=restarts, offload=False).model_copy(update={"strategy": strategy})


def changed(spec: RolloutSpec, engine_silence_s: float = 0.0, **settings: Any) -> RolloutSpec:
    """Sections of the configuration replaced by others."""
    limits = spec.config.limits.model_copy(update={"engine_silence": engine_silence_s})
    return replace(spec, config=spec.config.model_copy(update={"limits": limits, **settings}))


def with_baselines(spec: RolloutSpec) -> RolloutSpec:
    return changed(spec, algorithm=load_config("tiny_remax", CONFIGS, files=False).algorithm)
