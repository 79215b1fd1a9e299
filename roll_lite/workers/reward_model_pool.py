"""Clients of reward models in the rollout service: they batch samples of all domains for the copies of a model."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.config.schema.models import RewardModelConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.distributed.fleet import Fleet, FleetDown, MemberLost, Policy
from roll_lite.rewards.base import ResponseSuspected, RewardFailed, RewardFunction
from roll_lite.rewards.model import ModelReward, ScoredText, nothing
from roll_lite.rewards.registry import typed_reward
from roll_lite.rewards.running.batch_scorer import time_out
from roll_lite.workers.reward import RewardPool
from roll_lite.workers.reward_model_ranks import RESTART_SECONDS, Copy, Ranks, is_gone

WINDOW_SECONDS = 0.003
"""Time that an idle copy waits for a full batch."""


@dataclass
class _Waiting:
    text: ScoredText
    answer: asyncio.Future[float]


class RewardModelClient:
    """Client of one reward model. A free copy takes waiting samples at once, so that the least loaded one gets the work.

    A copy that loses a process fails its samples with the cause and is started again; other copies serve meanwhile. If there is none,
    waiting samples fail too and may be retried, see `in_service`.
    """

    def __init__(self, name: str, actors: Sequence[Any], config: RewardModelConfig) -> None:
        self.name = name
        self._config = config
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._idle = 0
        self._open = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._under_way: dict[Copy, list[_Waiting]] = {}
        self._fleet = Fleet(
            f"reward_models.{name}", Ranks.of(name, actors, config), Policy(RESTART_SECONDS), self._serve, self._lost, self._down
        )

    async def in_service(self) -> None:
        """Wait for a copy that can score; RewardFailed if there will never be one."""
        if not self._fleet.is_tended:  # with the first sample: the driver has initialized every rank by then
            self._fleet.tend()
        try:
            await self._fleet.in_service()
        except FleetDown as end:
            raise RewardFailed(end.cause) from None

    async def score(self, text: ScoredText) -> float:
        """Score a text, or raise RewardFailed."""
        self._open += 1
        self._quiet.clear()
        try:
            await self.in_service()
            waiting = _Waiting(text, asyncio.get_running_loop().create_future())
            self._queue.append(waiting)
            self._arrived.set()
            return await waiting.answer
        finally:
            self._open -= 1
            if not self._open:
                self._quiet.set()

    @property
    def capacity(self) -> float:
        """Samples that its copies score at a time."""
        return self._config.micro_batch_size * sum(len(ranks.copies) for ranks in self._fleet.members)

    async def rest(self) -> None:
        """Offload the model (with `offload: true`) after generation, once all samples are scored, until the next sample."""
        if not self._config.offload or not self._fleet.is_tended:
            return
        await self._quiet.wait()
        async with self._fleet.drained():
            await asyncio.gather(*(ranks.offload() for ranks in self._fleet.serving))

    def newly_restarted(self) -> int:
        """Number of restarted ranks since the last call, for the statistics of a batch."""
        return self._fleet.newly_replaced()

    @property
    def restarts(self) -> int:
        """Number of restarted ranks since the start."""
        return self._fleet.replaced

    def close(self) -> None:
        """Stop serving; the driver ends the processes."""
        self._fleet.close(kill=False)

    # ------------------------------------------------------------ copies

    async def _serve(self, ranks: Ranks) -> None:
        """Serve all copies until one is lost, which ends all of them."""
        serving = [asyncio.create_task(self._serve_copy(copy, ranks)) for copy in ranks.copies]
        try:
            done, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def _serve_copy(self, copy: Copy, ranks: Ranks) -> None:
        while True:
            batch = await self._take()
            self._under_way[copy] = batch
            async with self._fleet.at_work(ranks):
                try:
                    results = await ranks.score(copy, [waiting.text for waiting in batch])
                except Exception as error:  # a process edge: recorded as a failure of these samples
                    cause = ranks.cause(error)
                    # Other ranks of the copy may wait for the failed one for ever.
                    if isinstance(error, MemberLost) or is_gone(error) or len(copy.actors) > 1:
                        ranks.guilty = copy
                        raise MemberLost(cause) from error
                    self._fail(batch, cause)
                else:
                    self._answer(batch, results)
            del self._under_way[copy]

    def _lost(self, ranks: Ranks, cause: str) -> None:
        for copy in ranks.copies:
            is_guilty = ranks.guilty in (None, copy)
            bystander = f"{ranks.name}: its ranks are started again, because one of them was lost"
            self._fail(self._under_way.pop(copy, []), cause if is_guilty else bystander)
        if not self._fleet.serving:
            self._fail_waiting(cause)

    def _down(self, end: FleetDown) -> None:
        for batch in self._under_way.values():
            self._fail(batch, end.cause)
        self._fail_waiting(end.cause)

    # ------------------------------------------------------------ samples

    async def _take(self) -> list[_Waiting]:
        """Take at most micro_batch_size samples, and at most this copy's share of those waiting."""
        size = self._config.micro_batch_size
        self._idle += 1
        try:
            while True:
                while not self._queue:
                    self._arrived.clear()
                    await self._arrived.wait()
                if len(self._queue) < size:
                    await asyncio.sleep(WINDOW_SECONDS)
                share = min(size, math.ceil(len(self._queue) / self._idle))
                taken = [self._queue.popleft() for _ in range(share)]
                if batch := [waiting for waiting in taken if not waiting.answer.done()]:
                    return batch
        finally:
            self._idle -= 1

    def _answer(self, batch: list[_Waiting], results: list[float | str]) -> None:
        for waiting, result in zip(batch, results, strict=True):
            if isinstance(result, str):
                self._fail([waiting], f"reward model {self.name}: {result}", ResponseSuspected)
            elif not waiting.answer.done():
                waiting.answer.set_result(result)

    def _fail(self, batch: list[_Waiting], cause: str, kind: type[RewardFailed] = RewardFailed) -> None:
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_exception(kind(cause))

    def _fail_waiting(self, cause: str) -> None:
        self._fail(list(self._queue), cause)
        self._queue.clear()


class RewardModelPool:
    """A RewardClient of one domain: a reward model gives the score, reward workers give the domain's further terms."""

    def __init__(self, domain: str, config: RewardConfig, client: RewardModelClient) -> None:
        self._config = config
        self._client = client
        self._path = f"domains.{domain}.reward"
        added = config.model_copy(update={"name": f"{nothing.__module__}.{nothing.__name__}", "args": {}})
        self._added = RewardPool(domain, added) if config.terms or config.format else None
        self._function = RewardFunction("model", self._scored, {})

    async def start(self) -> None:
        """Start the workers. A mistake in the reward's configuration raises ValueError."""
        _ = self._reward
        if self._added is not None:
            await self._added.start()

    async def score(self, item: RewardInput) -> Score:
        await self._client.in_service()  # a restart of the model does not count against the sample's time
        try:
            async with asyncio.timeout(self._config.timeout_s):
                if self._added is None:
                    return await self._function.score(item)
                own, added = await asyncio.gather(self._function.score(item), self._added.score(item))
        except TimeoutError:
            raise RewardFailed(time_out(f"model {self._client.name}", self._config.timeout_s)) from None
        return replace(own, value=own.value + added.value, details={**added.details, **own.details}, format_ok=added.format_ok)

    @property
    def capacity(self) -> float:
        return self._client.capacity

    def close(self) -> None:
        if self._added is not None:
            self._added.close()

    def newly_replaced(self) -> int:
        """Number of replaced workers and ranks since the last call. A model that several domains share is counted by the first caller."""
        return self._client.newly_restarted() + (self._added.newly_replaced() if self._added is not None else 0)

    @cached_property
    def _reward(self) -> ModelReward:
        """The reward; ValueError for a mistake in its arguments."""
        reward = typed_reward(self._config.name, self._config.args, self._path)
        assert isinstance(reward, ModelReward)
        return reward

    async def _scored(self, item: RewardInput) -> Score:
        return self._reward.score_of(await self._client.score(self._reward.model_input(item)))
