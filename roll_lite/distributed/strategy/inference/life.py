"""The states of an engine, what each of them allows, and where it leads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from enum import StrEnum

from roll_lite.distributed.strategy.base import EngineMemory
from roll_lite.distributed.weight_sync.update import WeightUpdate

NOT_STARTED = "not started"


class EngineDead(RuntimeError):
    """The engine cannot serve any more; a new one has to be started."""


class EngineState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    """By `pause`: it generates nothing until `resume`, and holds everything that it needs to."""
    UPDATING = "updating"
    """It holds parts of two sets of weights."""
    CACHE_OFFLOADED = "cache offloaded"
    """The KV cache alone; the weights are on the device."""
    WEIGHTS_OFFLOADED = "weights offloaded"
    """The weights are in host memory; the KV cache may be offloaded as well."""
    DEAD = "dead"


class EngineEvent(StrEnum):
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    CONNECT = "connect"
    BEGIN_UPDATE = "begin update"
    """An update is announced. Nothing has arrived yet; another announcement takes its place."""
    RECEIVE = "receive"
    BREAK_OFF = "break off"
    """The first bucket did not come: the old weights are still whole."""
    FINISH_UPDATE = "finish update"
    READ_WEIGHTS = "read weights"
    OFFLOAD = "offload"
    LOAD = "load"
    DIE = "die"


_S, _E = EngineState, EngineEvent
_AWAKE = {_S.SERVING, _S.PAUSED}
_AWAY = {_S.CACHE_OFFLOADED, _S.WEIGHTS_OFFLOADED}

TRANSITIONS: Mapping[EngineState, Mapping[EngineEvent, Set[EngineState]]] = {
    _S.STARTING: {_E.START: {_S.SERVING}, _E.DIE: {_S.DEAD}},
    _S.SERVING: {
        _E.PAUSE: {_S.PAUSED},
        _E.RESUME: {_S.SERVING},
        _E.CONNECT: {_S.SERVING},
        _E.BEGIN_UPDATE: {_S.SERVING},
        _E.RECEIVE: {_S.UPDATING},
        _E.READ_WEIGHTS: {_S.SERVING},
        _E.OFFLOAD: _AWAY,
        _E.LOAD: {_S.SERVING},
        _E.DIE: {_S.DEAD},
    },
    _S.PAUSED: {
        _E.PAUSE: {_S.PAUSED},
        _E.RESUME: {_S.SERVING},
        _E.CONNECT: {_S.PAUSED},
        _E.BEGIN_UPDATE: {_S.PAUSED},
        _E.RECEIVE: {_S.UPDATING},
        _E.READ_WEIGHTS: {_S.PAUSED},
        _E.OFFLOAD: _AWAY,
        _E.LOAD: {_S.PAUSED},
        _E.DIE: {_S.DEAD},
    },
    _S.UPDATING: {
        _E.PAUSE: {_S.UPDATING},
        _E.RESUME: {_S.UPDATING},
        _E.RECEIVE: {_S.UPDATING},
        _E.BREAK_OFF: _AWAKE | {_S.CACHE_OFFLOADED},
        _E.FINISH_UPDATE: _AWAKE | {_S.CACHE_OFFLOADED},
        _E.LOAD: {_S.UPDATING},
        _E.DIE: {_S.DEAD},
    },
    _S.CACHE_OFFLOADED: {
        _E.PAUSE: {_S.CACHE_OFFLOADED},
        _E.RESUME: {_S.CACHE_OFFLOADED},
        _E.CONNECT: {_S.CACHE_OFFLOADED},
        _E.BEGIN_UPDATE: {_S.CACHE_OFFLOADED},
        _E.RECEIVE: {_S.UPDATING},
        _E.READ_WEIGHTS: {_S.CACHE_OFFLOADED},
        _E.OFFLOAD: _AWAY,
        _E.LOAD: _AWAKE | {_S.CACHE_OFFLOADED},
        _E.DIE: {_S.DEAD},
    },
    _S.WEIGHTS_OFFLOADED: {
        _E.PAUSE: {_S.WEIGHTS_OFFLOADED},
        _E.RESUME: {_S.WEIGHTS_OFFLOADED},
        _E.CONNECT: {_S.WEIGHTS_OFFLOADED},
        _E.OFFLOAD: {_S.WEIGHTS_OFFLOADED},
        _E.LOAD: _AWAKE | _AWAY,
        _E.DIE: {_S.DEAD},
    },
    _S.DEAD: {_E.DIE: {_S.DEAD}},
}
"""What is not here is refused. Where several states may follow, it is the parts that are away and the callers' last word that decide:
pausing and resuming are remembered in every state."""

_MEANWHILE = {
    _E.CONNECT: "finish it first",
    _E.BEGIN_UPDATE: "finish it first",
    _E.OFFLOAD: "finish it before anything is offloaded",
    _E.READ_WEIGHTS: "the engine holds parts of two sets of weights",
}
"""Why an update under way forbids it."""


class EngineLife:
    """Where an engine stands. Changes go through the table."""

    def __init__(self, make: str, failure: str | None = NOT_STARTED) -> None:
        self._make = make
        self.failure = failure
        """Why it cannot serve."""
        self.paused = False
        """`pause` was called, and `resume` not yet."""
        self.away: set[EngineMemory] = set()
        """What is offloaded."""
        self.update: WeightUpdate | None = None
        """The weight update that was announced and is not finished."""
        self.receiving = False
        """Buckets of that update have come in."""
        self.version = 0
        """Version of the weights that generate."""

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return EngineState.STARTING if self.failure == NOT_STARTED else EngineState.DEAD
        if self.receiving:
            return EngineState.UPDATING
        if self.away:
            return EngineState.WEIGHTS_OFFLOADED if EngineMemory.WEIGHTS in self.away else EngineState.CACHE_OFFLOADED
        return EngineState.PAUSED if self.paused else EngineState.SERVING

    @property
    def held_up(self) -> bool:
        """It could not generate now even if nobody had paused it."""
        return self.state not in _AWAKE

    # ------------------------------------------------------------ what is allowed

    def require(self, event: EngineEvent) -> None:
        state = self.state
        if event in TRANSITIONS[state]:
            return
        if event is EngineEvent.START:
            raise RuntimeError(f"{self._make} engine: a strategy starts its engine once; make a new strategy for another")
        if state in (EngineState.STARTING, EngineState.DEAD):
            raise EngineDead(f"{self._make} engine: {self.failure}")
        if state is EngineState.UPDATING:
            raise RuntimeError(f"a weight update is under way: {_MEANWHILE[event]}")
        if state is EngineState.WEIGHTS_OFFLOADED:
            raise RuntimeError("the engine's weights are offloaded: load them first")
        raise RuntimeError("no weight update is under way")

    def require_update(self) -> WeightUpdate:
        """The one that has been announced, in a state in which its buckets may come."""
        self.require(EngineEvent.RECEIVE)
        if self.update is None:
            raise RuntimeError("no weight update has begun: begin_weight_update comes first")
        return self.update

    # ------------------------------------------------------------ what happens

    @contextmanager
    def _changes(self, event: EngineEvent) -> Iterator[None]:
        self.require(event)
        following = TRANSITIONS[self.state][event]
        yield
        assert self.state in following, f"{event} leads to {self.state}"

    def start(self) -> None:
        with self._changes(EngineEvent.START):
            self.failure = None

    def pause(self) -> None:
        with self._changes(EngineEvent.PAUSE):
            self.paused = True

    def resume(self) -> None:
        with self._changes(EngineEvent.RESUME):
            self.paused = False

    def begin_update(self, update: WeightUpdate) -> None:
        with self._changes(EngineEvent.BEGIN_UPDATE):
            self.update = update

    def receive(self) -> WeightUpdate:
        update = self.require_update()
        with self._changes(EngineEvent.RECEIVE):
            self.receiving = True
        return update

    def break_off(self) -> None:
        with self._changes(EngineEvent.BREAK_OFF):
            self.receiving = False

    def finish_update(self, version: int) -> None:
        with self._changes(EngineEvent.FINISH_UPDATE):
            self.update, self.receiving, self.version = None, False, version

    def offload(self, parts: Iterable[EngineMemory]) -> None:
        with self._changes(EngineEvent.OFFLOAD):
            self.away |= set(parts)

    def load(self, parts: Iterable[EngineMemory]) -> None:
        with self._changes(EngineEvent.LOAD):
            self.away -= set(parts)

    def die(self, why: str) -> None:
        with self._changes(EngineEvent.DIE):
            self.failure = why
