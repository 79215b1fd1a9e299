"""What becomes of a KL coefficient in the course of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from roll_lite.config.schema import AdaptiveKlConfig, KlControllerConfig

LARGEST_ERROR = 0.2
"""However far the KL is off its target, the coefficient reacts to no more than this relative error."""


class KlController:
    """Holds the coefficient; adaptive: after each step it is multiplied with 1 + clip(kl / target - 1, +-0.2) * samples / horizon.

    Ziegler et al. (arXiv 1909.08593). A step counts for at most one horizon, so that no batch can turn the coefficient's sign.
    """

    def __init__(self, config: KlControllerConfig, coef: float) -> None:
        self.coef = coef
        self._adaptive = config if isinstance(config, AdaptiveKlConfig) else None

    def step(self, kl_per_token: float, samples: int) -> None:
        """Once per training step, over all domains: the KL measured in it and the samples it was measured on."""
        if self._adaptive is None or samples == 0:
            return
        if not math.isfinite(kl_per_token):
            raise ValueError(f"the KL controller got KL(policy || reference) = {kl_per_token} over {samples} samples: it has to be finite")
        error = min(max(kl_per_token / self._adaptive.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * min(samples / self._adaptive.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """A fixed coefficient stays the configured one: changing it for a resumed run is the user's right."""
        if self._adaptive is not None:
            self.coef = state["coef"]
