"""The rollout service's side of reward models: samples of all domains that use one are gathered into batches for its copies."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayTaskError

from roll_lite.config.schema import RewardConfig, RewardModelConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.batch_scorer import time_out
from roll_lite.rewards.model import ScoredText, nothing, score_of, scored_text
from roll_lite.rewards.registry import build_reward
from roll_lite.workers.reward import START_ATTEMPTS, RewardPool
from roll_lite.workers.reward_model_ranks import Copy, Ranks, is_gone

WINDOW_SECONDS = 0.003
"""How long an idle copy waits for more samples when there are fewer than a micro-batch."""


@dataclass
class _Waiting:
    text: ScoredText
    answer: asyncio.Future[float]


class RewardModelClient:
    """One reward model. Each of its copies takes what waits as soon as it is free, so that the least loaded one gets the work.

    A copy whose process died, or whose ranks no longer stand at the same place, fails what it was scoring, with the cause, and is started
    again; meanwhile the other copies serve. Where there is none, whoever waits fails too, and may ask again: see `in_service`.
    """

    def __init__(self, name: str, actors: Sequence[Any], config: RewardModelConfig) -> None:
        self.name = name
        self.restarts = 0
        """Of ranks that died, since the start."""
        self._reported = 0
        self._config = config
        self._ranks = Ranks.of(actors, config)
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._idle = 0
        self._open = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._serving = 0
        self._lost = 0
        """Ranks that serve, and that cannot be started any more."""
        self._in_service = asyncio.Event()
        self._tenders: list[asyncio.Task[None]] = []
        self._broken: str | None = None

    async def in_service(self) -> None:
        """Wait until there is a copy of the model that can score, or there will never be one again."""
        if not self._tenders:  # with the first sample: the driver has initialized every rank by then
            self._tenders = [asyncio.get_running_loop().create_task(self._tend(ranks)) for ranks in self._ranks]
        await self._in_service.wait()

    async def score(self, text: ScoredText) -> float:
        """RewardFailed where there is no score."""
        self._open += 1
        self._quiet.clear()
        try:
            await self.in_service()
            if self._broken is not None:
                raise RewardFailed(self._broken)
            waiting = _Waiting(text, asyncio.get_running_loop().create_future())
            self._queue.append(waiting)
            self._arrived.set()
            return await waiting.answer
        finally:
            self._open -= 1
            if not self._open:
                self._quiet.set()

    async def rest(self) -> None:
        """Nothing is generated any more: with `offload` the model leaves its devices until the next sample, once all are scored."""
        if not self._config.offload:
            return
        await self._quiet.wait()
        if self._broken is None:
            await asyncio.gather(*(ranks.offload() for ranks in self._ranks))

    def newly_restarted(self) -> int:
        """Ranks started again since this was last asked, for the statistics of a batch."""
        new = self.restarts - self._reported
        self._reported = self.restarts
        return new

    def close(self) -> None:
        """The processes are the driver's."""
        for tender in self._tenders:
            tender.cancel()

    # ------------------------------------------------------------ copies

    async def _tend(self, ranks: Ranks) -> None:
        """Have ranks that start together serve, and start them again, until that fails."""
        cause: str | None = None
        while cause is None:
            try:
                await ranks.meet()
                lost = await self._serve_together(ranks)
            except Exception as error:  # a process edge: a rank died before it could say where it stands
                lost = self._cause(error)
            cause = await self._restart(ranks, lost)
        self._lost += 1
        if self._lost == len(self._ranks):
            self._broken = cause
            self._in_service.set()

    async def _serve_together(self, ranks: Ranks) -> str:
        """Until one of their copies is lost, and why it is."""
        self._serving += 1
        self._in_service.set()
        serving = [asyncio.create_task(self._serve(copy, ranks)) for copy in ranks.copies]
        try:
            done, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in serving:
                task.cancel()
        # First out of service, then failures: a sample that is tried again at once has to wait for those who still serve.
        self._serving -= 1
        cause, batch = next(iter(done)).result()
        if not self._serving:
            self._in_service.clear()
            batch += self._queue
            self._queue.clear()
        self._fail(batch, cause)
        await asyncio.wait(serving)
        return cause

    async def _serve(self, copy: Copy, ranks: Ranks) -> tuple[str, list[_Waiting]]:
        """Why the copy is lost, and what it was scoring."""
        while True:
            batch = await self._take()
            try:
                await ranks.load()
                results = await copy.score([waiting.text for waiting in batch])
            except asyncio.CancelledError:
                self._fail(batch, f"reward model {self.name}: its ranks are started again, because one of them was lost")
                raise
            except Exception as error:  # a process edge: whatever went wrong there is the failure of these samples, recorded as one
                cause = self._cause(error)
                if copy.lost_by(error):
                    return cause, batch
                self._fail(batch, cause)
            else:
                self._answer(batch, results)

    async def _restart(self, ranks: Ranks, lost: str) -> str | None:
        """Why it fails, where it does."""
        failure = ""
        for attempt in range(START_ATTEMPTS):
            try:
                await ranks.restart(again=attempt > 0)
            except Exception as error:  # a process edge: another attempt may succeed
                failure = self._cause(error)
            else:
                self.restarts += 1
                return None
        return f"{lost}; it could not be started again: {failure}"

    # ------------------------------------------------------------ samples

    async def _take(self) -> list[_Waiting]:
        """At most a micro-batch, and no more than this copy's share of what waits."""
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
                self._fail([waiting], f"reward model {self.name}: {result}")
            elif not waiting.answer.done():
                waiting.answer.set_result(result)

    def _fail(self, batch: list[_Waiting], cause: str) -> None:
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_exception(RewardFailed(cause))

    def _cause(self, error: BaseException) -> str:
        if is_gone(error):
            return f"reward model {self.name}: its process died: {_first_line(error)}"
        if isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        return f"reward model {self.name}: {type(error).__name__}: {_first_line(error)}"


class RewardModelPool:
    """A RewardClient for the samples of one domain: a reward model gives their score, reward workers what the domain adds to it."""

    def __init__(self, domain: str, config: RewardConfig, client: RewardModelClient) -> None:
        self._config = config
        self._client = client
        self._path = f"domains.{domain}.reward"
        self._text = {key: config.args[key] for key in ("template", "question") if key in config.args}
        self._reading = {key: config.args[key] for key in ("scale", "threshold") if key in config.args}
        added = config.model_copy(update={"type": f"{nothing.__module__}.{nothing.__name__}", "args": {}})
        self._added = RewardPool(domain, added) if config.terms or config.format else None

    async def start(self) -> None:
        """A mistake in the reward's configuration is raised here, as the ValueError that it is."""
        build_reward(self._config.model_copy(update={"terms": [], "format": None}), self._path)
        if self._added is not None:
            await self._added.start()

    async def score(self, item: RewardInput) -> Score:
        await self._client.in_service()  # a model that is started again takes its time, which is not the sample's
        try:
            async with asyncio.timeout(self._config.timeout_s):
                if self._added is None:
                    return await self._own(item)
                own, added = await asyncio.gather(self._own(item), self._added.score(item))
        except TimeoutError:
            raise RewardFailed(time_out(f"model {self._client.name}", self._config.timeout_s)) from None
        return replace(own, value=own.value + added.value, details={**added.details, **own.details}, format_ok=added.format_ok)

    def close(self) -> None:
        if self._added is not None:
            self._added.close()

    def newly_replaced(self) -> int:
        """As of a RewardPool. Ranks of a model that several domains use are told by the first that asks."""
        return self._client.newly_restarted() + (self._added.newly_replaced() if self._added is not None else 0)

    async def _own(self, item: RewardInput) -> Score:
        return score_of(await self._client.score(scored_text(item, **self._text)), **self._reading)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
