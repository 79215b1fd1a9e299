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

from roll_lite.config.problems import first_line
from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.distributed.fleet import Fleet, FleetDown, MemberLost, Policy, SlowStart, until_silent
from roll_lite.distributed.rank_group import kill_stopped
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.running.batch_scorer import BatchScorer, Scored, slow_start, time_out

BATCH_SECONDS = 0.05
"""How much work goes into one call: much longer than the call's own cost, short enough that nobody waits for a neighbour."""
SLICE_SECONDS = 0.5
"""A call comes back after this time with what it has: a hanging sample is noticed by its own time-out, whatever else is in its batch."""
MOST_SAMPLES = 64
"""The most samples in one call, and under way in one worker."""
GRACE_SECONDS = 1.0
LOST_IN_A_ROW = 16
"""Workers of one pool, without a single score in between: whoever waits is told that nothing is scored there, instead of waiting for
as many time-outs as there are samples before it."""


class RewardWorker:
    """A synchronous actor, so that reward functions run in the main thread of their process.

    No method may be `async def`: Ray would make it an asynchronous actor and run everything in another thread.
    """

    _scorer: BatchScorer

    def __init__(self, config: RewardConfig, path: str) -> None:
        self._config = config
        self._path = path

    def prepare(self) -> tuple[bool, bool, str]:
        """Find the functions and pay for their first calls before the first sample; tells whether any is async, any takes lists, and what
        the user should know."""
        self._scorer, reward = BatchScorer.of(self._config, self._path)
        return reward.is_async, reward.is_batched, reward.describe()

    def score(self, items: dict[int, RewardInput]) -> Scored:
        """By numbers. What is under way comes back from a later call, with or without further items."""
        return self._scorer(items, SLICE_SECONDS)

    def process_id(self) -> int:
        return os.getpid()

    def place(self) -> tuple[str, int]:
        """Node and number of this process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()


@dataclass
class _Waiting:
    item: RewardInput
    answer: asyncio.Future[Score]
    alone: bool = False
    """Was in a batch whose worker hung or died: scored on its own next, so that the right sample is blamed."""


class PooledWorker:
    """A reward worker as a member of its pool."""

    is_async = False
    is_batched = False
    note = ""
    """What the user should know of how samples are scored."""

    def __init__(self, config: RewardConfig, path: str) -> None:
        self.name = f"reward {config.name}"
        self.actor: Any = None
        self._place: tuple[str, int] | None = None
        self.under_way: dict[int, _Waiting] = {}
        """By the numbers that the worker knows them by."""
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
    """A RewardClient over the reward workers of one domain. Each worker takes what waits as soon as it is free.

    A function that hangs or kills its process costs its own sample a failure and the pool a worker, which is replaced; the
    other samples of the same call are scored again without being charged. What can be interrupted is interrupted inside the worker,
    so that only the sample itself waits for its time-out; what cannot (a process that stands still, a call into C that does not return)
    is ended by the pool's own clock, and the process with it. Where nothing but that happens, all that wait fail together.
    Samples of an async function join those that are under way in a worker, and leave it one by one.
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
        """Start and warm up all workers. A mistake in the reward's configuration is raised here, as the ValueError that it is."""
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
        """Workers replaced since this was last asked, for the statistics of a batch."""
        return self._fleet.newly_replaced()

    @property
    def replaced(self) -> int:
        """Workers that hung or died and were replaced, since the start."""
        return self._fleet.replaced

    @property
    def workers(self) -> list[Any]:
        """Handles of the living workers."""
        return [member.actor for member in self._fleet.serving]

    @property
    def note(self) -> str:
        """What the user should know of how samples are scored."""
        return self._fleet.members[0].note

    # ------------------------------------------------------------ workers

    async def _serve(self, member: PooledWorker) -> None:
        numbers = itertools.count()
        while True:
            batch = self._join(member.under_way) if member.under_way else await self._take(member)
            await self._call(member, dict(zip(numbers, batch, strict=False)))

    async def _call(self, member: PooledWorker, batch: dict[int, _Waiting]) -> None:
        """Samples that are done are under way no more. MemberLost where the worker is of no use any more."""
        member.under_way |= batch
        try:
            # The worker ends a call in time by itself, unless what runs in it cannot be interrupted.
            async with asyncio.timeout(self._config.timeout_s + SLICE_SECONDS + GRACE_SECONDS):
                scored: Scored = await member.actor.score.remote({number: waiting.item for number, waiting in batch.items()})
        except TimeoutError:
            raise MemberLost(time_out(self._config.name, self._config.timeout_s)) from None
        except RayActorError as error:
            raise MemberLost(member.died(error)) from error
        except RayTaskError:  # a bug in the worker: nobody knows what is under way in it
            raise
        except Exception as error:  # an item that cannot be pickled: a failure of these samples, recorded as one
            failed = {number: member.under_way.pop(number) for number in batch}
            self._blame(failed, f"{member.name}: {type(error).__name__}: {first_line(error)}")
        else:
            self._answer(member, scored, len(batch))
            if scored.interrupted:
                raise MemberLost(f"{member.name}: it was interrupted somewhere inside")

    def _lost(self, member: PooledWorker, cause: str) -> None:
        """What was under way is tried elsewhere, or to blame."""
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
        """A busy worker's share of what waits; none where a sample is, or has to be, alone."""
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
        """`given`: how many samples the call was for."""
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
        # Quick to believe that samples became slow, slow to believe that they became fast: a batch too large costs more than one too small.
        self._seconds_per_sample = seconds if known is None else max(seconds, 0.8 * known + 0.2 * seconds)

    def _blame(self, under_way: dict[int, _Waiting], cause: str) -> None:
        """The call failed, and everything that was under way with it. A single sample is to blame, of several nobody knows which."""
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
