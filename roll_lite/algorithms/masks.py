"""Which samples train, and with which weight. A sample that does not still counts in its group's baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_lite.algorithms.shaping import RewardRows, group_means, group_places
from roll_lite.config.schema import MasksConfig
from roll_lite.data.user_function import load_function


@dataclass(frozen=True)
class Masked:
    weights: torch.Tensor
    """[N] float32, the column train_weight: 0 does not train."""
    causes: dict[str, torch.Tensor]
    """By what is configured, [N] bool: the samples that it keeps from training. A sample may have several causes."""


def mask_samples(rows: RewardRows, config: MasksConfig) -> Masked:
    """The data's sample weights times the user function's, 0 wherever there is a cause not to train."""
    weights = rows.sample_weight.numpy().astype(np.float64)
    causes: dict[str, np.ndarray] = {}
    if (weights != 1).any():
        causes["sample_weight"] = weights == 0
    if config.truncated == "mask":
        causes["truncated"] = rows.truncated.numpy()
    if config.group_mean is not None:
        # As float32, which the scores are: a group that scores 0.2 throughout lies in a range that ends with 0.2.
        places, groups = group_places(rows.group)
        means = group_means(rows.score.numpy().astype(np.float64), places, groups).astype(np.float32)[places]
        causes["group_mean"] = _outside(means, *np.array(config.group_mean, dtype=np.float32))
    if config.response_tokens is not None:
        causes["response_tokens"] = _outside(rows.policy_tokens.numpy(), *config.response_tokens)
    if config.function is not None:
        own = _users_weights(rows, config.function)
        causes["function"] = own == 0
        weights = weights * own
    for masked in causes.values():
        weights = np.where(masked, 0.0, weights)
    return Masked(torch.from_numpy(weights.astype(np.float32)), {name: torch.from_numpy(masked) for name, masked in causes.items()})


def _outside(values: np.ndarray, low: Any, high: Any) -> np.ndarray:
    outside: np.ndarray = (values < low) | (values > high)
    return outside


def _users_weights(rows: RewardRows, name: str) -> np.ndarray:
    """[N] float64, whatever kind of sequence of numbers the function returns."""
    setting = "algorithm.masks.function"
    function = load_function(name, setting, "RewardRows -> weights [samples]")
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
