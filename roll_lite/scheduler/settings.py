"""The schedulers' settings, made from the `rollout` section of a configuration."""

from __future__ import annotations

from roll_lite.config.schema.domains import GroupFilterConfig, RolloutConfig
from roll_lite.data.user_function import load_function
from roll_lite.scheduler.filters import MEASURES, GroupFilter, kept_between, kept_by
from roll_lite.scheduler.supply import SUPPLIES, OnSync, Pacing

LEAST_SHARE = 4
"""An early log-prob pass takes at least 1/LEAST_SHARE of a batch; a smaller one is not worth its start."""


def least_early(prompts_per_step: int) -> int:
    """Minimum of groups for an early pass (rollout.stream_log_probs)."""
    return -(-prompts_per_step // LEAST_SHARE)


def pacing_of(config: RolloutConfig) -> Pacing:
    kind = SUPPLIES[config.supply]
    supply = kind() if config.max_staleness is None else kind(config.max_staleness)
    on_sync = OnSync(config.on_sync or ("drain" if config.supply == "one_step_off" else "pause"))
    return Pacing(supply, on_sync, config.oversample)


def filter_of(config: GroupFilterConfig | None) -> GroupFilter | None:
    if config is None:
        return None
    if config.name in MEASURES:
        cause = kept_between(config.name, *config.bounds)
    else:
        cause = kept_by(load_function(config.name, "rollout.filter.name", "SampleGroup -> bool"), config.name)
    return GroupFilter(cause, config.tries, fill=config.when_short == "fail")
