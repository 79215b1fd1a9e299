"""How token losses become one number: a weight per policy token, taken once from the counts of the whole global mini-batch.

Shares sum(weight * loss) of micro-batches and ranks then simply add up, however the mini-batch was cut.
"""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]


def row_weights(
    policy_tokens: torch.Tensor, mode: Aggregation, constant: int | None = None, train_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """policy_tokens [B] int, of ALL rows of the global mini-batch -> weight [B] float32 of each policy token of a row.

    token_mean: 1 / all tokens. sequence_mean_token_mean: 1 / (rows * the row's tokens). sequence_mean_token_sum: 1 / rows.
    constant: 1 / (rows * constant), Dr. GRPO's.
    Rows without policy tokens, and rows whose train_weight [B] is 0, weigh 0 and count neither as rows nor as tokens. Other
    train_weights multiply the row's weight and change no count.
    """
    factors = torch.ones_like(policy_tokens, dtype=torch.float64) if train_weights is None else train_weights.double()
    counted = (policy_tokens > 0) & (factors != 0)
    tokens = policy_tokens.double().masked_fill(~counted, 0.0)
    rows = counted.sum().clamp(min=1)
    if mode == "token_mean":
        weights = factors / tokens.sum().clamp(min=1)
    elif mode == "sequence_mean_token_mean":
        weights = factors / (rows * tokens.clamp(min=1))
    elif mode == "sequence_mean_token_sum":
        weights = factors / rows
    elif mode == "constant":
        if constant is None or constant < 1:
            raise ValueError(f"algorithm.aggregation_constant: {constant!r}: aggregation `constant` needs a positive number of tokens")
        weights = factors / (rows * constant)
    else:
        raise ValueError(
            f"algorithm.aggregation: unknown mode {mode!r}; one of token_mean, sequence_mean_token_mean, sequence_mean_token_sum, constant"
        )
    return torch.where(counted, weights, 0.0).float()
