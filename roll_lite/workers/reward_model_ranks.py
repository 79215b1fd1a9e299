"""Ranks of a reward model: the copies they form, and their restart after a death."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_lite.config.schema.models import RewardModelConfig
from roll_lite.distributed.fleet import MemberLost, cause_of, until_silent
from roll_lite.distributed.rank_group import kill_stopped
from roll_lite.distributed.strategy.base import RankLayout, StateGroup
from roll_lite.distributed.strategy.models import STRATEGIES
from roll_lite.files import first_line
from roll_lite.rewards.model import ScoredText
from roll_lite.workers.reward_model import NotInitialized

RESTART_SECONDS = 600.0
"""Time limit for processes to start and load the model."""
HANG_SECONDS = 600.0
"""Time limit of a copy's batch; a sample's own limit is shorter."""
KILL_SECONDS = 1.0
"""Time to wait until killed processes are gone."""
POLL_SECONDS = 0.25


@dataclass(frozen=True, eq=False)
class Copy:
    """The ranks of one copy of the model, which compute a forward pass together."""

    actors: tuple[Any, ...]
    head: int
    """Index of the rank that returns the results."""

    async def score(self, texts: list[ScoredText]) -> list[float | str]:
        shared: Any = texts if len(self.actors) == 1 else ray.put(texts)
        results = await asyncio.gather(*(actor.score.remote(shared) for actor in self.actors))
        found: list[float | str] = results[self.head]
        return found


def copies_of(actors: Sequence[Any], layouts: Sequence[RankLayout]) -> list[Copy]:
    """Copies in data-rank order. `actors` and `layouts` have the same order."""
    copies = []
    for data_rank in sorted({layout.data_rank for layout in layouts}):
        own = [(actor, layout) for actor, layout in zip(actors, layouts, strict=True) if layout.data_rank == data_rank]
        head = next(place for place, (_, layout) in enumerate(own) if layout.is_head)
        copies.append(Copy(tuple(actor for actor, _ in own), head))
    return copies


def is_gone(error: BaseException) -> bool:
    """True if the process died, or Ray restarted it and it has no model yet."""
    return isinstance(error, RayActorError) or (isinstance(error, RayTaskError) and isinstance(error.cause, NotInitialized))


class Ranks:
    """Ranks that start together, as one member of the model's fleet: all ranks of a Megatron model, or a single rank with hf.

    The driver owns the processes, and Ray restarts dead ones; `start` loads the model into them.
    """

    def __init__(self, model: str, actors: Sequence[Any], config: RewardModelConfig) -> None:
        self.name = f"reward model {model}"
        self.copies: list[Copy] = []
        """Set by `start`."""
        self.guilty: Copy | None = None
        """Copy whose failure ended the others, if known."""
        self._actors = list(actors)
        self._places: list[tuple[str, int]] = []
        self._are_connected = STRATEGIES[config.strategy.name].connects_ranks
        self._is_resident = not config.offload
        self._moving = asyncio.Lock()
        self._is_initialized = True
        """True if the model is loaded: at first by the driver, after a loss by `start`."""
        self._is_gone = False
        self._was_killed = False
        self._at_work = 0

    @staticmethod
    def of(model: str, actors: Sequence[Any], config: RewardModelConfig) -> list[Ranks]:
        """Members of the model's fleet. `actors`: all of its ranks, in order."""
        parts = [actors] if STRATEGIES[config.strategy.name].connects_ranks else [[actor] for actor in actors]
        return [Ranks(model, part, config) for part in parts]

    async def start(self) -> None:
        is_initialized, self._is_initialized = self._is_initialized, False
        try:
            async with self._moving:
                if not is_initialized:
                    await self._initialize()
                self.copies = copies_of(self._actors, await asyncio.gather(*(actor.layout.remote() for actor in self._actors)))
        except Exception as error:
            raise MemberLost(self.cause(error)) from error
        self._places = await asyncio.gather(*(actor.place.remote() for actor in self._actors))
        self.guilty = None

    async def until_lost(self) -> str:
        """Wait until a rank is silent or dead, which ends all of them; returns the cause."""

        async def ask() -> list[int]:
            return list(await asyncio.gather(*(actor.process_id.remote() for actor in self._actors)))

        try:
            return f"{self.name}: {await until_silent(ask, lambda: bool(self._at_work))}"
        except Exception as error:
            raise MemberLost(self.cause(error)) from error

    def kill(self) -> None:
        """Kill the ranks for a restart. Connected ranks cannot take in a new one, so all of them restart."""
        self._was_killed = self._are_connected or not self._is_gone
        self._is_gone = False
        for actor in self._actors if self._was_killed else ():
            ray.kill(actor, no_restart=False)
        for place in self._places if self._was_killed else ():
            kill_stopped(*place)

    def cause(self, error: BaseException) -> str:
        """Cause in one line; notes the death of a process."""
        if is_gone(error):
            self._is_gone = True
            return f"{self.name}: its process died: {first_line(error)}"
        if isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        return cause_of(error, self.name)

    async def score(self, copy: Copy, texts: list[ScoredText]) -> list[float | str]:
        try:
            async with asyncio.timeout(HANG_SECONDS) as limit:
                with self._busy():
                    await self._move(True)
                    return await copy.score(texts)
        except TimeoutError:
            if not limit.expired():
                raise
            raise MemberLost(f"{self.name}: it hangs: no scores within {HANG_SECONDS:g} s") from None

    async def offload(self) -> None:
        """Offload the model. A dead rank is noticed at the next sample."""
        with self._busy():
            await self._move(False)

    async def _move(self, to_devices: bool) -> None:
        async with self._moving:
            if self._is_resident == to_devices:
                return
            self._is_resident = to_devices
            methods = [actor.load if to_devices else actor.offload for actor in self._actors]
            moved = [method.remote([StateGroup.WEIGHTS]) for method in methods]
            for error in await asyncio.gather(*moved, return_exceptions=True):
                if isinstance(error, BaseException) and (to_devices or not is_gone(error)):
                    raise error

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

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
    """Wait until the restarted process answers."""
    while True:
        try:
            await actor.process_id.remote()
        except RayActorError:
            await asyncio.sleep(POLL_SECONDS)
        else:
            return
