"""The value model."""

from __future__ import annotations

from roll_lite.algorithms.objectives import CriticLoss
from roll_lite.config.schema import AlgorithmConfig
from roll_lite.distributed.dataflow import Block, Shard
from roll_lite.workers.model import ModelRole, ModelWorker, TrainShare, Update


class CriticWorker(ModelWorker):
    def __init__(self, role: ModelRole, algorithm: AlgorithmConfig, domains: int) -> None:
        super().__init__(role)
        self.loss = CriticLoss(clip=algorithm.value_loss.clip, domains=domains)

    def values(self, shard: Shard, final: bool = False) -> Block | None:
        """`final`: also the value after each row's last token."""
        return self._forward(shard, {"values": "values", **({"final_value": "final_value"} if final else {})})

    def train(self, share: TrainShare) -> list[Update]:
        """Every mini-batch of every epoch."""
        return [Update(mini_batch.epoch, result, {}) for mini_batch, result in self._train(share, self.loss, self.loss.outputs)]
