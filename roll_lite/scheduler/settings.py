"""What the `rollout` section of a configuration means to the schedulers."""

from __future__ import annotations

from roll_lite.config.schema.domains import GroupFilterConfig, RolloutConfig
from roll_lite.data.user_function import load_function
from roll_lite.scheduler.filters import DEFAULT_TRIES, MEASURES, GroupFilter, Tries, kept_between, kept_by
from roll_lite.scheduler.supply import SUPPLIES, OnSync, Supply


def supply_of(config: RolloutConfig) -> Supply:
    kind = SUPPLIES[config.supply]
    return kind() if config.max_staleness is None else kind(config.max_staleness)


def on_sync_of(config: RolloutConfig) -> OnSync:
    return OnSync(config.on_sync or ("drain" if config.supply == "one_step_off" else "pause"))


def filter_of(config: GroupFilterConfig | None) -> GroupFilter | None:
    if config is None:
        return None
    if config.type in MEASURES:
        return kept_between(config.type, *config.bounds)
    return kept_by(load_function(config.type, "rollout.filter.type", "SampleGroup -> bool"), config.type)


def tries_of(config: GroupFilterConfig | None) -> Tries:
    return DEFAULT_TRIES if config is None else Tries(config.tries, fill=config.when_short == "fail")
