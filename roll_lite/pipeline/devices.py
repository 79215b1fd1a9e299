"""Who is on the devices when. A role with `offload: true` is there only while it works; `config/device_phases.py` is the table of that.

Reward models with `offload: true` are there while engines generate: the rollout service, which calls them, sees to that.
Where roles take turns, those that share a device are there one after the other, and those with devices of their own side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from roll_lite.config.device_phases import PHASES, Phase
from roll_lite.distributed.cluster import ClusterDead, Pending, first_done, gather
from roll_lite.distributed.strategy.base import EngineMemory, StateGroup


def engine_memory(phase: Phase) -> tuple[EngineMemory, ...]:
    """Of the engines in that phase."""
    return tuple(EngineMemory(part) for part in PHASES[phase].parts["actor_infer"])


def states(phase: Phase) -> tuple[StateGroup, ...]:
    """Of the models in that phase, which all need the same."""
    (parts,) = {parts for role, parts in PHASES[phase].parts.items() if role != "actor_infer"}
    return tuple(StateGroup(part) for part in parts)


R = TypeVar("R")


class Movable(Protocol):
    """A role whose state can be moved onto its devices and off them, in named parts."""

    @property
    def offloads(self) -> bool:
        """`offload: true`: its state is there only while it works."""

    @property
    def devices(self) -> tuple[int, ...]: ...

    def start_load(self, parts: Sequence[Any]) -> Pending[Any]: ...

    def start_offload(self, parts: Sequence[Any]) -> Pending[Any]: ...


@dataclass(frozen=True)
class DeviceTurn(Generic[R]):
    """Work for one role, started once its state is there."""

    role: Movable
    start: Callable[[], Pending[R]]


@contextmanager
def loaded(role: Movable, parts: Sequence[Any], beside: Sequence[tuple[Movable, Sequence[Any]]] = ()) -> Iterator[None]:
    """The parts are on the devices inside the block, and leave them afterwards, also when the block fails. `beside`: who comes in at the
    same time, because somebody in the block has them loaded, and sees to it that they leave."""
    try:
        gather(*(one.start_load(its) for one, its in [(role, parts), *beside] if one.offloads))
        yield
    except BaseException:
        for one, its in [(role, parts), *beside]:
            _abandon([one], its)
        raise
    _offload([role], parts)


def take_turns(turns: Sequence[DeviceTurn[R]], parts: Sequence[Any]) -> list[R]:
    """Results in the order of `turns`. Each starts as soon as nothing that it has to wait for is at work."""
    waiting = list(range(len(turns)))
    working: dict[int, Pending[R]] = {}
    results: dict[int, R] = {}
    present: list[Movable] = []
    try:
        while waiting or working:
            starting = _startable([turns[number].role for number in waiting], present)
            present += [turns[waiting[place]].role for place in starting]
            _load([turns[waiting[place]].role for place in starting], parts)
            for number in [waiting[place] for place in starting]:
                working[number] = turns[number].start()
                waiting.remove(number)
            done = first_done(list(working.values()))
            for number in [number for number, pending in working.items() if pending in done]:
                results[number] = working.pop(number).result()
                _offload([turns[number].role], parts)
                present.remove(turns[number].role)
    except BaseException:
        _abandon(present, parts)
        raise
    return [results[number] for number in range(len(turns))]


def _startable(waiting: Sequence[Movable], present: Sequence[Movable]) -> list[int]:
    """Places of those that need not wait for one that is there, nor for one that starts with them."""
    starting: list[int] = []
    for place, role in enumerate(waiting):
        others = [*present, *(waiting[other] for other in starting)]
        if not any(exclude_each_other(role, other) for other in others):
            starting.append(place)
    return starting


def exclude_each_other(one: Movable, other: Movable) -> bool:
    return one.offloads and other.offloads and not set(one.devices).isdisjoint(other.devices)


def _load(roles: Iterable[Movable], parts: Sequence[Any]) -> None:
    gather(*(role.start_load(parts) for role in roles if role.offloads))


def _offload(roles: Iterable[Movable], parts: Sequence[Any]) -> None:
    gather(*(role.start_offload(parts) for role in roles if role.offloads))


def _abandon(roles: Iterable[Movable], parts: Sequence[Any]) -> None:
    """After a failure: asked to leave, but not waited for. Ranks do that when they come out of what they are doing, if they ever do."""
    for role in roles:
        if role.offloads:
            with suppress(ClusterDead):
                role.start_offload(parts)
