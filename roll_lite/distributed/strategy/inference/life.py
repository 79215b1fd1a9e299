"""States of an engine, what each allows, and the state that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from enum import StrEnum

from roll_lite.distributed.strategy.base import EngineMemory
from roll_lite.distributed.weight_sync.update import WeightUpdate

NOT_STARTED = "not started"


class EngineDead(RuntimeError):
    """Engine that cannot serve any more and has to be replaced."""


class EngineState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    """Paused by `pause`: generates nothing until `resume`, and keeps its memory."""
    UPDATING = "updating"
    """Holds parts of two sets of weights."""
    HALF_UPDATED = "half updated"
    """Holds parts of two sets of weights because an update broke off; needs another, whole one."""
    CACHE_OFFLOADED = "cache offloaded"
    """KV cache offloaded; the weights are on the device."""
    WEIGHTS_OFFLOADED = "weights offloaded"
    """Weights in host memory; the KV cache may be offloaded as well."""
    DEAD = "dead"


class EngineEvent(StrEnum):
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    CONNECT = "connect"
    BEGIN_UPDATE = "begin update"
    """Announce an update. Nothing has arrived yet; another announcement replaces it."""
    RECEIVE = "receive"
    BREAK_OFF = "break off"
    """A bucket did not arrive. If it was the first, the old weights are still whole."""
    FINISH_UPDATE = "finish update"
    READ_WEIGHTS = "read weights"
    OFFLOAD = "offload"
    LOAD = "load"
    DIE = "die"


_S, _E = EngineState, EngineEvent
_STARTED = {_E.PAUSE, _E.RESUME, _E.CONNECT, _E.OFFLOAD, _E.LOAD, _E.DIE}
_WITH_WEIGHTS = _STARTED | {_E.BEGIN_UPDATE, _E.RECEIVE, _E.READ_WEIGHTS}

ALLOWED: Mapping[EngineState, Set[EngineEvent]] = {
    _S.STARTING: {_E.START, _E.DIE},
    _S.SERVING: _WITH_WEIGHTS,
    _S.PAUSED: _WITH_WEIGHTS,
    _S.UPDATING: {_E.PAUSE, _E.RESUME, _E.RECEIVE, _E.BREAK_OFF, _E.FINISH_UPDATE, _E.LOAD, _E.DIE},
    _S.HALF_UPDATED: {_E.PAUSE, _E.RESUME, _E.CONNECT, _E.BEGIN_UPDATE, _E.RECEIVE, _E.LOAD, _E.DIE},
    _S.CACHE_OFFLOADED: _WITH_WEIGHTS,
    _S.WEIGHTS_OFFLOADED: _STARTED,
    _S.DEAD: {_E.DIE},
}
"""Events that each state allows; any other is refused. The next state follows from the facts in EngineLife, such as that somebody paused
the engine, which every state remembers."""

_MEANWHILE = {
    _E.CONNECT: "finish it first",
    _E.BEGIN_UPDATE: "finish it first",
    _E.OFFLOAD: "finish it before anything is offloaded",
    _E.READ_WEIGHTS: "the engine holds parts of two sets of weights",
}
"""Advice for events that an update under way forbids."""


class EngineLife:
    """State of an engine."""

    def __init__(self, make: str, failure: str | None = NOT_STARTED) -> None:
        self._make = make
        self.failure = failure
        """Reason why it cannot serve."""
        self.paused = False
        """True after `pause` until `resume`."""
        self.away: set[EngineMemory] = set()
        """Offloaded parts."""
        self.update: WeightUpdate | None = None
        """Update that was announced and is not finished."""
        self.receiving = False
        """True once buckets of this update, or of one that broke off, have arrived."""
        self.version = 0
        """Version of the weights that generate."""

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return EngineState.STARTING if self.failure == NOT_STARTED else EngineState.DEAD
        if self.receiving:
            return EngineState.UPDATING if self.update is not None else EngineState.HALF_UPDATED
        if self.away:
            return EngineState.WEIGHTS_OFFLOADED if EngineMemory.WEIGHTS in self.away else EngineState.CACHE_OFFLOADED
        return EngineState.PAUSED if self.paused else EngineState.SERVING

    @property
    def held_up(self) -> bool:
        """True if it could not generate even without a requested pause."""
        return self.state not in (EngineState.SERVING, EngineState.PAUSED)

    # ------------------------------------------------------------ what is allowed

    def require(self, event: EngineEvent) -> None:
        state = self.state
        if event in ALLOWED[state]:
            return
        if event is EngineEvent.START:
            raise RuntimeError(f"{self._make} engine: a strategy starts its engine once; make a new strategy for another")
        if state in (EngineState.STARTING, EngineState.DEAD):
            raise EngineDead(f"{self._make} engine: {self.failure}")
        if state is EngineState.UPDATING:
            raise RuntimeError(f"a weight update is under way: {_MEANWHILE[event]}")
        if state is EngineState.HALF_UPDATED:
            raise RuntimeError("a weight update broke off half-way: the engine waits for another one")
        if state is EngineState.WEIGHTS_OFFLOADED:
            raise RuntimeError("the engine's weights are offloaded: load them first")
        raise RuntimeError("no weight update is under way")

    def require_update(self) -> WeightUpdate:
        """Announced update, in a state that accepts its buckets."""
        self.require(EngineEvent.RECEIVE)
        if self.update is None:
            raise RuntimeError("no weight update has begun: begin_weight_update comes first")
        return self.update

    # ------------------------------------------------------------ what happens

    def start(self) -> None:
        self.require(EngineEvent.START)
        self.failure = None

    def pause(self) -> None:
        self.require(EngineEvent.PAUSE)
        self.paused = True

    def resume(self) -> None:
        self.require(EngineEvent.RESUME)
        self.paused = False

    def begin_update(self, update: WeightUpdate) -> None:
        self.require(EngineEvent.BEGIN_UPDATE)
        self.update = update

    def receive(self) -> WeightUpdate:
        update = self.require_update()
        self.receiving = True
        return update

    def break_off(self, half_way: bool) -> None:
        self.require(EngineEvent.BREAK_OFF)
        self.receiving = half_way
        if half_way:
            self.update = None

    def finish_update(self, version: int) -> None:
        self.require(EngineEvent.FINISH_UPDATE)
        self.update, self.receiving, self.version = None, False, version

    def offload(self, parts: Iterable[EngineMemory]) -> None:
        self.require(EngineEvent.OFFLOAD)
        self.away |= set(parts)

    def load(self, parts: Iterable[EngineMemory]) -> None:
        self.require(EngineEvent.LOAD)
        self.away -= set(parts)

    def die(self, why: str) -> None:
        self.require(EngineEvent.DIE)
        self.failure = why
