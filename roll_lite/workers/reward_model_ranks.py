"""The ranks of one reward model: which of them hold a copy of it together, and how those whose process died come back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_lite.config.schema import HfStrategyConfig, RewardModelConfig
from roll_lite.distributed.strategy.base import RankLayout, StateGroup
from roll_lite.rewards.model import ScoredText
from roll_lite.workers.reward_model import NotInitialized

RESTART_SECONDS = 600.0
"""For processes to start, and to load the model."""
KILL_SECONDS = 1.0
"""Until nobody meets a process any more that was told to end."""
POLL_SECONDS = 0.25


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

    def lost_by(self, error: Exception) -> bool:
        """A rank is gone, or stands apart from the others, which may wait for it for ever."""
        return is_gone(error) or len(self.actors) > 1


def copies_of(actors: Sequence[Any], layouts: Sequence[RankLayout]) -> list[Copy]:
    """In data-rank order. `actors`: in the order of their layouts."""
    copies = []
    for data_rank in sorted({layout.data_rank for layout in layouts}):
        own = [(actor, layout) for actor, layout in zip(actors, layouts, strict=True) if layout.data_rank == data_rank]
        head = next(place for place, (_, layout) in enumerate(own) if layout.is_head)
        copies.append(Copy(tuple(actor for actor, _ in own), head))
    return copies


def is_gone(error: BaseException) -> bool:
    """The process died, or Ray has started another one, which holds no model yet."""
    return isinstance(error, RayActorError) or (isinstance(error, RayTaskError) and isinstance(error.cause, NotInitialized))


class Ranks:
    """Ranks that start together: all of a model on Megatron, whose process group spans them; each of its own with hf."""

    def __init__(self, actors: Sequence[Any], config: RewardModelConfig) -> None:
        self.copies: list[Copy] = []
        """Known after `meet`."""
        self._actors = list(actors)
        self._are_connected = not isinstance(config.strategy, HfStrategyConfig)
        self._is_resident = not config.offload
        self._moving = asyncio.Lock()

    @staticmethod
    def of(actors: Sequence[Any], config: RewardModelConfig) -> list[Ranks]:
        """`actors`: all of the model's, in rank order."""
        parts = [[actor] for actor in actors] if isinstance(config.strategy, HfStrategyConfig) else [actors]
        return [Ranks(part, config) for part in parts]

    async def meet(self) -> None:
        """Once the driver has initialized every rank."""
        self.copies = copies_of(self._actors, await asyncio.gather(*(actor.layout.remote() for actor in self._actors)))

    async def load(self) -> None:
        async with self._moving:
            if not self._is_resident:
                await asyncio.gather(*(actor.load.remote([StateGroup.WEIGHTS]) for actor in self._actors))
                self._is_resident = True

    async def offload(self) -> None:
        """A dead rank is noticed by the next sample."""
        async with self._moving:
            if self._is_resident:
                self._is_resident = False
                moved = [actor.offload.remote([StateGroup.WEIGHTS]) for actor in self._actors]
                for error in await asyncio.gather(*moved, return_exceptions=True):
                    if isinstance(error, BaseException) and not is_gone(error):
                        raise error

    async def restart(self, again: bool) -> None:
        """Ray has started other processes in the place of dead ones; here they get the model. Ranks that are connected cannot take in
        a new one: all of them are started again. `again`: the attempt before this one failed, whatever it left is ended."""
        async with self._moving, asyncio.timeout(RESTART_SECONDS):
            if again or self._are_connected:
                for actor in self._actors:
                    ray.kill(actor, no_restart=False)
                await asyncio.sleep(KILL_SECONDS)
            await asyncio.gather(*(_reached(actor) for actor in self._actors))
            if self._are_connected:
                address = await self._actors[0].rendezvous.remote()
                await asyncio.gather(*(actor.meet_at.remote(address) for actor in self._actors))
            await asyncio.gather(*(actor.initialize.remote() for actor in self._actors))
            self._is_resident = True


async def _reached(actor: Any) -> None:
    """Its new process answers."""
    while True:
        try:
            await actor.process_id.remote()
        except RayActorError:
            await asyncio.sleep(POLL_SECONDS)
        else:
            return
