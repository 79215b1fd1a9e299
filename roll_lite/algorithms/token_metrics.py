"""Token metrics by micro-batch: sums and histograms, which add up over ranks, and peaks. `<name>#<number>` is the metric `<name>` of domain
`<number>`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from roll_lite.algorithms.kl import LOG_RATIO_LIMIT, kl_estimate

BINS = 801
"""Number of histogram bins; odd, so that log-ratio 0 is the centre of the middle bin."""

FINE = 1e-3
"""Absolute log-ratio up to which bins are about equally wide. Beyond it, widths grow with the log-ratio."""

_SPAN = math.asinh(LOG_RATIO_LIMIT / FINE)

# Bins are even in asinh(log-ratio / FINE): FINE / 38 wide around log-ratio 0, where a first update leaves most tokens, and 2.6 % of the
# log-ratio far from it. They cover the clamp's range.


def sums_by_domain(tokens: dict[str, torch.Tensor], domain_numbers: torch.Tensor, domains: int) -> dict[str, torch.Tensor]:
    """Sum each metric by domain, {`<name>#<domain number>`: float64 sum}. `tokens`: {metric name: values [B, T-1], 0 where masked}."""
    rows = torch.stack([x.detach().sum(1, dtype=torch.float64) for x in tokens.values()])
    own = domain_numbers == torch.arange(domains, device=domain_numbers.device)[:, None]
    sums = torch.where(own, rows[:, None], 0.0).sum(2)  # not a product with the mask: NaN and infinity stay in their domain
    return {f"{name}#{number}": sums[i, number] for i, name in enumerate(tokens) for number in range(domains)}


@dataclass
class Peaks:
    """Maxima and minima of metrics by domain, kept on the device until `collect`."""

    domains: int = 1
    _largest: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """{(metric name, sign): [domains] maximum of sign * value}."""

    def record(self, name: str, values: torch.Tensor, mask: torch.Tensor, domain_numbers: torch.Tensor, *, smallest: bool = False) -> None:
        """Record each domain's maximum (if `smallest`, minimum) of values [B, T-1] where the mask is True; NaN if one of them is NaN.
        `domain_numbers` [B]: domain of each row."""
        sign = -1 if smallest else 1
        if values.numel() == 0:
            return
        rows = (sign * values.detach()).masked_fill(~mask, -math.inf).amax(1)
        peak = rows.new_full((self.domains,), -math.inf).scatter_reduce(0, domain_numbers, rows, "amax")
        key = (name, sign)
        self._largest[key] = torch.maximum(self._largest[key], peak) if key in self._largest else peak

    def collect(self) -> dict[str, float]:
        """Return and clear the peaks; domains without tokens are omitted."""
        seen = {
            f"{name}#{number}": sign * value
            for (name, sign), peaks in self._largest.items()
            for number, value in enumerate(peaks.tolist())
            if value != -math.inf
        }
        self._largest.clear()
        return seen


SampleSums = Mapping[int, tuple[float, int]]
"""{sample number: (sum over the sample's tokens, number of these tokens)}."""


@dataclass
class RowSums:
    _seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def record(self, samples: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> None:
        self._seen.append((samples, values.detach().sum(1, dtype=torch.float64), mask.sum(1)))

    def collect(self) -> SampleSums:
        rows = [zip(*(part.tolist() for part in parts), strict=True) for parts in self._seen]
        self._seen.clear()
        return {sample: (total, tokens) for part in rows for sample, total, tokens in part if tokens}


@dataclass
class RatioHistogram:
    domains: int = 1
    _counts: torch.Tensor | None = None

    def record(self, log_ratio: torch.Tensor, mask: torch.Tensor, domain_numbers: torch.Tensor) -> None:
        """Count log-ratios [B, T-1] where the mask is True, by domain (domain_numbers [B]). NaN counts as LOG_RATIO_LIMIT."""
        log_ratio = log_ratio.detach().nan_to_num(nan=LOG_RATIO_LIMIT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        place = torch.asinh(log_ratio.double() / FINE) / _SPAN
        bins = ((place + 1) * (BINS / 2)).long().clamp(0, BINS - 1) + BINS * domain_numbers[:, None]
        counts = torch.zeros(self.domains * BINS, dtype=torch.int64, device=mask.device)
        counts.index_add_(0, bins.flatten(), mask.flatten().long())
        self._counts = counts if self._counts is None else self._counts + counts

    def collect(self) -> np.ndarray:
        counts = torch.zeros(self.domains * BINS, dtype=torch.int64) if self._counts is None else self._counts.cpu()
        self._counts = None
        return counts.view(self.domains, BINS).numpy()


def nearest_rank(percent: int, count: int) -> int:
    return max(1, -(-percent * count // 100))


def ratio_percentiles(counts: np.ndarray, percents: Sequence[int]) -> list[float]:
    """Percentiles of the ratio exp(log-ratio) from histogram counts [BINS], as bin centres; NaN if all counts are 0."""
    total = np.cumsum(counts)
    if total[-1] == 0:
        return [math.nan] * len(percents)
    centres = np.exp(FINE * np.sinh(_SPAN * ((np.arange(BINS) + 0.5) / (BINS / 2) - 1)))
    places = np.searchsorted(total, [nearest_rank(percent, int(total[-1])) for percent in percents])
    return [float(centre) for centre in centres[places]]


def mismatch_of_tokens(rollout_log_probs: torch.Tensor, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute |rollout_log_probs - log_probs| and the k3 estimate of KL(rollout || trainer), both [B, T-1]."""
    return (rollout_log_probs - log_probs).abs(), kl_estimate(rollout_log_probs, log_probs, "k3")
