"""Inputs of a user's advantage estimator, and check of its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roll_lite.algorithms.advantages import spread_over_tokens
from roll_lite.config.user_function import load_function

WHERE = "algorithm.advantage.function"


@dataclass(frozen=True)
class SampleTable:
    """Table of all samples of the global batch, even if they do not train. Tensors are [N], except `local`."""

    rewards: torch.Tensor
    """float64: reward after shaping, minus coef * KL of the sample."""
    scores: torch.Tensor
    """float64: reward after shaping, without KL."""
    groups: torch.Tensor
    """int64: samples of one prompt have the same number."""
    policy_tokens: torch.Tensor
    """int64: number of the sample's tokens that the policy chose."""
    trains: torch.Tensor
    """bool: train_weight > 0."""
    local: torch.Tensor
    """[B] int64: each local row's index in this table. `everyone.rewards[everyone.local]` are the rows' rewards."""


@dataclass(frozen=True)
class CreditInputs:
    """Argument of a user's advantage estimator: this rank's padded rows (B may be 0). Masked values in [B, T-1] are arbitrary."""

    token_rewards: torch.Tensor
    """[B, T-1] float64: the reward on the last policy token, minus coef * KL on every policy token."""
    mask: torch.Tensor
    """[B, T-1] bool: tokens that the policy chose."""
    values: torch.Tensor | None
    """[B, T-1] float32: the critic's value before each token; None without a critic."""
    reward: torch.Tensor
    """[B] float32: reward after shaping, without KL."""
    groups: torch.Tensor
    """[B] int64: samples of one prompt have the same number."""
    policy_tokens: torch.Tensor
    """[B] int64: number of the row's tokens that the policy chose."""
    truncated: torch.Tensor
    """[B] bool: the response was cut off at the maximum of tokens or turns."""
    train_weight: torch.Tensor
    """[B] float32: 0 for samples not trained on."""
    everyone: SampleTable
    """Samples of all ranks, for baselines."""


def users_advantages(inputs: CreditInputs, name: str, args: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the user's estimator. Return advantages and the critic's targets (None without a critic), [B, T-1], 0 where masked. Results [B]
    are spread over a row's policy tokens."""
    result = load_function(name, WHERE)(inputs, **args)
    pair = isinstance(result, tuple)
    if inputs.values is not None and not (pair and len(result) == 2):
        raise ValueError(f"{WHERE}: with a critic {name} returns (advantages, returns), the critic's targets")
    if inputs.values is None and pair:
        raise ValueError(f"{WHERE}: {name} returned targets for a critic, but there is none; it returns advantages")
    if pair:
        targets = _per_token(result[1], "returns", inputs.mask, name, torch.float32)
        return _per_token(result[0], "advantages", inputs.mask, name, dtype), targets
    return _per_token(result, "advantages", inputs.mask, name, dtype), None


def _per_token(result: object, what: str, mask: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    rows = [mask.shape[0]]
    if not isinstance(result, torch.Tensor):
        raise ValueError(f"{WHERE}: {name} returned {type(result).__name__}, expected a tensor {rows} or {list(mask.shape)}")
    if list(result.shape) not in (rows, list(mask.shape)):
        raise ValueError(
            f"{WHERE}: {name} returned {what} {list(result.shape)}, expected {rows}, one number per sample, "
            f"or {list(mask.shape)}, one per token"
        )
    found = result.detach().cpu().to(dtype)
    tokens = spread_over_tokens(found, mask, dtype) if found.dim() == 1 else found.masked_fill(~mask, 0.0)
    bad = (~torch.isfinite(tokens)).any(1).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{WHERE}: {name} returned NaN or infinite {what} for rows {bad[:10]} of {mask.shape[0]}")
    return tokens
