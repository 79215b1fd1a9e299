"""What is told of a micro-batch domain by domain: sums, which add up, and peaks, which do not.

Names are `<name>#<number>`, number being the domain's place in the configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


def sums_by_domain(tokens: dict[str, torch.Tensor], domain_numbers: torch.Tensor, domains: int) -> dict[str, torch.Tensor]:
    """Each [B, T-1], 0 where masked -> `<name>#<number>`: float64 sums over the rows of each domain."""
    rows = torch.stack([x.detach().sum(1, dtype=torch.float64) for x in tokens.values()])
    sums = rows @ torch.nn.functional.one_hot(domain_numbers, domains).double()
    return {f"{name}#{number}": sums[i, number] for i, name in enumerate(tokens) for number in range(domains)}


@dataclass
class Peaks:
    """Largest (or smallest) values seen: they do not add up, so they travel beside the metric sums. Kept on the device until read."""

    domains: int = 1
    _largest: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """By name and sign, [domains]; the sign -1 turns the smallest into the largest."""

    def record(self, name: str, values: torch.Tensor, mask: torch.Tensor, domain_numbers: torch.Tensor, *, smallest: bool = False) -> None:
        """values, mask [B, T-1], domain_numbers [B]. NaN is kept: a peak that hides it would be a lie."""
        sign = -1 if smallest else 1
        if values.numel() == 0:
            return
        rows = (sign * values.detach()).masked_fill(~mask, -math.inf).amax(1)
        peak = rows.new_full((self.domains,), -math.inf).scatter_reduce(0, domain_numbers, rows, "amax")
        key = (name, sign)
        self._largest[key] = torch.maximum(self._largest[key], peak) if key in self._largest else peak

    def collect(self) -> dict[str, float]:
        """What was seen since the last call; nothing for domains without tokens."""
        seen = {
            f"{name}#{number}": sign * value
            for (name, sign), peaks in self._largest.items()
            for number, value in enumerate(peaks.tolist())
            if value != -math.inf
        }
        self._largest.clear()
        return seen
