"""How the ratios of new and old policy are spread: counts over fixed bins add up over micro-batches, ranks and updates, quantiles do not.

Bins are even in asinh(log-ratio / FINE): as wide as FINE / 38 around a log-ratio of 0, where a first update leaves most tokens, and
2.6 % of the log-ratio far from it. They cover all that the clamp of log-ratios lets through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll_lite.algorithms.kl import LOG_RATIO_LIMIT

BINS = 801
"""Odd: the middle bin has a log-ratio of exactly 0 as its centre."""

FINE = 1e-3
"""Log-ratio at which the bins turn from even to proportional."""

_SPAN = math.asinh(LOG_RATIO_LIMIT / FINE)


@dataclass
class RatioHistogram:
    """Counts by domain. Kept on the device until read; `collect` starts anew."""

    domains: int = 1
    _counts: torch.Tensor | None = None

    def record(self, log_ratio: torch.Tensor, mask: torch.Tensor, domain_numbers: torch.Tensor) -> None:
        """log_ratio, mask [B, T-1], domain_numbers [B] int64. What is not a number counts as the largest ratio."""
        log_ratio = log_ratio.detach().nan_to_num(nan=LOG_RATIO_LIMIT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        place = torch.asinh(log_ratio.double() / FINE) / _SPAN
        bins = ((place + 1) * (BINS / 2)).long().clamp(0, BINS - 1) + BINS * domain_numbers[:, None]
        counts = torch.zeros(self.domains * BINS, dtype=torch.int64, device=mask.device)
        counts.index_add_(0, bins.flatten(), mask.flatten().long())
        self._counts = counts if self._counts is None else self._counts + counts

    def collect(self) -> np.ndarray:
        """int64 [domains, BINS] of what was recorded since the last call; the sum over domains holds for all of them."""
        counts = torch.zeros(self.domains * BINS, dtype=torch.int64) if self._counts is None else self._counts.cpu()
        self._counts = None
        return counts.view(self.domains, BINS).numpy()


def ratio_quantiles(counts: np.ndarray, quantiles: Sequence[float]) -> list[float]:
    """counts [BINS] -> for each quantile q the ratio that at least a share q of the tokens does not exceed, to the bin; NaN of nothing."""
    total = np.cumsum(counts)
    if total[-1] == 0:
        return [math.nan] * len(quantiles)
    centres = np.exp(FINE * np.sinh(_SPAN * ((np.arange(BINS) + 0.5) / (BINS / 2) - 1)))
    places = np.searchsorted(total, np.ceil(np.asarray(quantiles) * total[-1]).clip(1))
    return [float(centre) for centre in centres[places]]
