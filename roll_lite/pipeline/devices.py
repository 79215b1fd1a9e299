"""Who is on the devices when. A role with `offload: true` is there only while it works; `config/device_phases.py` is the table of that.

Reward models with `offload: true` are there while engines generate: the rollout service, which calls them, sees to that.
Where roles take turns, those that share a device are there one after the other, and those with devices of their own side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from roll_lite.config.device_phases import PHASES, Phase, startable
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
    if role.offloads:
        role.start_offload(parts).result()


def take_turns(turns: Sequence[DeviceTurn[R]], parts: Sequence[Any]) -> list[R]:
    """Results in the order of `turns`. Each starts as soon as nothing that it has to wait for is there; those with devices of their own
    wait neither for the others' work nor for their moves."""
    waiting = list(range(len(turns)))
    present: dict[int, Generator[Pending[Any], Any, R]] = {}
    pending: dict[int, Pending[Any]] = {}
    results: dict[int, R] = {}
    try:
        while waiting or present:
            for number in startable(waiting, list(present), lambda one, other: exclude_each_other(turns[one].role, turns[other].role)):
                waiting.remove(number)
                present[number] = _stages(turns[number], parts)
                pending[number] = next(present[number])
            done = first_done(list(pending.values()))
            for number in [number for number, one in pending.items() if one in done]:
                try:
                    pending[number] = present[number].send(pending[number].result())
                except StopIteration as end:
                    results[number] = end.value
                    del present[number], pending[number]
    except BaseException:
        _abandon([turns[number].role for number in present], parts)
        raise
    return [results[number] for number in range(len(turns))]


def _stages(turn: DeviceTurn[R], parts: Sequence[Any]) -> Generator[Pending[Any], Any, R]:
    """What a turn waits for, one after the other; takes the answers."""
    if turn.role.offloads:
        yield turn.role.start_load(parts)
    result: R = yield turn.start()
    if turn.role.offloads:
        yield turn.role.start_offload(parts)
    return result


def exclude_each_other(one: Movable, other: Movable) -> bool:
    return one.offloads and other.offloads and not set(one.devices).isdisjoint(other.devices)


def _abandon(roles: Iterable[Movable], parts: Sequence[Any]) -> None:
    """After a failure: asked to leave, but not waited for. Ranks do that when they come out of what they are doing, if they ever do."""
    for role in roles:
        if role.offloads:
            with suppress(ClusterDead):
                role.start_offload(parts)
