"""Compute rewards and masks of samples on the driver, from columns of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_lite.algorithms.rewards import (
    Masked,
    RewardRows,
    RunningMoments,
    as_float64,
    format_rewards,
    length_rewards,
    mask_samples,
    normalized,
    overlong_rewards,
)
from roll_lite.config.schema.algorithm import AlgorithmConfig, MasksConfig, RewardShapingConfig
from roll_lite.config.schema.domains import FormatConfig
from roll_lite.config.schema.environments import EndpointEnvironmentConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.user_function import load_function
from roll_lite.data.branches import SampleRows, per_sample, sample_rows_of
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import FinishReason
from roll_lite.distributed.dataflow import Batch


@dataclass(frozen=True)
class Shaped:
    batch: Batch
    """Batch with `reward` and `train_weight`, without groups in which no sample trains."""
    rows: DataProto
    """Rows with `reward` and `train_weight`, all groups."""
    masked: Masked


class RewardShaping:
    """Computes rewards and masks; keeps running moments of rewards for their normalization."""

    def __init__(self, config: RunConfig) -> None:
        self._algorithm = config.algorithm
        self._domains = list(config.domains)
        self._settings = [DomainRewards(domain.reward.weight, domain.reward.format) for domain in config.domains.values()]
        self._max_tokens = torch.tensor([domain.sampling.max_tokens for domain in config.domains.values()])
        self._conversation = torch.tensor(
            [
                domain.sampling.max_prompt_tokens + domain.sampling.max_tokens
                if isinstance(domain.environment, EndpointEnvironmentConfig)
                else 0
                for domain in config.domains.values()
            ]
        )
        """Maximum tokens of an agent's conversation, prompt included, by domain; 0 for other domains."""
        self._running = RunningMoments()

    def __call__(self, batch: Batch) -> Shaped:
        rows, number = batch.rows, {name: place for place, name in enumerate(self._domains)}
        domains = torch.tensor([number[str(name)] for name in rows.objects("domain")], dtype=torch.int64)
        reasons = rows.objects("finish_reason")
        length, turns = (torch.from_numpy(reasons == limit) for limit in (FinishReason.LENGTH, FinishReason.MAX_TURNS))
        cut = rows.tensor("cut") if "cut" in rows else length  # older dumps lack it
        of, longest, limits = sample_rows_of(rows), rows.tensor("response_length"), self._max_tokens[domains]
        longest = longest if of is None else of.reduced(longest, "amax")
        if (conversation := self._conversation[domains]).any():
            limits = torch.where(conversation > 0, conversation - _prompts(rows, of, longest), limits)
        rows = rows.with_columns(domain_number=domains, max_tokens=limits, truncated=length | turns, cut=cut)
        samples = per_sample(rows)
        known = RewardRows.of({**samples.columns, "row_tokens": longest}, self._domains)  # type: ignore[dict-item]
        masked = masked_samples(known, self._algorithm.masks)
        columns = {
            "reward": shape_rewards(known, masked.weights, self._algorithm, self._settings, self._running),
            "train_weight": masked.weights,
        }
        if "baseline_score" in rows:
            baseline = samples.tensor("baseline_score")
            columns["baseline_score"] = shape_baseline(baseline, known, self._algorithm.reward, self._settings)
        if of is not None:  # every row of a sample has the sample's reward and weight
            columns = {name: column[of.sample] for name, column in columns.items()}
        rows = rows.with_columns(**columns)
        groups = rows.tensor("group").numpy()
        training = np.isin(groups, np.unique(groups[rows.tensor("train_weight").numpy() > 0]))
        return Shaped(batch.with_rows(**rows.columns).take(np.flatnonzero(training)), rows, masked)

    def state_dict(self) -> dict[str, Any]:
        return {"running": self._running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running.load_state_dict(state["running"])


def _prompts(rows: DataProto, of: SampleRows | None, longest: torch.Tensor) -> torch.Tensor:
    """[rows]: prompt length of the longest row in its sample. `longest`: that row's response length, [samples]."""
    prompts = rows.tensor("prompt_length")
    if of is None:
        return prompts
    return of.reduced(torch.where(rows.tensor("response_length") == longest[of.sample], prompts, 0), "amax")[of.sample]


# ---------------------------------------------------------------- rewards and masks as configured


@dataclass(frozen=True)
class DomainRewards:
    weight: float = 1.0
    format: FormatConfig | None = None


def shape_rewards(
    rows: RewardRows, train_weights: torch.Tensor, algorithm: AlgorithmConfig, domains: Sequence[DomainRewards], running: RunningMoments
) -> torch.Tensor:
    """Return the samples' rewards, [N] float32. `domains`: settings by domain number. `running`: moments to update.

    Order: format, length penalty, truncation penalty, overlong penalty, scale, clip, normalization, domain weight.
    """
    config, masks = algorithm.reward, algorithm.masks
    formats = [domain.format for domain in domains]
    bonus, penalty = [one.bonus if one else 0.0 for one in formats], [one.penalty if one else 0.0 for one in formats]
    rewards = as_float64(rows.score) + format_rewards(rows, bonus, penalty)
    if config.length_penalty is not None:
        rewards += length_rewards(rows, config.length_penalty.name, config.length_penalty.coef)
    if masks.truncated == "penalize":
        rewards -= masks.truncated_penalty * as_float64(rows.truncated)
    if config.overlong is not None:
        rewards += overlong_rewards(rows, config.overlong.buffer_tokens, config.overlong.penalty)
    rewards = _scaled_and_clipped(rewards, config)
    if config.normalize is not None:
        how = config.normalize
        rewards = normalized(rewards, rows.group, train_weights.numpy() > 0, how.over, how.mean, how.std, running)
    return _weighted(rewards, rows, domains)


def shape_baseline(scores: torch.Tensor, rows: RewardRows, config: RewardShapingConfig, domains: Sequence[DomainRewards]) -> torch.Tensor:
    """Return rewards [N] float32 of greedy baselines: scale, clip and domain weight apply."""
    return _weighted(_scaled_and_clipped(as_float64(scores), config), rows, domains)


def masked_samples(rows: RewardRows, config: MasksConfig) -> Masked:
    own = None if config.function is None else _users_weights(rows, config.function)
    return mask_samples(rows, config.truncated == "mask", config.group_mean, config.response_tokens, own)


def _scaled_and_clipped(rewards: np.ndarray, config: RewardShapingConfig) -> np.ndarray:
    scaled = rewards * config.scale
    return scaled if config.clip is None else scaled.clip(-config.clip, config.clip)


def _weighted(rewards: np.ndarray, rows: RewardRows, domains: Sequence[DomainRewards]) -> torch.Tensor:
    weighted = rewards * np.array([domain.weight for domain in domains], dtype=np.float64)[rows.domain_number.numpy()]
    beyond = ~(np.abs(weighted) <= np.finfo(np.float32).max)
    if beyond.any():
        row = int(beyond.argmax())
        raise ValueError(
            f"algorithm.reward: the score {float(rows.score[row]):.5g} of domain {rows.domains[int(rows.domain_number[row])]!r} became the "
            f"reward {weighted[row]:.5g}, beyond float32; use a smaller scale, penalty or domains.*.reward.weight, or a clip"
        )
    return torch.from_numpy(weighted.astype(np.float32))


def _users_weights(rows: RewardRows, name: str) -> np.ndarray:
    setting = "algorithm.masks.function"
    function = load_function(name, setting)
    try:
        result = function(rows)
    except Exception as error:
        raise ValueError(f"{setting}: {name!r} failed: {type(error).__name__}: {error}") from error
    try:
        weights = np.asarray(result.detach().cpu() if isinstance(result, torch.Tensor) else result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{setting}: {name!r} returned {type(result).__name__}, expected one number per sample") from error
    if weights.shape != (len(rows),):
        raise ValueError(f"{setting}: {name!r} returned weights of shape {list(weights.shape)} for {len(rows)} samples")
    valid = (weights >= 0) & (weights <= np.finfo(np.float32).max)
    if not valid.all():
        row = int(valid.argmin())
        raise ValueError(f"{setting}: {name!r} returned {weights[row]} for sample {row}; weights are finite and at least 0")
    return weights
