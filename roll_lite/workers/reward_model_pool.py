from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.config.schema.models import RewardModelConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.distributed.failures import FleetDown, MemberLost, cause_of, is_death
from roll_lite.distributed.fleet import Policy, until_silent
from roll_lite.distributed.liveness import first_of
from roll_lite.distributed.place import Place, kill_actors, where
from roll_lite.distributed.strategy.base import RankLayout, StateGroup
from roll_lite.distributed.strategy.build import CONNECTS_RANKS
from roll_lite.observability.device_memory import MemoryPeaks, PeaksByPhase
from roll_lite.observability.timers import POOL_WORK
from roll_lite.rewards.base import ResponseSuspected, RewardFailed, RewardFunction, checked_score
from roll_lite.rewards.model import ModelReward, ScoredText, zero_base
from roll_lite.rewards.registry import typed_reward
from roll_lite.rewards.running.batch_scorer import time_out
from roll_lite.workers.reward import RewardPool
from roll_lite.workers.reward_model import NotInitialized
from roll_lite.workers.scoring_pool import ScoringJob, ScoringPool

WINDOW_SECONDS = 0.003
"""Seconds an idle model copy waits for a full batch."""
RESTART_SECONDS = 600.0
"""Timeout in seconds for processes to restart and load the model."""
HANG_SECONDS = 600.0
"""Timeout in seconds of loading the model and scoring a batch."""
KILL_SECONDS = 1.0
POLL_SECONDS = 0.25

TextJob = ScoringJob[ScoredText, float]


@dataclass(eq=False)
class Copy:
    actors: tuple[Any, ...]
    head: int
    """Index of the actor that returns the results."""
    under_way: list[TextJob] = field(default_factory=list)


def copies_of(actors: Sequence[Any], layouts: Sequence[RankLayout]) -> list[Copy]:
    copies = []
    for data_rank in sorted({layout.data_rank for layout in layouts}):
        own = [(actor, layout) for actor, layout in zip(actors, layouts, strict=True) if layout.data_rank == data_rank]
        head = next(place for place, (_, layout) in enumerate(own) if layout.is_head)
        copies.append(Copy(tuple(actor for actor, _ in own), head))
    return copies


def is_gone(error: BaseException) -> bool:
    """Return True if the process died, or has no model yet."""
    return is_death(error) or (isinstance(error, RayTaskError) and isinstance(error.cause, NotInitialized))


class Ranks:
    """Ranks of a reward model that restart together: all with Megatron, one with hf. Ray restarts the processes, `start` loads the
    model."""

    def __init__(self, model: str, actors: Sequence[Any], config: RewardModelConfig) -> None:
        self.name = self._name = f"reward model {model}"
        self.copies: list[Copy] = []
        self.guilty: Copy | None = None
        self.memory = MemoryPeaks()
        self._actors = list(actors)
        self._places: list[Place] = []
        self._are_connected = CONNECTS_RANKS[config.strategy.name]
        self._offloads = config.offload
        self._is_resident = None if config.offload else True
        """None: unknown, since a lost rollout service may have left the model loaded."""
        self._moving = asyncio.Lock()
        self._is_initialized = True
        """True until the first `start`: the driver has initialized the model."""
        self._is_gone = False
        self._was_killed = False

    @staticmethod
    def of(model: str, actors: Sequence[Any], config: RewardModelConfig) -> list[Ranks]:
        parts = [actors] if CONNECTS_RANKS[config.strategy.name] else [[actor] for actor in actors]
        return [Ranks(model, part, config) for part in parts]

    async def start(self) -> None:
        is_initialized, self._is_initialized = self._is_initialized, False
        self._places, self.name = [], self._name
        try:
            async with self._moving:
                if not is_initialized:
                    await self._initialize()
                self.copies = copies_of(self._actors, await asyncio.gather(*(actor.layout.remote() for actor in self._actors)))
            if self._offloads and not is_initialized:
                await self.move(False)  # others may be training on its devices: the next sample loads it
        except Exception as error:
            raise MemberLost(self.cause(error)) from error
        self._places = await self._find_places()
        self.name += where(self._places)
        self.guilty = None

    async def until_lost(self) -> str:
        """Wait until a rank stops answering; return the cause. MemberLost if one dies or is restarted."""

        async def ask() -> None:
            if await self._find_places() != self._places:
                raise MemberLost(f"{self.name}: it has been started again by others")

        try:
            return f"{self.name}: {await until_silent(ask, lambda: self._moving.locked() or any(copy.under_way for copy in self.copies))}"
        except Exception as error:
            raise MemberLost(self.cause(error)) from error

    async def _find_places(self) -> list[Place]:
        return list(await asyncio.gather(*(actor.place.remote() for actor in self._actors)))

    def kill(self) -> None:
        """Kill the ranks; Ray restarts them. Connected ranks die together: no process group takes a new rank."""
        self._was_killed = self._are_connected or not self._is_gone
        self._is_gone = False
        if self._was_killed:
            kill_actors(self._actors, self._places, no_restart=False)

    def cause(self, error: BaseException) -> str:
        self._is_gone |= is_gone(error)
        return cause_of(error, self.name)

    async def score(self, copy: Copy, texts: list[ScoredText], timed: AbstractContextManager[None]) -> list[float | str]:
        try:
            async with asyncio.timeout(HANG_SECONDS) as limit:
                await self.move(True)
                shared: Any = texts if len(copy.actors) == 1 else ray.put(texts)
                with timed:
                    results = await asyncio.gather(*(actor.score.remote(shared) for actor in copy.actors))
                for _, peaks in results:
                    self.memory.merge(peaks)
                found: list[float | str] = results[copy.head][0]
                return found
        except TimeoutError:
            if not limit.expired():
                raise
            raise MemberLost(f"{self.name}: it hangs: no scores within {HANG_SECONDS:g} s") from None

    def rank(self, copy: Copy) -> int:
        """Number of the rank that returns the copy's results."""
        return self._actors.index(copy.actors[copy.head])

    async def move(self, to_devices: bool) -> None:
        """Load or offload the model. Offloading ignores dead ranks: the next sample reveals them."""
        async with self._moving:
            if self._is_resident == to_devices:
                return
            self._is_resident = to_devices
            methods = [actor.load if to_devices else actor.offload for actor in self._actors]
            moved = [method.remote([StateGroup.WEIGHTS]) for method in methods]
            for found in await asyncio.gather(*moved, return_exceptions=True):
                if not isinstance(found, BaseException):
                    self.memory.merge(found)
                elif to_devices or not is_gone(found):
                    raise found

    async def _initialize(self) -> None:
        if self._was_killed:
            await asyncio.sleep(KILL_SECONDS)
        await asyncio.gather(*(_reached(actor) for actor in self._actors))
        if self._are_connected:
            address = await self._actors[0].rendezvous.remote()
            await asyncio.gather(*(actor.meet_at.remote(address) for actor in self._actors))
        await asyncio.gather(*(actor.initialize.remote() for actor in self._actors))
        self._is_resident = True


async def _reached(actor: Any) -> None:
    while True:
        try:
            await actor.place.remote()
        except RayActorError:
            await asyncio.sleep(POLL_SECONDS)
        else:
            return


class RewardModelPool(ScoringPool[Ranks, ScoredText, float]):
    """Client of a reward model that domains share; batches may mix their samples."""

    def __init__(self, name: str, actors: Sequence[Any], config: RewardModelConfig) -> None:
        self.name = name
        self._config = config
        super().__init__(f"reward_models.{name}", Ranks.of(name, actors, config), Policy(RESTART_SECONDS), WINDOW_SECONDS)

    async def in_service(self) -> None:
        """Wait until a model copy can score. Raise RewardFailed if none will."""
        if not self._fleet.is_tended:  # with the first sample: the driver has initialized every rank by then
            self._fleet.tend()
        try:
            await self._fleet.in_service()
        except FleetDown as end:
            raise RewardFailed(end.cause) from None

    async def score(self, item: ScoredText, timeout_s: float = math.inf) -> float:
        """Score a text. `timeout_s` counts while a copy scores it."""
        await self.in_service()
        return await super().score(item, timeout_s)

    @property
    def capacity(self) -> float:
        return self._config.micro_batch_size * sum(len(ranks.copies) for ranks in self._fleet.members)

    async def rest(self) -> None:
        """Wait until all samples are scored, then offload the model; do nothing with `offload: false`."""
        if not self._config.offload or not self._fleet.is_tended:
            return
        while self._open:
            await asyncio.wait(self._open)
        async with self._fleet.drained():
            await asyncio.gather(*(ranks.move(False) for ranks in self._fleet.serving))

    async def leave_devices(self) -> None:
        if self._config.offload:
            await asyncio.gather(*(ranks.move(False) for ranks in self._fleet.members))

    def take_memory(self) -> PeaksByPhase:
        """Return the GPU memory by phase since the last call: the largest of the ranks."""
        largest = MemoryPeaks()
        for ranks in self._fleet.members:
            largest.merge(ranks.memory.take())
        return largest.take()

    def close(self) -> None:
        self._fleet.close(kill=False)

    # ------------------------------------------------------------ copies

    def _most(self, member: Ranks) -> int:
        return self._config.micro_batch_size

    async def _serve(self, member: Ranks) -> None:
        await first_of(*(self._serve_copy(copy, member) for copy in member.copies))

    async def _serve_copy(self, copy: Copy, ranks: Ranks) -> None:
        lane = f"reward_models.{self.name}", self._fleet.members.index(ranks) + ranks.rank(copy), "score"
        while True:
            copy.under_way = batch = await self._take(ranks)
            async with self._fleet.at_work(ranks):
                try:
                    with POOL_WORK.of(*lane):
                        results = await ranks.score(copy, [job.item for job in batch], self._timed(batch))
                except Exception as error:  # a process edge: recorded as a failure of these samples
                    cause = ranks.cause(error)
                    # Other ranks of the copy may wait for the failed one.
                    if isinstance(error, MemberLost) or is_gone(error) or len(copy.actors) > 1:
                        ranks.guilty = copy
                        raise MemberLost(cause) from error
                    self._fail(batch, cause)
                else:
                    self._hand_out(batch, results)
            copy.under_way = []

    @contextmanager
    def _timed(self, batch: list[TextJob]) -> Iterator[None]:
        call_later, name = asyncio.get_running_loop().call_later, f"model {self.name}"
        timers = [call_later(job.timeout_s, self._fail, [job], time_out(name, job.timeout_s)) for job in batch]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def _lost(self, member: Ranks, cause: str) -> None:
        for copy in member.copies:
            is_guilty = member.guilty in (None, copy)
            bystander = f"{member.name}: its ranks are started again, because one of them was lost"
            self._fail(copy.under_way, cause if is_guilty else bystander)
            copy.under_way = []
        if not self._fleet.serving:
            self._fail_waiting(cause)

    def _hand_out(self, batch: list[TextJob], results: list[float | str]) -> None:
        for job, result in zip(batch, results, strict=True):
            self._resolve(job, ResponseSuspected(f"reward model {self.name}: {result}") if isinstance(result, str) else result)


class RewardModelClient:
    """RewardClient of one domain: a reward model gives the score, reward workers add further terms."""

    def __init__(self, domain: str, config: RewardConfig, client: RewardModelPool) -> None:
        self._config = config
        self._client = client
        reward = typed_reward(config.name, config.args, f"domains.{domain}.reward")
        assert isinstance(reward, ModelReward)
        self._reward = reward
        self._added = RewardPool(domain, _without_model(config)) if config.terms or config.format else None
        self._function = RewardFunction("model", self._scored, {})

    def configure(self, config: RewardConfig) -> None:
        if self._added is not None:
            self._added.configure(_without_model(config))

    async def start(self) -> None:
        if self._added is not None:
            await self._added.start()

    async def score(self, item: RewardInput) -> Score:
        if self._added is None:
            return await self._function.score(item)
        own, added = await asyncio.gather(self._function.score(item), self._added.score(item))
        value = checked_score(own.value + added.value, "model with its terms")
        base = {"base": own.value} if added.terms else {}  # that of the workers is `zero_base`
        details = {**added.details, **base, **own.details}
        return replace(own, value=value, details=details, format_ok=added.format_ok, terms=added.terms | base)

    @property
    def capacity(self) -> float:
        return self._client.capacity

    def close(self) -> None:
        if self._added is not None:
            self._added.close()

    def newly_replaced(self) -> list[str]:
        """Return why workers and ranks were replaced since the last call. A shared model reports only to its first domain."""
        return self._client.newly_replaced() + (self._added.newly_replaced() if self._added is not None else [])

    async def _scored(self, item: RewardInput) -> Score:
        return self._reward.score_of(await self._client.score(self._reward.model_input(item), self._config.timeout_s))


def _without_model(config: RewardConfig) -> RewardConfig:
    return config.model_copy(update={"name": f"{zero_base.__module__}.{zero_base.__name__}", "args": {}})
