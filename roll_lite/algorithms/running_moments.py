"""Mean and variance of a stream of numbers, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


class RunningMoments:
    """Count, mean and sum of squared deviations (Welford's, merged over batches as Chan, Golub and LeVeque do), in float64.

    Sums within a batch are exactly rounded, so that the order of its rows changes nothing. Lives on the driver, saved with it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0

    def update(self, values: np.ndarray) -> None:
        """values [n]; none is fine."""
        count = len(values)
        if count == 0:
            return
        mean = math.fsum(values) / count
        squares = math.fsum((values.astype(np.float64) - mean) ** 2)
        total = self.count + count
        delta = mean - self.mean
        self.squares += squares + delta * delta * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        """ddof 1; 0 for less than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
