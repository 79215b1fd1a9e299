"""Finished groups on their way to the next batch. Whoever fills it and whoever empties it do not know each other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from roll_lite.data.samples import SampleGroup


class GroupStream:
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
