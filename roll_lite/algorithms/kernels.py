"""Recurrences and sums along rows, compiled with numba because tensor operations are slow at recurrences. Inputs are in host memory: token
tensors [B, T-1] with a bool mask, row tensors [B]. Sums are float64; results do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit

ENTRIES_PER_THREAD = 1 << 17

PARTS_PER_THREAD = 4
"""Blocks of rows per thread. Idle threads take over blocks of a delayed one."""


def compiled(function: Callable[..., None]) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no writable folder: compile in every process
        return njit(nogil=True)(function)


Whitening = Callable[[torch.Tensor], tuple[float, float]]
"""Function from this rank's `row_moments` [B, 3] to (shift, scale): (x - shift) * scale is whitened over the global batch."""


def recurrence(
    kernel: Any,
    mask: torch.Tensor,
    tokens: Sequence[torch.Tensor | None],
    gamma: float,
    rows: Sequence[torch.Tensor | float | None],
    outputs: Sequence[torch.dtype],
    whitening: Whitening | None,
    per_turn: bool = False,
) -> list[torch.Tensor]:
    """Run the kernel `gae` or `discounted_returns`; return its results, each [B, T-1]. `tokens`: the kernel's token tensors (None: zeros).
    `rows`: row arguments: [B], one number, or None for 0. `per_turn`: as in `advantages.gae`."""
    inputs = [
        *(_tokens(x, mask) for x in tokens),
        _mask(mask),
        float(gamma),
        1.0 if per_turn else float(gamma),
        *(_rows(x, mask) for x in rows),
    ]
    results = [empty(mask.shape, dtype) for dtype in outputs]
    arrays = [result.numpy() for result in results]
    moments, shift, scale = empty((len(mask), 3), torch.float64), 0.0, 1.0
    # Two runs: the mean is subtracted before rounding to float32, and no float64 tensor is stored.
    if whitening is not None:
        _over_rows(kernel, mask.shape, *inputs, shift, scale, *arrays, moments.numpy())
        shift, scale = whitening(moments)
    _over_rows(kernel, mask.shape, *inputs, shift, scale, *arrays, moments.numpy()[:0])
    return results


@compiled
def gae(
    first: int,
    stop: int,
    rewards: Any,
    values: Any,
    mask: Any,
    gamma: float,
    within: float,
    last_token_reward: Any,
    lam: Any,
    lam_critic: Any,
    bootstrap: Any,
    shift: float,
    scale: float,
    out: Any,
    returns: Any,
    moments: Any,
) -> None:
    """Compute advantages and returns of rows `first` to `stop`. If `moments` is empty, write (advantage - shift) * scale to `out`, and
    returns to `returns`; else write only the advantages' `row_moments`. Discounts: `within` a turn, `gamma` between turns."""
    paid, measured = rewards.size > 0, moments.size > 0
    for row in range(first, stop):
        following, advantage, critic, reward = bootstrap[row], 0.0, 0.0, last_token_reward[row]
        count, origin, total, squares = 0, 0.0, 0.0, 0.0
        later = -1
        for t in range(mask.shape[1] - 1, -1, -1):
            if mask[row, t]:
                discount = gamma if later > t + 1 else within
                later = t
                value = np.float64(values[row, t])
                if paid:
                    reward += rewards[row, t]
                delta = reward + discount * following - value
                reward = 0.0
                advantage = delta + discount * lam[row] * advantage
                following = value
                if measured:
                    origin = origin if count else advantage
                    count += 1
                    total += advantage - origin
                    squares += (advantage - origin) ** 2
                else:
                    critic = delta + discount * lam_critic[row] * critic
                    out[row, t] = (advantage - shift) * scale
                    returns[row, t] = critic + value
            elif not measured:
                out[row, t] = 0.0
                returns[row, t] = 0.0
        if measured:
            _put_moments(moments, row, count, origin, total, squares)


@compiled
def discounted_returns(
    first: int,
    stop: int,
    rewards: Any,
    mask: Any,
    gamma: float,
    within: float,
    last_token_reward: Any,
    shift: float,
    scale: float,
    out: Any,
    moments: Any,
) -> None:
    """Compute discounted returns of rows `first` to `stop`. Arguments and results as in `gae`."""
    paid, measured = rewards.size > 0, moments.size > 0
    for row in range(first, stop):
        carried = last_token_reward[row]
        count, origin, total, squares = 0, 0.0, 0.0, 0.0
        later = -1
        for t in range(mask.shape[1] - 1, -1, -1):
            if mask[row, t]:
                discount = gamma if later > t + 1 else within
                sum_from_here = carried if later < 0 else discount * carried
                later = t
                if paid:
                    sum_from_here += rewards[row, t]
                carried = sum_from_here
                if measured:
                    origin = origin if count else sum_from_here
                    count += 1
                    total += sum_from_here - origin
                    squares += (sum_from_here - origin) ** 2
                else:
                    out[row, t] = (sum_from_here - shift) * scale
            elif not measured:
                out[row, t] = 0.0
        if measured:
            _put_moments(moments, row, count, origin, total, squares)


@compiled
def _put_moments(moments: Any, row: int, count: int, origin: float, total: float, squares: float) -> None:
    """Write a row's (count, sum, sum of squared deviations). `total`, `squares`: sums of (squared) differences from
    `origin`, one of the entries: precise despite large offsets."""
    moments[row, 0] = count
    moments[row, 1] = total + count * origin
    moments[row, 2] = max(0.0, squares - total * total / max(count, 1))


def row_moments(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Count, sum, and sum of squared deviations from the mean, of each row's entries where the mask is True, [B, 3]."""
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
        mean = total / max(count, 1)  # a single pass would lose the spread of large entries close together to rounding
        for t in range(mask.shape[1]):
            if mask[row, t]:
                deviation = x[row, t] - mean
                squares += deviation * deviation
        out[row, 0] = count
        out[row, 1] = total
        out[row, 2] = squares


def shift_and_scale(x: torch.Tensor, mask: torch.Tensor, shift: float, scale: float) -> torch.Tensor:
    out = empty(mask.shape, torch.float32)
    _over_rows(_shift_and_scale, mask.shape, _tokens(x, mask), _mask(mask), float(shift), float(scale), out.numpy())
    return out


@compiled
def _shift_and_scale(first: int, stop: int, x: Any, mask: Any, shift: float, scale: float, out: Any) -> None:
    for row in range(first, stop):
        for t in range(mask.shape[1]):
            scaled = (x[row, t] - shift) * scale
            out[row, t] = scaled if mask[row, t] else 0.0


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate with numpy, which uses huge pages: first writes to torch's memory take longer than this module's loops."""
    return torch.from_numpy(np.empty(shape, dtype=str(dtype).removeprefix("torch.")))


def _tokens(x: torch.Tensor | None, mask: torch.Tensor) -> np.ndarray:
    """Convert a token tensor to an array; None becomes an empty array, which kernels skip."""
    if x is None:
        return np.zeros((0, 0), dtype=np.float32)
    assert x.shape == mask.shape, f"a token tensor {list(x.shape)} beside a mask {list(mask.shape)}"
    return _host(x).detach().contiguous().numpy()


def _rows(x: torch.Tensor | float | None, mask: torch.Tensor) -> np.ndarray:
    if not isinstance(x, torch.Tensor):
        return np.full(len(mask), x or 0.0)
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
