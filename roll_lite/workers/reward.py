"""Reward workers (small processes without torch that run reward functions) and their pool."""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import ExitStack

from ray.exceptions import RayError

from roll_lite.config.checks.scoring_models import JUDGE
from roll_lite.config.schema.domains import RewardConfig, RewardTermConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.distributed.failures import MemberLost, cause_of
from roll_lite.distributed.fleet import Policy, SlowStart
from roll_lite.distributed.place import ActorMember, Place
from roll_lite.observability.timers import POOL_WORK
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.environment import EnvironmentReward
from roll_lite.rewards.running.batch_scorer import KILL_FACTOR, BatchScorer, Scored, slow_start, time_out
from roll_lite.workers.scoring_pool import ScoringJob, ScoringPool

BATCH_SECONDS = 0.05
"""Target seconds of one call: above its overhead, but short: results wait for the whole call."""
SLICE_SECONDS = 0.5
"""Seconds after which a call returns finished samples: a hanging one must not delay the rest."""
MOST_SAMPLES = 64
"""Maximum samples in one call, and in flight in one worker."""
GRACE_SECONDS = 1.0
LOST_IN_A_ROW = 16
"""Consecutive worker losses without a score in between, after which all waiting samples fail."""

RewardJob = ScoringJob[RewardInput, Score]


class RewardWorker:
    """Sync actor: reward functions run in its main thread. A single `async def` method would move them to another thread."""

    _scorer: BatchScorer

    def __init__(self, config: RewardConfig, path: str) -> None:
        self._config = config
        self._path = path

    def prepare(self) -> tuple[bool, bool, str]:
        """Load and warm up the reward functions. Return (any is async, any takes lists, note for the user)."""
        self._scorer, reward = BatchScorer.of(self._config, self._path)
        return reward.is_async, reward.is_batched, reward.describe()

    def score(self, items: dict[int, RewardInput]) -> Scored:
        return self._scorer(items, SLICE_SECONDS)

    def place(self) -> Place:
        return Place.here()


class PooledWorker(ActorMember):
    is_async = False
    is_batched = False
    note = ""

    def __init__(self, config: RewardConfig, path: str) -> None:
        super().__init__(f"reward {config.name}", RewardWorker, config, path)
        self.under_way: dict[int, RewardJob] = {}
        self.is_reconfigured = False

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way)

    def configure(self, config: RewardConfig) -> None:
        self._arguments = config, *self._arguments[1:]
        self.is_reconfigured = True
        self.kill()

    async def start(self) -> None:
        self.is_reconfigured = False
        self.is_async, self.is_batched, self.note = await self.prepare()


class EpisodeRewards:
    """RewardClient of a domain whose environment gives the rewards; needs no processes."""

    capacity = math.inf

    async def start(self) -> None: ...

    async def score(self, item: RewardInput) -> Score:
        return EnvironmentReward()(item)

    def newly_replaced(self) -> list[str]:
        return []

    def close(self) -> None: ...


class RewardPool(ScoringPool[PooledWorker, RewardInput, Score]):
    """RewardClient over one domain's reward workers."""

    def __init__(self, domain: str, config: RewardConfig) -> None:
        self._config = config
        self._path = f"domains.{domain}.reward"
        self._seconds_per_sample: float | None = None
        self._lost_in_a_row = 0
        rewards: list[RewardConfig | RewardTermConfig] = [config, *config.terms]
        asking = [one.args.get("server") for one in rewards if one.name == JUDGE]
        self._judges = [f"judges.{server}" for server in dict.fromkeys(asking) if server is not None]
        members = [PooledWorker(config, self._path) for _ in range(config.workers)]
        super().__init__(f"{self._path}.workers", members, Policy(config.start_timeout_s, path=self._path))

    async def start(self) -> None:
        try:
            await self._fleet.start()
        except SlowStart:
            raise ValueError(slow_start(self._config, self._path)) from None

    def configure(self, config: RewardConfig) -> None:
        """Restart the workers if `config` is new."""
        if config != self._config:
            self._config = config
            for member in self._fleet.members:
                member.configure(config)

    @property
    def capacity(self) -> float:
        return sum(MOST_SAMPLES if member.is_async else 1 for member in self._fleet.members)

    def close(self) -> None:
        self._fleet.close()

    @property
    def note(self) -> str:
        return self._fleet.members[0].note

    # ------------------------------------------------------------ workers

    async def _serve(self, member: PooledWorker) -> None:
        numbers = itertools.count()
        while True:
            batch = self._join(member.under_way) if member.under_way else await self._take(member)
            await self._call(member, dict(zip(numbers, batch, strict=False)))

    async def _call(self, member: PooledWorker, batch: dict[int, RewardJob]) -> None:
        member.under_way |= batch
        try:
            # The worker ends a call in time, unless the running code cannot be interrupted.
            async with asyncio.timeout(KILL_FACTOR * self._config.timeout_s + SLICE_SECONDS + GRACE_SECONDS):
                with ExitStack() as work:
                    for judge in self._judges:
                        work.enter_context(POOL_WORK.of(judge, 0, "score"))
                    scored: Scored = await member.actor.score.remote({number: job.item for number, job in batch.items()})
        except TimeoutError:
            raise MemberLost(time_out(self._config.name, self._config.timeout_s)) from None
        except RayError:
            raise
        except Exception as error:  # an item cannot be pickled: recorded as a failure of these samples
            self._blame({number: member.under_way.pop(number) for number in batch}, cause_of(error, member.name))
            return
        self._hand_out(member, scored, len(batch))
        if scored.interrupted:
            raise MemberLost(f"{member.name}: it was interrupted somewhere inside")

    def _lost(self, member: PooledWorker, cause: str) -> None:
        if member.is_reconfigured:  # no sample is the cause
            while member.under_way:
                _, job = member.under_way.popitem()
                self._again(job, job.alone)
            return
        self._blame(member.under_way, cause)
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= LOST_IN_A_ROW:
            lost = f"{self._lost_in_a_row} workers were lost one after the other"
            self._fail_waiting(f"{member.name}: {lost}, and nothing was scored in between; the last: {cause}")

    # ------------------------------------------------------------ samples

    def _join(self, under_way: dict[int, RewardJob]) -> list[RewardJob]:
        if any(job.alone for job in under_way.values()):
            return []
        return self._next(min(MOST_SAMPLES - len(under_way), math.ceil(len(self._queue) / (self._idle + 1))), joins=True)

    def _most(self, member: PooledWorker) -> int:
        if member.is_async:
            return MOST_SAMPLES
        if self._seconds_per_sample is None:
            return 1
        seconds = self._config.timeout_s / 2 if member.is_batched else BATCH_SECONDS  # a list's samples share one time limit
        return max(1, min(MOST_SAMPLES, int(seconds / max(self._seconds_per_sample, 1e-6))))

    def _hand_out(self, member: PooledWorker, scored: Scored, given: int) -> None:
        results = scored.results if not scored.interrupted else dict.fromkeys(member.under_way) | scored.results
        done = 0
        for number, result in sorted(results.items(), reverse=True):
            job = member.under_way.pop(number)
            if result is None:
                self._again(job, job.alone or number in scored.suspects)
                continue
            done += 1
            self._resolve(job, RewardFailed(result) if isinstance(result, str) else result)
            if isinstance(result, Score) or not scored.interrupted:
                self._lost_in_a_row = 0
        if member.is_async or not given or scored.interrupted or scored.suspects:
            return
        seconds = scored.seconds / max(1, done)
        known = self._seconds_per_sample
        # Rises at once and falls slowly: too large a batch costs more than too small a one.
        self._seconds_per_sample = seconds if known is None else max(seconds, 0.8 * known + 0.2 * seconds)

    def _blame(self, under_way: dict[int, RewardJob], cause: str) -> None:
        """Fail the sample of a failed call; several are scored again one by one, to find the cause."""
        jobs = [under_way.pop(number) for number in sorted(under_way, reverse=True)]
        if len(jobs) == 1:
            self._fail(jobs, cause)
            return
        for job in jobs:
            self._again(job, alone=True)

    def _again(self, job: RewardJob, alone: bool) -> None:
        job.alone = alone
        self._queue.appendleft(job)
        self._arrived.set()
