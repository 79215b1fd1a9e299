"""Scores become rewards, and some samples are kept from training: what the driver decides from row columns alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_lite.algorithms.masks import Masked, mask_samples
from roll_lite.algorithms.running_moments import RunningMoments
from roll_lite.algorithms.shaping import DomainRewards, RewardRows, shape_baseline, shape_rewards
from roll_lite.config.schema import RunConfig
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import FinishReason
from roll_lite.distributed.dataflow import Batch


@dataclass(frozen=True)
class Shaped:
    batch: Batch
    """With the columns reward and train_weight, without the groups of which no sample trains."""
    rows: DataProto
    """All rows, those that are left out too, for metrics."""
    masked: Masked
    """Of all rows."""


class RewardShaping:
    """Remembers the running moments of rewards, where the configuration normalises with them."""

    def __init__(self, config: RunConfig) -> None:
        self._algorithm = config.algorithm
        self._domains = list(config.domains)
        self._settings = [DomainRewards(domain.reward.weight, domain.reward.format) for domain in config.domains.values()]
        self._max_tokens = torch.tensor([domain.sampling.max_tokens for domain in config.domains.values()])
        self._running = RunningMoments()

    def __call__(self, batch: Batch) -> Shaped:
        rows = self._with_domains(batch.rows)
        known = RewardRows.of(rows.columns, self._domains)  # type: ignore[arg-type]
        masked = mask_samples(known, self._algorithm.masks)
        columns = {
            "reward": shape_rewards(known, self._algorithm.reward, self._settings, self._algorithm.masks, self._running),
            "train_weight": masked.weights,
        }
        if "baseline_score" in rows:
            baseline = rows.tensor("baseline_score")
            columns["baseline_score"] = shape_baseline(baseline, known, self._algorithm.reward, self._settings)
        rows = rows.with_columns(**columns)
        return Shaped(batch.with_rows(**rows.columns).take(_rows_of_training_groups(rows)), rows, masked)

    def _with_domains(self, rows: DataProto) -> DataProto:
        number = {name: place for place, name in enumerate(self._domains)}
        domains = torch.tensor([number[str(name)] for name in rows.objects("domain")], dtype=torch.int64)
        cut = [reason == FinishReason.LENGTH for reason in rows.objects("finish_reason")]
        return rows.with_columns(domain_number=domains, max_tokens=self._max_tokens[domains], truncated=torch.tensor(cut, dtype=torch.bool))

    def state_dict(self) -> dict[str, Any]:
        return {"running": self._running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running.load_state_dict(state["running"])


def _rows_of_training_groups(rows: DataProto) -> np.ndarray:
    """A group without a sample that trains is a baseline for nobody."""
    groups = rows.tensor("group").numpy()
    trains = np.unique(groups[rows.tensor("train_weight").numpy() > 0])
    return np.flatnonzero(np.isin(groups, trains))
