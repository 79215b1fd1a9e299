"""Reward workers: small processes that run reward functions, and the pool that keeps them busy.

Nothing here imports torch: a reward worker starts fast and stays small.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_lite.config.schema import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.batch_scorer import BatchScorer, Scored, slow_start, time_out
from roll_lite.rewards.code import walls_of
from roll_lite.rewards.format import FormatCheck
from roll_lite.rewards.registry import build_reward

BATCH_SECONDS = 0.05
"""How much work goes into one call: much longer than the call's own cost, short enough that nobody waits for a neighbour."""
SLICE_SECONDS = 0.5
"""A call comes back after this time with what it has: a hanging sample is noticed by its own time-out, whatever else is in its batch."""
MOST_SAMPLES = 64
"""In one call, and under way in one worker."""
GRACE_SECONDS = 1.0
START_ATTEMPTS = 3


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
        form = FormatCheck(self._config, self._path) if self._config.format else None
        reward = build_reward(self._config, self._path)
        reward.warm()
        self._scorer = BatchScorer(reward, self._config.timeout_s, form)
        return reward.is_async, reward.is_batched, walls_of(self._config.args) if self._config.type == "code" else ""

    def score(self, items: dict[int, RewardInput]) -> Scored:
        """By numbers. What is under way comes back from a later call, with or without further items."""
        return self._scorer(items, SLICE_SECONDS)

    def loaded_modules(self) -> list[str]:
        """Top-level modules of this process: what its start costs."""
        return sorted({name.partition(".")[0] for name in sys.modules})

    def process_id(self) -> int:
        return os.getpid()


@dataclass
class _Waiting:
    item: RewardInput
    answer: asyncio.Future[Score]
    alone: bool = False
    """Was in a batch whose worker hung or died: scored on its own next, so that the right sample is blamed."""


class RewardPool:
    """A RewardClient over the reward workers of one domain. Each worker takes what waits as soon as it is free.

    A function that hangs or kills its process costs its own sample a failure and the pool a worker, which is replaced; the
    other samples of the same call are scored again without being charged. What can be interrupted is interrupted inside the worker,
    so that only the sample itself waits for its time-out; what cannot takes its process along, when the pool's patience ends.
    Samples of an async function join those that are under way in a worker, and leave it one by one.
    """

    replaced: int
    """Workers that hung or died and were replaced, since the start."""

    def __init__(self, domain: str, config: RewardConfig) -> None:
        self.domain = domain
        self._config = config
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._idle = 0
        self._is_async = False
        self._is_batched = False
        self.note = ""
        """What the user should know of how samples are scored."""
        self._seconds_per_sample: float | None = None
        self._workers: list[Any] = []
        self._servers: list[asyncio.Task[None]] = []
        self._broken: str | None = None
        self.replaced = 0
        self._reported = 0

    async def start(self) -> None:
        """Start and warm up all workers. A mistake in the reward's configuration is raised here, as the ValueError that it is."""
        workers = await asyncio.gather(*(self._start_worker() for _ in range(self._config.workers)))
        self._servers = [asyncio.get_running_loop().create_task(self._serve(worker)) for worker in workers]

    async def score(self, item: RewardInput) -> Score:
        if self._broken is not None:
            raise RewardFailed(self._broken)
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrived.set()
        return await waiting.answer

    def close(self) -> None:
        for server in self._servers:
            server.cancel()
        for worker in self._workers:
            ray.kill(worker)
        self._workers.clear()

    def newly_replaced(self) -> int:
        """Workers replaced since this was last asked, for the statistics of a batch."""
        new = self.replaced - self._reported
        self._reported = self.replaced
        return new

    @property
    def workers(self) -> list[Any]:
        """Handles of the living workers."""
        return list(self._workers)

    # ------------------------------------------------------------ workers

    async def _start_worker(self) -> Any:
        path = f"domains.{self.domain}.reward"
        worker = ray.remote(RewardWorker).options(num_cpus=0).remote(self._config, path)
        self._workers.append(worker)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                self._is_async, self._is_batched, self.note = await worker.prepare.remote()
        except TimeoutError:
            self._discard(worker)
            raise ValueError(slow_start(self._config, path)) from None
        except RayTaskError as error:
            self._discard(worker)
            raise error.cause if isinstance(error.cause, ValueError) else error from None
        except RayActorError:
            self._discard(worker)
            raise
        return worker

    async def _replace(self, worker: Any) -> Any:
        self._discard(worker)
        for attempt in range(START_ATTEMPTS):
            try:
                fresh = await self._start_worker()
                self.replaced += 1
                return fresh
            except Exception as error:
                if attempt == START_ATTEMPTS - 1:
                    self._break(f"reward {self._config.type}: no worker can be started any more: {error}")
        return None

    def _discard(self, worker: Any) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        ray.kill(worker)

    def _break(self, cause: str) -> None:
        self._broken = cause
        while self._queue:
            self._fail(self._queue.popleft(), cause)

    # ------------------------------------------------------------ samples

    async def _serve(self, worker: Any) -> None:
        numbers = itertools.count()
        while worker is not None:
            under_way: dict[int, _Waiting] = {}
            lost = False
            while not lost:
                batch = dict(zip(numbers, self._join(under_way) if under_way else await self._take(), strict=False))
                under_way |= batch
                lost = await self._call(worker, batch, under_way)
            worker = await self._replace(worker)

    async def _call(self, worker: Any, batch: dict[int, _Waiting], under_way: dict[int, _Waiting]) -> bool:
        """Whether the worker is lost. Those that are done leave `under_way`."""
        lost = True
        try:
            # The worker ends a call in time by itself, unless what runs in it cannot be interrupted.
            async with asyncio.timeout(self._config.timeout_s + SLICE_SECONDS + GRACE_SECONDS):
                scored: Scored = await worker.score.remote({number: waiting.item for number, waiting in batch.items()})
        except TimeoutError:
            self._blame(under_way, time_out(self._config.type, self._config.timeout_s))
        except RayActorError as error:
            self._blame(under_way, f"reward {self._config.type}: its process died: {_first_line(error)}")
        except RayTaskError as error:  # a bug in the worker: nobody knows what is under way in it
            self._blame(under_way, f"reward {self._config.type}: {type(error).__name__}: {_first_line(error)}")
        except Exception as error:  # an item that cannot be pickled: a failure of these samples, recorded as one
            lost = False
            for number in batch:
                del under_way[number]
            self._blame(batch, f"reward {self._config.type}: {type(error).__name__}: {_first_line(error)}")
        else:
            self._answer(under_way, scored, len(batch))
            lost = scored.interrupted
        return lost

    async def _take(self) -> list[_Waiting]:
        self._idle += 1
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        limit = self._batch_limit()
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < limit and not batch[0].alone and not self._queue[0].alone:
            batch.append(self._queue.popleft())
        self._idle -= 1
        return batch

    def _join(self, under_way: dict[int, _Waiting]) -> list[_Waiting]:
        """A busy worker's share of what waits; none where a sample is, or has to be, alone."""
        if any(waiting.alone for waiting in under_way.values()):
            return []
        room = min(MOST_SAMPLES - len(under_way), math.ceil(len(self._queue) / (self._idle + 1)))
        batch: list[_Waiting] = []
        while len(batch) < room and not self._queue[0].alone:
            batch.append(self._queue.popleft())
        return batch

    def _batch_limit(self) -> int:
        share = math.ceil(len(self._queue) / self._idle)
        if self._is_async:
            return min(MOST_SAMPLES, share)
        if self._seconds_per_sample is None:
            return 1
        seconds = self._config.timeout_s / 2 if self._is_batched else BATCH_SECONDS  # a list's samples share one time limit
        return max(1, min(MOST_SAMPLES, share, int(seconds / max(self._seconds_per_sample, 1e-6))))

    def _answer(self, under_way: dict[int, _Waiting], scored: Scored, given: int) -> None:
        """`given`: how many samples the call was for."""
        results = scored.results if not scored.interrupted else dict.fromkeys(under_way) | scored.results
        done = 0
        for number, result in sorted(results.items(), reverse=True):
            waiting = under_way.pop(number)
            if result is None:
                waiting.alone = waiting.alone or number in scored.suspects
                self._queue.appendleft(waiting)
                self._arrived.set()
                continue
            done += 1
            if isinstance(result, str):
                self._fail(waiting, result)
            elif not waiting.answer.done():
                waiting.answer.set_result(result)
        if self._is_async or not given or scored.interrupted or scored.suspects:
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
            if not several:
                self._fail(waiting, cause)
                continue
            waiting.alone = True
            self._queue.appendleft(waiting)
            self._arrived.set()

    def _fail(self, waiting: _Waiting, cause: str) -> None:
        if not waiting.answer.done():
            waiting.answer.set_exception(RewardFailed(cause))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
