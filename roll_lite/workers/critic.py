"""The value model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.data.keys import Columns
from roll_lite.workers.model import ModelRole, ModelWorker, TrainShare, Update, training_columns
from roll_lite.workers.objectives import CriticLoss


class CriticWorker(ModelWorker):
    computes: ClassVar[Mapping[str, str]] = {"values": "values", "final_value": "final_value"}

    def __init__(self, role: ModelRole, algorithm: AlgorithmConfig, domains: int) -> None:
        super().__init__(role)
        self.loss = CriticLoss(clip=algorithm.value_loss.clip, domains=domains)

    @staticmethod
    def training_reads(_: AlgorithmConfig) -> Columns:
        return training_columns(CriticLoss.columns)

    def train(self, share: TrainShare) -> list[Update]:
        """Every mini-batch of every epoch."""
        return list(self._train(share, self.loss, self.loss.outputs))
