"""Reward workers: small processes that run reward functions, and the pool that keeps them busy.

Nothing here imports torch: a reward worker starts fast and stays small.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.distributed.fleet import Fleet, FleetDown, MemberLost, Policy, SlowStart, until_silent
from roll_lite.distributed.rank_group import kill_stopped
from roll_lite.files import first_line
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.running.batch_scorer import BUSY, BatchScorer, Scored, slow_start, time_out

BATCH_SECONDS = 0.05
"""Target duration of one call: much longer than the call's own cost, short enough that samples do not wait for each other."""
SLICE_SECONDS = 0.5
"""A call returns after this time with the samples done so far, so that a hanging sample does not hold up its batch."""
MOST_SAMPLES = 64
"""Maximum of samples in one call, and in flight in one worker."""
GRACE_SECONDS = 1.0
LOST_IN_A_ROW = 16
"""Number of lost workers, without a score in between, after which all waiting samples fail instead of waiting for their own time-outs."""


class RewardWorker:
    """A synchronous actor, so that reward functions run in the main thread of their process.

    No method may be `async def`: Ray would then run everything in another thread.
    """

    _scorer: BatchScorer

    def __init__(self, config: RewardConfig, path: str) -> None:
        self._config = config
        self._path = path

    def prepare(self) -> tuple[bool, bool, str]:
        """Load and warm up the reward functions. Returns whether one is async, whether one takes lists, and a note for the user."""
        self._scorer, reward = BatchScorer.of(self._config, self._path)
        return reward.is_async, reward.is_batched, reward.describe()

    def score(self, items: dict[int, RewardInput]) -> Scored:
        """Score items by number. Unfinished ones are returned by a later call, with or without further items."""
        return self._scorer(items, SLICE_SECONDS)

    def process_id(self) -> int:
        return os.getpid()

    def place(self) -> tuple[str, int]:
        """Node and process id."""
        return ray.get_runtime_context().get_node_id(), os.getpid()


@dataclass
class _Waiting:
    item: RewardInput
    answer: asyncio.Future[Score]
    alone: bool = False
    """Score it on its own next, since its last batch hung or died: so the right sample is blamed."""


class PooledWorker:
    """A reward worker as a member of its pool."""

    is_async = False
    is_batched = False
    note = ""
    """Note for the user on how samples are scored."""

    def __init__(self, config: RewardConfig, path: str) -> None:
        self.name = f"reward {config.name}"
        self.actor: Any = None
        self._place: tuple[str, int] | None = None
        self.under_way: dict[int, _Waiting] = {}
        """Samples in flight, by the worker's numbers."""
        self._config = config
        self._path = path

    async def start(self) -> None:
        self._place = None
        self.actor = ray.remote(RewardWorker).options(num_cpus=0).remote(self._config, self._path)
        try:
            self.is_async, self.is_batched, self.note = await self.actor.prepare.remote()
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from None
        self._place = await self.actor.place.remote()

    async def until_lost(self) -> str:
        try:
            return f"{self.name}: {await until_silent(lambda: self.actor.process_id.remote(), lambda: bool(self.under_way))}"
        except RayActorError as error:
            return self.died(error)

    def kill(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor)
        if self._place is not None:
            kill_stopped(*self._place)

    def died(self, error: RayActorError) -> str:
        return f"{self.name}: its process died: {first_line(error)}"


class RewardPool:
    """A RewardClient over the reward workers of one domain. A free worker takes waiting samples at once.

    A function that hangs or kills its process fails its own sample and costs a worker, which is replaced; other samples of the call are
    scored again. A hang in Python is interrupted inside the worker. Other hangs (a stopped process, a call into C) are ended by the pool's
    clock, together with the process. If workers are lost again and again without a score, all waiting samples fail. Samples of an async
    function join a busy worker's and leave it one by one.
    """

    def __init__(self, domain: str, config: RewardConfig) -> None:
        self.domain = domain
        self._config = config
        self._path = f"domains.{domain}.reward"
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._idle = 0
        self._seconds_per_sample: float | None = None
        self._lost_in_a_row = 0
        members = [PooledWorker(config, self._path) for _ in range(config.workers)]
        policy = Policy(config.start_timeout_s, path=self._path)
        self._fleet = Fleet(f"{self._path}.workers", members, policy, self._serve, self._lost, self._down)

    async def start(self) -> None:
        """Start and warm up all workers. A mistake in the reward's configuration raises ValueError."""
        try:
            await self._fleet.start()
        except SlowStart:
            raise ValueError(slow_start(self._config, self._path)) from None

    async def score(self, item: RewardInput) -> Score:
        if self._fleet.end is not None:
            raise RewardFailed(self._broken(self._fleet.end))
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrived.set()
        return await waiting.answer

    @property
    def capacity(self) -> float:
        return sum(MOST_SAMPLES if member.is_async else 1 for member in self._fleet.members)

    def close(self) -> None:
        self._fleet.close()

    def newly_replaced(self) -> int:
        """Number of workers replaced since the last call, for the statistics of a batch."""
        return self._fleet.newly_replaced()

    @property
    def replaced(self) -> int:
        """Number of workers replaced since the start."""
        return self._fleet.replaced

    @property
    def workers(self) -> list[Any]:
        """Handles of the living workers."""
        return [member.actor for member in self._fleet.serving]

    @property
    def note(self) -> str:
        """Note for the user on how samples are scored."""
        return self._fleet.members[0].note

    # ------------------------------------------------------------ workers

    async def _serve(self, member: PooledWorker) -> None:
        numbers = itertools.count()
        while True:
            batch = self._join(member.under_way) if member.under_way else await self._take(member)
            await self._call(member, dict(zip(numbers, batch, strict=False)))

    async def _call(self, member: PooledWorker, batch: dict[int, _Waiting]) -> None:
        """Score a batch. Raises MemberLost if the worker must be replaced."""
        member.under_way |= batch
        try:
            # The worker ends a call in time, unless the running code cannot be interrupted.
            async with asyncio.timeout(BUSY * self._config.timeout_s + SLICE_SECONDS + GRACE_SECONDS):
                scored: Scored = await member.actor.score.remote({number: waiting.item for number, waiting in batch.items()})
        except TimeoutError:
            raise MemberLost(time_out(self._config.name, self._config.timeout_s)) from None
        except RayActorError as error:
            raise MemberLost(member.died(error)) from error
        except RayTaskError:  # a bug in the worker, whose state is unknown
            raise
        except Exception as error:  # an item cannot be pickled: recorded as a failure of these samples
            failed = {number: member.under_way.pop(number) for number in batch}
            self._blame(failed, f"{member.name}: {type(error).__name__}: {first_line(error)}")
        else:
            self._answer(member, scored, len(batch))
            if scored.interrupted:
                raise MemberLost(f"{member.name}: it was interrupted somewhere inside")

    def _lost(self, member: PooledWorker, cause: str) -> None:
        """Retry or fail the samples in flight in a lost worker."""
        self._blame(member.under_way, cause)
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= LOST_IN_A_ROW:
            lost = f"{self._lost_in_a_row} workers were lost one after the other"
            self._fail_all(f"{member.name}: {lost}, and nothing was scored in between; the last: {cause}")

    def _down(self, end: FleetDown) -> None:
        for member in self._fleet.members:
            self._queue.extend(member.under_way.values())
        self._fail_all(self._broken(end))

    def _broken(self, end: FleetDown) -> str:
        return f"reward {self._config.name}: no worker can be started any more: {end.cause}"

    # ------------------------------------------------------------ samples

    async def _take(self, member: PooledWorker) -> list[_Waiting]:
        self._idle += 1
        try:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            limit = self._batch_limit(member)
            batch = [self._queue.popleft()]
            while self._queue and len(batch) < limit and not batch[0].alone and not self._queue[0].alone:
                batch.append(self._queue.popleft())
            return batch
        finally:
            self._idle -= 1

    def _join(self, under_way: dict[int, _Waiting]) -> list[_Waiting]:
        """Further samples for a busy worker: its share of those waiting; none if a sample must run alone."""
        if any(waiting.alone for waiting in under_way.values()):
            return []
        room = min(MOST_SAMPLES - len(under_way), math.ceil(len(self._queue) / (self._idle + 1)))
        batch: list[_Waiting] = []
        while len(batch) < room and not self._queue[0].alone:
            batch.append(self._queue.popleft())
        return batch

    def _batch_limit(self, member: PooledWorker) -> int:
        share = math.ceil(len(self._queue) / self._idle)
        if member.is_async:
            return min(MOST_SAMPLES, share)
        if self._seconds_per_sample is None:
            return 1
        seconds = self._config.timeout_s / 2 if member.is_batched else BATCH_SECONDS  # a list's samples share one time limit
        return max(1, min(MOST_SAMPLES, share, int(seconds / max(self._seconds_per_sample, 1e-6))))

    def _answer(self, member: PooledWorker, scored: Scored, given: int) -> None:
        """Hand out a call's results. `given`: number of samples in the call."""
        results = scored.results if not scored.interrupted else dict.fromkeys(member.under_way) | scored.results
        done = 0
        for number, result in sorted(results.items(), reverse=True):
            waiting = member.under_way.pop(number)
            if result is None:
                self._again(waiting, waiting.alone or number in scored.suspects)
                continue
            done += 1
            if isinstance(result, str):
                self._fail(waiting, result)
            elif not waiting.answer.done():
                waiting.answer.set_result(result)
            if isinstance(result, Score) or not scored.interrupted:
                self._lost_in_a_row = 0
        if member.is_async or not given or scored.interrupted or scored.suspects:
            return
        seconds = scored.seconds / max(1, done)
        known = self._seconds_per_sample
        # Rises at once and falls slowly, since too large a batch costs more than too small a one.
        self._seconds_per_sample = seconds if known is None else max(seconds, 0.8 * known + 0.2 * seconds)

    def _blame(self, under_way: dict[int, _Waiting], cause: str) -> None:
        """Handle the samples of a failed call: a single one fails, several are scored again one by one to find the cause."""
        several = len(under_way) > 1
        for number in sorted(under_way, reverse=True):
            waiting = under_way.pop(number)
            if several:
                self._again(waiting, alone=True)
            else:
                self._fail(waiting, cause)

    def _again(self, waiting: _Waiting, alone: bool) -> None:
        waiting.alone = alone
        self._queue.appendleft(waiting)
        self._arrived.set()

    def _fail(self, waiting: _Waiting, cause: str) -> None:
        if not waiting.answer.done():
            waiting.answer.set_exception(RewardFailed(cause))

    def _fail_all(self, cause: str) -> None:
        while self._queue:
            self._fail(self._queue.popleft(), cause)
