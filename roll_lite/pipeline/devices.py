"""Turns on devices, by the table in `config/device_phases.py`: roles with `offload: true` are loaded only while they work, one after the
other on a shared device, otherwise in parallel. The rollout service loads reward models."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from roll_lite.config.device_phases import PHASES, Phase, startable
from roll_lite.distributed.cluster import ClusterDead, Pending, first_done, gather
from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.distributed.strategy.inference.life import EngineMemory


def engine_memory(phase: Phase) -> tuple[EngineMemory, ...]:
    return tuple(EngineMemory(part) for part in PHASES[phase].parts["actor_infer"])


def states(phase: Phase) -> tuple[StateGroup, ...]:
    """State groups loaded in this phase; the table gives all roles but the engines the same ones, except in `generate`."""
    (parts,) = {parts for role, parts in PHASES[phase].parts.items() if role != "actor_infer"}
    return tuple(StateGroup(part) for part in parts)


R = TypeVar("R")


class Movable(Protocol):
    """Role whose state is loaded and offloaded in named parts."""

    @property
    def offloads(self) -> bool:
        """True if loaded only while it works (`offload: true`)."""

    @property
    def devices(self) -> tuple[int, ...]: ...

    def start_load(self, parts: Sequence[Any]) -> Pending[Any]: ...

    def start_offload(self, parts: Sequence[Any]) -> Pending[Any]: ...


@dataclass(frozen=True)
class DeviceTurn(Generic[R]):
    role: Movable
    start: Callable[[], Pending[R]]
    took: Callable[[float], None] = lambda seconds: None
    """Gets the turn's seconds, load and offload included."""


@contextmanager
def loaded(role: Movable, parts: Sequence[Any], beside: Sequence[tuple[Movable, Sequence[Any]]] = ()) -> Iterator[None]:
    """Load parts of a role inside the block and offload them, even after a failure. `beside`: roles loaded concurrently; their owner
    offloads them."""
    try:
        gather(*(one.start_load(its) for one, its in [(role, parts), *beside] if one.offloads))
        yield
    except BaseException:
        for one, its in [(role, parts), *beside]:
            _abandon([one], its)
        raise
    if role.offloads:
        role.start_offload(parts).result()


def take_turns(turns: Sequence[DeviceTurn[R]], parts: Sequence[Any]) -> list[R]:
    """Results of all turns, in order. A turn starts when no other role is loaded on its devices."""
    waiting = list(range(len(turns)))
    present: dict[int, Generator[Pending[Any], Any, R]] = {}
    pending: dict[int, Pending[Any]] = {}
    begun: dict[int, float] = {}
    results: dict[int, R] = {}
    try:
        while waiting or present:
            for number in startable(waiting, list(present), lambda one, other: exclude_each_other(turns[one].role, turns[other].role)):
                waiting.remove(number)
                begun[number] = time.perf_counter()
                present[number] = _stages(turns[number], parts)
                pending[number] = next(present[number])
            done = first_done(list(pending.values()))
            for number in [number for number, one in pending.items() if one in done]:
                try:
                    pending[number] = present[number].send(pending[number].result())
                except StopIteration as end:
                    results[number] = end.value
                    turns[number].took(time.perf_counter() - begun[number])
                    del present[number], pending[number]
    except BaseException:
        _abandon([turns[number].role for number in present], parts)
        raise
    return [results[number] for number in range(len(turns))]


def _stages(turn: DeviceTurn[R], parts: Sequence[Any]) -> Generator[Pending[Any], Any, R]:
    """Start a turn's calls one after another: load, work, offload. Yields each pending call, and is sent its result. Returns the work's
    result."""
    if turn.role.offloads:
        yield turn.role.start_load(parts)
    result: R = yield turn.start()
    if turn.role.offloads:
        yield turn.role.start_offload(parts)
    return result


def exclude_each_other(one: Movable, other: Movable) -> bool:
    return one.offloads and other.offloads and not set(one.devices).isdisjoint(other.devices)


def _abandon(roles: Iterable[Movable], parts: Sequence[Any]) -> None:
    """Start offloading after a failure, without waiting: ranks may hang."""
    for role in roles:
        if role.offloads:
            with suppress(ClusterDead):
                role.start_offload(parts)
