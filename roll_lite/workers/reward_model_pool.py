"""The rollout service's side of reward models: samples of all domains that use one are gathered into batches for its copies."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_lite.config.schema import RewardConfig, RewardModelConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.distributed.strategy.base import RankLayout, StateGroup
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.model import ScoredText, nothing, score_of, scored_text
from roll_lite.rewards.registry import build_reward
from roll_lite.rewards.together import time_out
from roll_lite.workers.reward import RewardPool

WINDOW_SECONDS = 0.003
"""How long an idle copy waits for more samples when there are fewer than a micro-batch."""


@dataclass(frozen=True)
class Copy:
    """The ranks that hold one copy of the model together. A forward pass takes all of them."""

    actors: tuple[Any, ...]
    head: int
    """Place of the rank that returns the results."""

    async def score(self, texts: list[ScoredText]) -> list[float | str]:
        shared: Any = texts if len(self.actors) == 1 else ray.put(texts)
        results = await asyncio.gather(*(actor.score.remote(shared) for actor in self.actors))
        found: list[float | str] = results[self.head]
        return found


def copies_of(actors: Sequence[Any], layouts: Sequence[RankLayout]) -> list[Copy]:
    """In data-rank order."""
    copies = []
    for data_rank in range(layouts[0].data_size):
        own = [layout for layout in layouts if layout.data_rank == data_rank]
        head = next(place for place, layout in enumerate(own) if layout.is_head)
        copies.append(Copy(tuple(actors[layout.rank] for layout in own), head))
    return copies


@dataclass
class _Waiting:
    text: ScoredText
    answer: asyncio.Future[float]


class RewardModelClient:
    """One reward model. Each of its copies takes what waits as soon as it is free, so that the least loaded one gets the work.

    A copy whose process died, or whose ranks no longer stand at the same place, is out of service: its samples fail with the cause,
    the others go to the copies that are left.
    """

    def __init__(self, name: str, actors: Sequence[Any], config: RewardModelConfig) -> None:
        self.name = name
        self._actors = list(actors)
        self._config = config
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._idle = 0
        self._open = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._servers: set[asyncio.Task[None]] = set()
        self._started: asyncio.Task[None] | None = None
        self._broken: str | None = None
        self._resident = not config.offload
        self._moving = asyncio.Lock()

    async def score(self, text: ScoredText) -> float:
        """RewardFailed where there is no score."""
        self._open += 1
        self._quiet.clear()
        try:
            self._started = self._started or asyncio.ensure_future(self._start())
            await asyncio.shield(self._started)
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
        async with self._moving:
            if self._resident and not self._open and self._broken is None:
                self._resident = False
                await asyncio.gather(*(actor.offload.remote([StateGroup.WEIGHTS]) for actor in self._actors))

    def close(self) -> None:
        """The processes are the driver's."""
        for server in self._servers:
            server.cancel()
        if self._started is not None:
            self._started.cancel()

    # ------------------------------------------------------------ copies

    async def _start(self) -> None:
        """With the first sample: the copies are known once the driver has initialized every rank."""
        try:
            layouts = await asyncio.gather(*(actor.layout.remote() for actor in self._actors))
        except (RayActorError, RayTaskError) as error:
            self._broken = self._cause(error)
            return
        for copy in copies_of(self._actors, layouts):
            server = asyncio.get_running_loop().create_task(self._serve(copy))
            self._servers.add(server)

    async def _serve(self, copy: Copy) -> None:
        lost: str | None = None
        while lost is None:
            batch = await self._take()
            try:
                await self._load()
                results = await copy.score([waiting.text for waiting in batch])
            except Exception as error:  # a process edge: whatever went wrong there is the failure of these samples, recorded as one
                cause = self._cause(error)
                self._fail(batch, cause)
                # Where one rank failed, the others of its copy may wait for it for ever.
                if isinstance(error, RayActorError) or len(copy.actors) > 1:
                    lost = cause
            else:
                self._answer(batch, results)
        task = asyncio.current_task()
        assert task is not None
        self._servers.discard(task)
        if not self._servers:
            self._broken = lost
            self._fail(list(self._queue), lost)
            self._queue.clear()

    async def _load(self) -> None:
        if self._resident:
            return
        async with self._moving:
            if not self._resident:
                await asyncio.gather(*(actor.load.remote([StateGroup.WEIGHTS]) for actor in self._actors))
                self._resident = True

    # ------------------------------------------------------------ samples

    async def _take(self) -> list[_Waiting]:
        """At most a micro-batch, and no more than this copy's share of what waits."""
        size = self._config.micro_batch_size
        self._idle += 1
        batch: list[_Waiting] = []
        while not batch:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            if len(self._queue) < size:
                await asyncio.sleep(WINDOW_SECONDS)
            share = min(size, math.ceil(len(self._queue) / self._idle))
            taken = [self._queue.popleft() for _ in range(share)]
            batch = [waiting for waiting in taken if not waiting.answer.done()]
        self._idle -= 1
        return batch

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
        if isinstance(error, RayActorError):
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

    async def _own(self, item: RewardInput) -> Score:
        return score_of(await self._client.score(scored_text(item, **self._text)), **self._reading)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
