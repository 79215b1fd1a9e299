"""The clusters that hold models: training ranks and engines, on their devices while somebody works with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from roll_lite.config.schema import ForwardRoleConfig, InferRoleConfig, RewardModelConfig
from roll_lite.data.balance import balanced_partition
from roll_lite.distributed.cluster import Cluster
from roll_lite.distributed.dataflow import Batch, Shard
from roll_lite.distributed.strategy.base import EngineMemory, StateGroup
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.model import ModelWorker
from roll_lite.workers.reward_model import RewardModelWorker

FORWARD = (StateGroup.WEIGHTS,)
TRAIN = (StateGroup.WEIGHTS, StateGroup.GRADIENTS, StateGroup.OPTIMIZER)

W = TypeVar("W", bound=ModelWorker)


@dataclass(frozen=True)
class Model(Generic[W]):
    """A model spread over a cluster."""

    ranks: Cluster[W]
    role: ForwardRoleConfig

    @property
    def data_size(self) -> int:
        return self.ranks.data_size

    def shards(self, batch: Batch, keys: Sequence[str]) -> list[Shard]:
        """The batch, cut for the data-parallel ranks so that each has about as many tokens."""
        parts = balanced_partition(lengths(batch), self.data_size)
        return batch.shards(parts, keys)

    @contextmanager
    def loaded(self, groups: Sequence[StateGroup]) -> Iterator[None]:
        """The groups are on the devices inside the block; a role with `offload: true` leaves them afterwards."""
        if self.role.offload:
            self.ranks.all(ModelWorker.load, groups)
        yield
        if self.role.offload:
            self.ranks.all(ModelWorker.offload, groups)


@dataclass(frozen=True)
class Engines:
    """The engine replicas."""

    replicas: Cluster[InferWorker]
    role: InferRoleConfig

    @contextmanager
    def loaded(self, part: EngineMemory) -> Iterator[None]:
        """As for a model. With the weights alone there an update can arrive while the trainer's own still take up room."""
        if self.role.offload:
            self.replicas.all(InferWorker.load, (part,))
        yield
        if self.role.offload:
            self.replicas.all(InferWorker.offload, (part,))


@dataclass(frozen=True)
class RewardModels:
    """By name. The rollout service calls them; it also has those with `offload: true` loaded while it generates."""

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


def lengths(batch: Batch) -> torch.Tensor:
    """Tokens of each row, prompt and response."""
    return batch.rows.tensor("prompt_length") + batch.rows.tensor("response_length")
