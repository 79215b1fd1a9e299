"""The ranks of a cluster live together and die together, and whoever waits for anything notices the death of any of them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from roll_lite.distributed.failures import ClusterDead, RankFailed


class RankGroup:
    """The actors of one cluster. Each watched one has a call that ends only with its process, so that Ray reports its death at once.

    `watch`: Ray's options for that call, which must not stand in the way of others; None leaves the actors unwatched.
    """

    def __init__(
        self, name: str, actors: Sequence[Any], watch: Mapping[str, str] | None, log_folder: Path | None, timeout_s: float | None
    ) -> None:
        self.name = name
        self.actors = list(actors)
        self.log_folder = log_folder
        self.timeout_s = timeout_s
        self.phases: list[str] = []
        """Methods called and not yet answered, oldest first."""
        self.deaths: dict[ray.ObjectRef, int] = {}
        self.started = False
        """All constructors have run."""
        self.end: str | None = None
        """Why the group is dead."""
        self._watch = watch
        if watch is not None:
            self.deaths = {actor.until_death.options(**watch).remote(): rank for rank, actor in enumerate(self.actors)}
        WATCH.add(self)

    @property
    def phase(self) -> str:
        if not self.started:
            return "start"
        return self.phases[0] if self.phases else "idle"

    def log_file(self, rank: int) -> Path | None:
        return log_file(self.log_folder, self.name, rank)

    def check(self) -> None:
        if self.end is not None:
            raise ClusterDead(self.name, self.end)

    def fail(self, failure: RankFailed) -> None:
        """Survivors may sit in a collective for ever: nothing but a kill reaches them."""
        if self.end is None:
            self.kill(str(failure))

    def kill(self, why: str) -> None:
        self.end = why
        WATCH.remove(self)
        for actor in self.actors:
            ray.kill(actor)

    def stacks(self, rank: int) -> ray.ObjectRef:
        """Where a watched rank stands, also while it is busy."""
        return self.actors[rank].stacks.options(**(self._watch or {})).remote()


class LivenessWatch:
    """All living groups of this process. A group that nobody holds any more ends by itself: Ray ends actors without handles."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[RankGroup]] = []

    def groups(self) -> list[RankGroup]:
        return [group for reference in self._groups if (group := reference()) is not None]

    def add(self, group: RankGroup) -> None:
        self._groups = [weakref.ref(known) for known in [*self.groups(), group]]

    def remove(self, group: RankGroup) -> None:
        self._groups = [weakref.ref(known) for known in self.groups() if known is not group]

    def forget_all(self) -> None:
        """The Ray session ends, and every actor with it."""
        for group in self.groups():
            group.end = "the Ray session has ended"
        self._groups.clear()

    def deaths(self) -> dict[ray.ObjectRef, tuple[RankGroup, int]]:
        """A reference for every watched rank that becomes ready, with an error, when its process dies."""
        return {ref: (group, rank) for group in self.groups() for ref, rank in group.deaths.items()}


WATCH = LivenessWatch()


def log_file(folder: Path | None, role: str, rank: int) -> Path | None:
    return folder / f"{role}-{rank}.log" if folder else None
