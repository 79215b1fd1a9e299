"""Clusters as the pipeline sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from roll_lite.config.arithmetic import device_numbers
from roll_lite.config.device_phases import Phase
from roll_lite.config.schema.models import ForwardRoleConfig, InferRoleConfig, RewardModelConfig
from roll_lite.data.keys import Columns
from roll_lite.data.minibatches import MiniBatch, balanced_partition, row_costs, spread
from roll_lite.distributed.cluster import Cluster, Pending
from roll_lite.distributed.dataflow import Batch, BatchShard, Block
from roll_lite.distributed.strategy.base import Moved, StateGroup
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.pipeline.devices import engine_memory, loaded
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.model import CriticWorker, ModelWorker, ReferenceWorker, TrainShare
from roll_lite.workers.reward_model import RewardModelWorker

W = TypeVar("W", bound=ModelWorker)


@dataclass(frozen=True)
class Model(Generic[W]):
    ranks: Cluster[W]
    role: ForwardRoleConfig
    worker: type[W]

    @property
    def offloads(self) -> bool:
        return self.role.offload

    @property
    def devices(self) -> tuple[int, ...]:
        return device_numbers(self.role.devices)

    def start_load(self, parts: Sequence[StateGroup]) -> Pending[list[None]]:
        return self.ranks.start_all(ModelWorker.load, parts)

    def start_offload(self, parts: Sequence[StateGroup]) -> Pending[list[None]]:
        return self.ranks.start_all(ModelWorker.offload, parts)

    def loaded(self, parts: Sequence[StateGroup]) -> AbstractContextManager[None]:
        return loaded(self, parts)

    def shards(self, batch: Batch, columns: Columns) -> list[BatchShard]:
        """Shards of about equal cost, one per data-parallel rank."""
        parts = balanced_partition(self._costs(batch), self.ranks.data_size)
        return batch.shards(parts, columns.of(batch.keys()))

    def shares(self, batch: Batch, columns: Columns, mini_batches: Sequence[MiniBatch]) -> list[TrainShare]:
        """Shares of the data-parallel ranks: each gets its rows once, and its part of each mini-batch."""
        samples = batch.rows.tensor("sample").tolist()
        row_of = {sample: row for row, sample in enumerate(samples)}
        spreads = spread(list(mini_batches), dict(zip(samples, self._costs(batch).tolist(), strict=True)), self.ranks.data_size)
        rows = [sorted({row_of[int(sample)] for part in own for sample in part.samples}) for own in spreads]
        shards = batch.shards([np.array(own, dtype=np.int64) for own in rows], columns.of(batch.keys()))
        return [TrainShare(shard, own) for shard, own in zip(shards, spreads, strict=True)]

    def _costs(self, batch: Batch) -> np.ndarray:
        return row_costs(lengths(batch).numpy(), self.ranks.layouts[0].attention_par)

    def start_forward(self, batch: Batch, columns: Sequence[str]) -> Pending[list[Block | None]]:
        return self.ranks.start_scatter(ModelWorker.compute, self.shards(batch, self.worker.forward_columns), columns)


@dataclass(frozen=True)
class Engines:
    """Engine replicas. Calls leave out lost ones; the rollout service watches them and knows the causes."""

    replicas: Cluster[InferWorker]
    role: InferRoleConfig
    turns: int = 1
    """Number of turns in which engines start: they size themselves by free memory, so those on one GPU take turns."""

    def start_first_ones(self) -> Pending[list[None]]:
        return self.replicas.start_all(InferWorker.initialize, 0, self.turns)

    def start_later_ones(self) -> None:
        for turn in range(1, self.turns):
            self.replicas.all(InferWorker.initialize, turn, self.turns)

    @property
    def offloads(self) -> bool:
        return self.role.offload

    @property
    def devices(self) -> tuple[int, ...]:
        return device_numbers(self.role.devices)

    def start_load(self, parts: Sequence[EngineMemory]) -> Pending[dict[int, None]]:
        return self.replicas.start_each(InferWorker.load, parts)

    def start_offload(self, parts: Sequence[EngineMemory]) -> Pending[dict[int, None]]:
        return self.replicas.start_each(InferWorker.offload, parts)

    def loaded(self, phase: Phase, beside: Sequence[tuple[Model[Any], Sequence[StateGroup]]] = ()) -> AbstractContextManager[None]:
        """Load the parts that the phase needs inside the block. A weight update needs only weights, which leaves room for the trainer's."""
        return loaded(self, engine_memory(phase), beside)


@dataclass(frozen=True)
class RewardModels:
    """Reward models by name. The rollout service calls them, and loads those with `offload: true` during generation."""

    clusters: Mapping[str, Cluster[RewardModelWorker]]
    configs: Mapping[str, RewardModelConfig]

    @property
    def actors(self) -> dict[str, list[Any]]:
        return {name: ranks.actors for name, ranks in self.clusters.items()}

    @property
    def resident(self) -> list[Cluster[RewardModelWorker]]:
        return [ranks for name, ranks in self.clusters.items() if not self.configs[name].offload]

    @property
    def offloaded(self) -> list[Cluster[RewardModelWorker]]:
        return [ranks for name, ranks in self.clusters.items() if self.configs[name].offload]


@dataclass(frozen=True)
class Clusters:
    policy: Model[ActorWorker] | None
    """None if nothing trains."""
    reference: Model[ReferenceWorker] | None = None
    critic: Model[CriticWorker] | None = None

    @property
    def actor(self) -> Model[ActorWorker]:
        assert self.policy is not None, "nothing trains in this run"
        return self.policy

    @property
    def models(self) -> list[Model[Any]]:
        return [model for model in (self.reference, self.policy, self.critic) if model is not None]

    def take_moved(self) -> dict[str, list[Moved]]:
        """Loads and offloads since the last call, of roles with `offload: true`."""
        return {model.ranks.name: model.ranks.all(ModelWorker.take_moved) for model in self.models if model.offloads}

    @property
    def trained(self) -> dict[str, Model[ActorWorker] | Model[CriticWorker]]:
        named = {"actor_train": self.policy, "critic": self.critic}
        return {role: model for role, model in named.items() if model is not None}


def lengths(batch: Batch) -> torch.Tensor:
    """Tokens by row, prompt and response."""
    return batch.rows.tensor("prompt_length") + batch.rows.tensor("response_length")
