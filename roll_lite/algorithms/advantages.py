"""Advantages of single tokens, and whitening. What a sample is worth within its group stands in `group_advantages.py`.

Token tensors are [B, T-1] with a bool mask of the policy's tokens; entry t belongs to token t+1. Masked columns, a tool's output
among them, are skipped, not stepped through: the token before a gap is followed by the token after it. Everything is computed in
host memory, with sums in float64, and is 0 where masked, whatever stands there.
"""

from __future__ import annotations

import torch

from roll_lite.algorithms import kernels

VARIANCE_OFFSET = 1e-8
"""Added to a variance before its root is divided by."""


def gae(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
    lam_critic: float | None = None,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: A_t = delta_t + gamma * lam * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t.

    (advantages with lam, returns), all [B, T-1]; returns are values + the advantages with lam_critic, lam where that is None.
    lam may be one number per row, [B]. bootstrap [B] is the value after a row's last policy token, 0 where it is None.
    """
    rows = mask.shape[0]
    of_actor = lam if isinstance(lam, torch.Tensor) else torch.full((rows,), lam, dtype=torch.float64)
    of_critic = of_actor if lam_critic is None else torch.full((rows,), lam_critic, dtype=torch.float64)
    end = torch.zeros(rows, dtype=torch.float64) if bootstrap is None else bootstrap
    return kernels.gae(token_rewards, values, mask, gamma, of_actor, of_critic, end)


def length_adaptive_lambda(policy_tokens: torch.Tensor, alpha: float) -> torch.Tensor:
    """VAPO: 1 - 1 / (alpha * l) for a response of l policy tokens, at least 0. [B] int -> [B] float64."""
    return (1 - 1 / (alpha * policy_tokens.double().clamp(min=1))).clamp(min=0)


def reinforce(token_rewards: torch.Tensor, mask: torch.Tensor, gamma: float, at_end: torch.Tensor | None = None) -> torch.Tensor:
    """Discounted returns: what the row's policy tokens earn from here on. [B, T-1] -> [B, T-1].

    at_end [B] is added to the reward of each row's last policy token: minus a baseline, for instance.
    """
    nothing = torch.zeros(mask.shape[0], dtype=torch.float64)
    return kernels.discounted_returns(token_rewards, mask, gamma, nothing if at_end is None else at_end)


def spread_over_tokens(advantages: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One advantage per sample, given to each of its policy tokens. [B], [B, T-1] -> [B, T-1], of the advantages' dtype by default."""
    return kernels.spread(advantages, mask, dtype or advantages.dtype)


def masked_moments(x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """(count, sum, sum of squares) of the unmasked entries as one float64 tensor [3]: add them over ranks before whitening.

    rows [B] bool: count these rows only.
    """
    moments = kernels.row_moments(x, mask)
    return (moments if rows is None else moments[rows]).sum(0)


def mean_and_variance(moments: torch.Tensor) -> tuple[float, float]:
    """Of summed moments [3]; the variance has ddof 1 and is 0 for fewer than two entries."""
    count, total, squares = moments.tolist()
    if count == 0:
        return 0.0, 0.0
    mean = total / count
    return mean, max(0.0, squares - count * mean * mean) / max(1.0, count - 1.0)


def whiten(x: torch.Tensor, mask: torch.Tensor, mean: float, var: float, in_place: bool = False) -> torch.Tensor:
    """(x - mean) / standard deviation with moments taken over the whole global batch. [B, T-1] -> [B, T-1]."""
    return kernels.shift_and_scale(x, mask, mean, (var + VARIANCE_OFFSET) ** -0.5, in_place)
