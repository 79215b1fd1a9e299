"""Dynamic sampling: filter finished groups by scores or a user's function. Other prompts' groups replace them, within the limit `tries`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple

from roll_lite.config.schema.domains import GroupFilterConfig
from roll_lite.config.user_function import load_function
from roll_lite.data.samples import SampleGroup, Score

LOW, HIGH, FUNCTION = "low", "high", "function"
"""Reasons for filtering: statistic too low, too high, rejected by the user's function."""


class LeftOut(NamedTuple):
    word: str
    text: str


Cause = Callable[[SampleGroup], LeftOut | None]


@dataclass(frozen=True)
class GroupFilter:
    cause: Cause
    tries: int = 10
    """Maximum prompts tried / groups in a batch."""
    fill: bool = True
    """True: the run fails when the tries are used up. False: it trains on the groups at hand."""


def kept_between(value: str, above: float | None, below: float | None) -> Cause:
    measure = MEASURES[value]

    def cause(group: SampleGroup) -> LeftOut | None:
        found = measure([sample.score for sample in group.samples if sample.score is not None])
        if above is not None and not found > above:
            return LeftOut(LOW, f"{value} not above {above:g}")
        if below is not None and not found < below:
            return LeftOut(HIGH, f"{value} not below {below:g}")
        return None

    return cause


class FilterFailed(ValueError):
    """Error of a user's filter."""


def kept_by(function: Callable[[SampleGroup], bool], name: str) -> Cause:
    def cause(group: SampleGroup) -> LeftOut | None:
        what = f"rollout.filter.name: {name}, asked for a group of domain {group.domain},"
        try:
            keeps = function(group)
        except Exception as error:  # a process edge: the code is the user's
            raise FilterFailed(f"{what} raised {type(error).__name__}: {error}") from error
        if keeps not in (True, False):
            raise FilterFailed(f"{what} returned {keeps!r:.80}; it has to say True (the group trains) or False")
        return None if keeps else LeftOut(FUNCTION, name)

    return cause


MEASURES: dict[str, Callable[[Sequence[Score]], float]] = {
    "accuracy": lambda scores: fmean(score.is_correct for score in scores),
    "mean": lambda scores: fmean(score.value for score in scores),
    "std": lambda scores: pstdev([score.value for score in scores]),
}


def filter_of(config: GroupFilterConfig | None) -> GroupFilter | None:
    if config is None:
        return None
    if config.name in MEASURES:
        cause = kept_between(config.name, *config.bounds)
    else:
        cause = kept_by(load_function(config.name, "rollout.filter.name"), config.name)
    return GroupFilter(cause, config.tries, fill=config.when_short == "fail")
