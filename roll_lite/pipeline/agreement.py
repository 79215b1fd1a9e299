"""Check that engine and trainer give the tokens of the first batch the same log-probs.

If they read a model differently (config.json, a tied head, an engine argument), a run trains without error on another policy's samples. The
mismatch is measured in a forward pass that runs anyway.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from roll_lite.config.arithmetic import generates, trains
from roll_lite.config.keep_mask import is_truncated
from roll_lite.config.schema.run import RunConfig

logger = logging.getLogger(__name__)

MEAN = "mismatch/mean"
DUMPS = """The dumps (replay.path) were sampled from another model than model.path, or at another temperature. To train on another policy's
samples, use algorithm.old_log_probs: rollout or algorithm.mismatch_correction, and raise rollout.max_mismatch; null allows any."""
ENGINES = """Likely causes:
- config.json holds something that the trainer and the engine read differently (RoPE, tied embeddings, the kind of attention)
- actor_infer.strategy.engine_args change the model or its precision (hf_overrides, kv_cache_dtype)
- the weights in the engine are not the trainer's: see whether the run ends earlier with weight_sync.verify: full
If engines are meant to differ that much, raise rollout.max_mismatch; null allows any difference."""


class DifferentModels(RuntimeError):
    """Engine and trainer give the same tokens different log-probs."""


class Agreement:
    """Checks the first step where both sides give log-probs; in a critic's warm-up with `old_log_probs: rollout` the actor gives none."""

    def __init__(self, config: RunConfig) -> None:
        self._bound = config.rollout.max_mismatch if trains(config) else None
        self._causes = ENGINES if generates(config) else DUMPS
        # Without a keep mask, log-probs of truncated sampling belong to another distribution, by design.
        comparable = [name for name, one in config.domains.items() if config.rollout.keep_mask or not is_truncated(one.sampling)]
        self._left_out = [name for name in config.domains if name not in comparable]
        self._metrics = [f"domain/{name}/{MEAN}" for name in comparable] if self._left_out else [MEAN]
        self._has_said = False

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise DifferentModels if the mismatch exceeds the bound; warn once about samples that cannot be compared."""
        if self._bound is None:
            return
        told = [name for name in self._metrics if name in metrics]
        self._say_what_is_missing(any_told=bool(told))
        if not told:
            return
        if any(math.isnan(metrics[name]) for name in told):
            return  # a sample without log-probs, whose update is skipped
        for name in told:
            if metrics[name] > self._bound:
                raise DifferentModels(
                    f"engines and trainer disagree about the tokens of the first batch: their log-probs differ by {metrics[name]:.3g} nats "
                    f"on average ({name}), rollout.max_mismatch allows {self._bound:g}: they do not hold the same model\n{self._causes}"
                )
        self._bound = None

    def _say_what_is_missing(self, any_told: bool) -> None:
        has_said, self._has_said = self._has_said, True
        if has_said:
            return
        if self._left_out:
            logger.warning(
                "rollout.max_mismatch: engines and trainer are not compared on samples of %s: sampling is truncated there, and its "
                "log-probs are those of another distribution; rollout.keep_mask: true makes them comparable",
                ", ".join(self._left_out),
            )
        if self._metrics and not any_told:
            logger.warning("rollout.max_mismatch: engines and trainer are not compared yet: the actor gave no log-probs in this step")
