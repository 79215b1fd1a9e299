from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from roll_lite.distributed.failures import FleetDown
from roll_lite.distributed.fleet import Fleet, Member, Policy
from roll_lite.rewards.base import RewardFailed

Item = TypeVar("Item")
Result = TypeVar("Result")
M = TypeVar("M", bound=Member)


@dataclass(eq=False)
class ScoringJob(Generic[Item, Result]):
    item: Item
    answer: asyncio.Future[Result]
    timeout_s: float = math.inf
    alone: bool = False
    """Score alone: its last batch hung or killed the worker."""


class ScoringPool(ABC, Generic[M, Item, Result]):
    """Queue of samples that free workers score with reward functions or models."""

    def __init__(self, path: str, members: Sequence[M], policy: Policy, window_s: float = 0.0) -> None:
        self._fleet = Fleet(path, members, policy, self._serve, self._lost, self._down)
        self._queue: deque[ScoringJob[Item, Result]] = deque()
        self._open: dict[asyncio.Future[Result], None] = {}
        self._arrived = asyncio.Event()
        self._idle = 0
        self._window_s = window_s

    @abstractmethod
    async def _serve(self, member: M) -> None:
        """Score samples on a worker or model until it is lost."""

    @abstractmethod
    def _lost(self, member: M, cause: str) -> None:
        """Retry or fail the samples that a lost worker or model was scoring."""

    @abstractmethod
    def _most(self, member: M) -> int:
        """Maximum samples in the next batch of a worker or model."""

    def newly_replaced(self) -> list[str]:
        return self._fleet.newly_replaced()

    @property
    def replaced(self) -> int:
        return self._fleet.replaced

    async def score(self, item: Item, timeout_s: float = math.inf) -> Result:
        """Score a sample. Raise RewardFailed if scoring fails."""
        if self._fleet.end is not None:
            raise RewardFailed(str(self._fleet.end))
        job = ScoringJob(item, asyncio.get_running_loop().create_future(), timeout_s)
        self._queue.append(job)
        self._arrived.set()
        self._open[job.answer] = None
        try:
            return await job.answer
        finally:
            del self._open[job.answer]

    async def _take(self, member: M) -> list[ScoringJob[Item, Result]]:
        self._idle += 1
        try:
            while True:
                while not self._queue:
                    self._arrived.clear()
                    await self._arrived.wait()
                if self._window_s and len(self._queue) < self._most(member):
                    await asyncio.sleep(self._window_s)
                if batch := self._next(min(self._most(member), math.ceil(len(self._queue) / self._idle))):
                    return batch
        finally:
            self._idle -= 1

    def _next(self, most: int, joins: bool = False) -> list[ScoringJob[Item, Result]]:
        """Take up to `most` queued samples; a sample marked `alone` comes by itself, and never for a busy worker (`joins`)."""
        batch: list[ScoringJob[Item, Result]] = []
        while self._queue and len(batch) < most and not (self._queue[0].alone and (batch or joins)):
            job = self._queue.popleft()
            if not job.answer.done():
                batch.append(job)
            if job.alone:
                break
        return batch

    def _resolve(self, job: ScoringJob[Item, Result], result: Result | Exception) -> None:
        if job.answer.done():
            return
        if isinstance(result, Exception):
            job.answer.set_exception(result)
        else:
            job.answer.set_result(result)

    def _fail(self, jobs: Iterable[ScoringJob[Item, Result]], cause: str) -> None:
        for job in jobs:
            self._resolve(job, RewardFailed(cause))

    def _fail_waiting(self, cause: str) -> None:
        self._fail(self._queue, cause)
        self._queue.clear()

    def _down(self, end: FleetDown) -> None:
        self._queue.clear()
        for answer in self._open:
            if not answer.done():
                answer.set_exception(RewardFailed(str(end)))
