"""Finished groups on their way to the next batch: the queue, and who fills it when."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from roll_lite.data.samples import SampleGroup
from roll_lite.scheduler.domain import DomainScheduler


class GroupStream:
    """Whoever fills it and whoever empties it do not know each other."""

    def __init__(self, domains: Iterable[str]) -> None:
        self._groups: dict[str, deque[SampleGroup]] = {name: deque() for name in domains}
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def put(self, group: SampleGroup) -> None:
        self._groups[group.domain].append(group)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come: whoever waits for groups gets this error, now and later."""
        self._error = self._error or error
        self._changed.set()

    def available(self, domain: str) -> int:
        return len(self._groups[domain])

    async def take(self, quota: Mapping[str, int]) -> list[SampleGroup]:
        """The oldest finished groups of each domain, once there are enough of all, in the order of their numbers."""
        while True:
            if self._error is not None:
                raise self._error
            if all(len(self._groups[name]) >= count for name, count in quota.items()):
                break
            self._changed.clear()
            await self._changed.wait()
        groups = [self._groups[name].popleft() for name, count in quota.items() for _ in range(count)]
        return sorted(groups, key=lambda group: group.group)


class Supply:
    """Admits what the batch needs and not one prompt more; every lost group is replaced by another prompt of its domain.

    `in_waves`: replacements wait until nothing runs any more, so that which prompt follows which does not depend on timing.
    """

    def __init__(self, schedulers: Mapping[str, DomainScheduler], stream: GroupStream, in_waves: bool) -> None:
        self._schedulers = schedulers
        self._stream = stream
        self._in_waves = in_waves
        self._owed: Counter[str] = Counter()

    def want(self, quota: Mapping[str, int]) -> None:
        """The next batch is being waited for."""
        for name, count in quota.items():
            scheduler = self._schedulers[name]
            scheduler.admit(max(0, count - self._stream.available(name) - scheduler.running))

    def group_ended(self, domain: str, lost: bool) -> None:
        """A group of the domain is finished or lost."""
        self._owed[domain] += lost
        if self._in_waves and any(scheduler.running for scheduler in self._schedulers.values()):
            return
        for name, scheduler in self._schedulers.items():
            scheduler.admit(self._owed.pop(name, 0))
