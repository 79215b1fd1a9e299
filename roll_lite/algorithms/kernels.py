"""Loops over the tokens of padded rows, compiled with numba: recurrences and row sums that tensor operations are slow at.

Everything lives in host memory: token tensors [B, T-1] of float32 or float64 with a bool mask, row tensors [B]. Sums and
recurrences run in float64. What a masked entry holds is never used, and every output is 0 there. Rows are independent of each
other and are split over torch.get_num_threads() threads; what comes out does not depend on how.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit

ENTRIES_PER_THREAD = 1 << 17
"""Fewer entries than this are not worth a thread."""

PARTS_PER_THREAD = 4
"""Rows are handed out in smaller portions than one per thread, so that a thread that is held up does not hold up the others."""


def compiled(function: Callable[..., None]) -> Any:
    """Compiled at the first call and kept on disk: beside the source, or where that is read-only in the user's cache folder."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder at all that it may write to: compile in every process
        return njit(nogil=True)(function)


def gae(
    token_rewards: torch.Tensor | None,
    at_end: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: torch.Tensor,
    lam_critic: torch.Tensor,
    bootstrap: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages with lam, of that dtype, returns with lam_critic, of the values'), [B, T-1]. at_end, lam, lam_critic [B]: at_end is
    added to the reward of the last policy token; bootstrap [B] is the value after it."""
    advantages, returns = empty(mask, dtype), empty(mask, values.dtype)
    tokens = _rewards(token_rewards, mask), _tokens(values, mask), _mask(mask)
    rows = _rows(at_end, mask), _rows(lam, mask), _rows(lam_critic, mask), _rows(bootstrap, mask)
    _over_rows(_gae, mask.shape, *tokens, float(gamma), *rows, advantages.numpy(), returns.numpy())
    return advantages, returns


@compiled
def _gae(
    first: int,
    stop: int,
    rewards: Any,
    values: Any,
    mask: Any,
    gamma: float,
    at_end: Any,
    lam: Any,
    lam_critic: Any,
    bootstrap: Any,
    out: Any,
    returns: Any,
) -> None:
    paid = rewards.size > 0
    for row in range(first, stop):
        following, advantage, critic, reward = bootstrap[row], 0.0, 0.0, at_end[row]
        decay, decay_critic = gamma * lam[row], gamma * lam_critic[row]
        for t in range(mask.shape[1] - 1, -1, -1):
            if mask[row, t]:
                value = np.float64(values[row, t])
                if paid:
                    reward += rewards[row, t]
                delta = reward + gamma * following - value
                reward = 0.0
                advantage = delta + decay * advantage
                critic = delta + decay_critic * critic
                following = value
                out[row, t] = advantage
                returns[row, t] = critic + value
            else:
                out[row, t] = 0.0
                returns[row, t] = 0.0


def discounted_returns(
    token_rewards: torch.Tensor | None, at_end: torch.Tensor, mask: torch.Tensor, gamma: float, dtype: torch.dtype
) -> torch.Tensor:
    """G_t = r_t + gamma * G of the row's next policy token; at_end [B] is added to the last one's reward. [B, T-1] -> [B, T-1]."""
    out = empty(mask, dtype)
    _over_rows(_discounted_returns, mask.shape, _rewards(token_rewards, mask), _mask(mask), float(gamma), _rows(at_end, mask), out.numpy())
    return out


@compiled
def _discounted_returns(first: int, stop: int, rewards: Any, mask: Any, gamma: float, at_end: Any, out: Any) -> None:
    paid = rewards.size > 0
    for row in range(first, stop):
        carried = at_end[row]
        for t in range(mask.shape[1] - 1, -1, -1):
            if mask[row, t]:
                total = carried
                if paid:
                    total += rewards[row, t]
                carried = gamma * total
                out[row, t] = total
            else:
                out[row, t] = 0.0


def row_moments(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(count, sum, sum of squared deviations from the row's mean) of each row's unmasked entries. [B, T-1] -> [B, 3] float64.

    Two passes: sums of squares whose offset is taken off afterwards lose the spread of entries that are large and close together.
    """
    out = torch.empty(mask.shape[0], 3, dtype=torch.float64)
    _over_rows(_row_moments, mask.shape, _tokens(x, mask), _mask(mask), out.numpy())
    return out


@compiled
def _row_moments(first: int, stop: int, x: Any, mask: Any, out: Any) -> None:
    for row in range(first, stop):
        count, total, squares = 0, 0.0, 0.0
        for t in range(mask.shape[1]):
            if mask[row, t]:
                count += 1
                total += x[row, t]
        mean = total / max(count, 1)
        for t in range(mask.shape[1]):
            if mask[row, t]:
                deviation = x[row, t] - mean
                squares += deviation * deviation
        out[row, 0] = count
        out[row, 1] = total
        out[row, 2] = squares


def shift_and_scale(x: torch.Tensor, mask: torch.Tensor, shift: float, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """(x - shift) * scale. [B, T-1] -> [B, T-1]."""
    out = empty(mask, dtype)
    _over_rows(_shift_and_scale, mask.shape, _tokens(x, mask), _mask(mask), float(shift), float(scale), out.numpy())
    return out


@compiled
def _shift_and_scale(first: int, stop: int, x: Any, mask: Any, shift: float, scale: float, out: Any) -> None:
    for row in range(first, stop):
        for t in range(mask.shape[1]):
            scaled = (x[row, t] - shift) * scale
            out[row, t] = scaled if mask[row, t] else 0.0


def empty(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the mask's shape to be written to, from numpy: it asks the kernel for huge pages, without which the first touch of the
    memory takes longer than any of these loops."""
    return torch.from_numpy(np.empty(mask.shape, dtype=str(dtype).removeprefix("torch.")))


def _rewards(token_rewards: torch.Tensor | None, mask: torch.Tensor) -> np.ndarray:
    """Nothing at all where no token has a reward of its own: zeros would be as much to read as anything else."""
    return np.zeros((0, 0), dtype=np.float32) if token_rewards is None else _tokens(token_rewards, mask)


def _tokens(x: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Compiled code checks no bounds: shapes are checked here."""
    assert x.shape == mask.shape, f"a token tensor {list(x.shape)} beside a mask {list(mask.shape)}"
    return _host(x).detach().contiguous().numpy()


def _rows(x: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    assert x.shape == mask.shape[:1], f"a row tensor {list(x.shape)} beside a mask {list(mask.shape)}"
    return _host(x).detach().double().contiguous().numpy()


def _mask(mask: torch.Tensor) -> np.ndarray:
    assert mask.dtype == torch.bool and mask.dim() == 2, f"the mask is {mask.dtype} {list(mask.shape)}, expected bool [B, T-1]"
    return _host(mask).contiguous().numpy()


def _host(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        raise ValueError(f"advantages are computed in host memory, but a tensor {list(x.shape)} is on {x.device}; pass its .cpu()")
    return x


def _over_rows(kernel: Any, shape: torch.Size, *arguments: Any) -> None:
    """kernel(first row, row to stop before, *arguments) until every row has been done once."""
    rows, columns = shape
    threads = min(torch.get_num_threads(), rows, rows * columns // ENTRIES_PER_THREAD)
    if threads <= 1:
        kernel(0, rows, *arguments)
        return
    parts = min(rows, threads * PARTS_PER_THREAD)
    cuts = [rows * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(kernel, *part, *arguments) for part in pairwise(cuts)]:
            done.result()
