"""Who fills the stream of finished groups, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from roll_lite.scheduler.domain import DomainScheduler
from roll_lite.scheduler.stream import GroupStream


class Supply(Protocol):
    def want(self, quota: Mapping[str, int]) -> None:
        """The next batch is being waited for."""
        ...

    def group_ended(self, domain: str, lost: bool) -> None:
        """A group of the domain is finished or lost."""
        ...


class SynchronousSupply:
    """Admits what the batch needs and not one prompt more; every lost group is replaced by another prompt of its domain.

    `in_waves`: replacements wait until nothing runs any more, so that which prompt follows which does not depend on timing.
    """

    def __init__(self, schedulers: Mapping[str, DomainScheduler], stream: GroupStream, in_waves: bool) -> None:
        self._schedulers = schedulers
        self._stream = stream
        self._in_waves = in_waves
        self._owed: Counter[str] = Counter()

    def want(self, quota: Mapping[str, int]) -> None:
        for name, count in quota.items():
            scheduler = self._schedulers[name]
            scheduler.admit(max(0, count - self._stream.available(name) - scheduler.running))

    def group_ended(self, domain: str, lost: bool) -> None:
        self._owed[domain] += lost
        if self._in_waves and any(scheduler.running for scheduler in self._schedulers.values()):
            return
        for name, scheduler in self._schedulers.items():
            scheduler.admit(self._owed.pop(name, 0))
