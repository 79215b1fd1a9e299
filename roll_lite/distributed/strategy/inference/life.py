from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Set
from enum import StrEnum
from typing import NoReturn

from roll_lite.distributed.weight_sync.update import WeightUpdate

NOT_STARTED = "not started"


class EngineDead(RuntimeError):
    pass


class EngineMemory(StrEnum):
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class EngineState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    UPDATING = "updating"
    """An update is in progress: the weights are a mix of old and new."""
    HALF_UPDATED = "half updated"
    """An update stopped partway; a complete one is needed."""
    CACHE_OFFLOADED = "cache offloaded"
    WEIGHTS_OFFLOADED = "weights offloaded"
    """Weights, and perhaps the KV cache, are offloaded."""
    DEAD = "dead"


class EngineEvent(StrEnum):
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    CONNECT = "connect"
    BEGIN_UPDATE = "begin update"
    """Announces an update; replaces an earlier announcement."""
    RECEIVE = "receive"
    BREAK_OFF = "break off"
    """A bucket transfer failed. The old weights are intact unless a bucket was loaded."""
    FINISH_UPDATE = "finish update"
    READ_WEIGHTS = "read weights"
    OFFLOAD = "offload"
    LOAD = "load"
    DIE = "die"


_S, _E = EngineState, EngineEvent
_ALIVE = frozenset(EngineState) - {_S.STARTING, _S.DEAD}

ALLOWED: Mapping[EngineEvent, Set[EngineState]] = {
    _E.START: {_S.STARTING},
    _E.PAUSE: _ALIVE,
    _E.RESUME: _ALIVE,
    _E.CONNECT: _ALIVE - {_S.UPDATING},
    _E.BEGIN_UPDATE: _ALIVE - {_S.UPDATING, _S.WEIGHTS_OFFLOADED},
    _E.RECEIVE: _ALIVE - {_S.WEIGHTS_OFFLOADED},
    _E.BREAK_OFF: {_S.UPDATING},
    _E.FINISH_UPDATE: {_S.UPDATING},
    _E.READ_WEIGHTS: _ALIVE - {_S.UPDATING, _S.HALF_UPDATED, _S.WEIGHTS_OFFLOADED},
    _E.OFFLOAD: _ALIVE - {_S.UPDATING, _S.HALF_UPDATED},
    _E.LOAD: _ALIVE,
    _E.DIE: frozenset(EngineState),
}

_MEANWHILE = {
    _E.CONNECT: "finish it first",
    _E.BEGIN_UPDATE: "finish it first",
    _E.OFFLOAD: "finish it before anything is offloaded",
    _E.READ_WEIGHTS: "the engine holds parts of two sets of weights",
}


class EngineLife:
    def __init__(self, make: str) -> None:
        self.state = EngineState.STARTING
        self.failure: str | None = NOT_STARTED
        self.paused = False
        self.away: set[EngineMemory] = set()
        self.blank = False
        """True from an offload that dropped the weights until a complete update."""
        self.update: WeightUpdate | None = None
        self.halted: bool | None = False
        """True if the engine process has paused generation; None (unknown) during a call to pause or resume and after its cancellation."""
        self.version = 0
        self._make = make
        self._died = asyncio.Event()

    async def until_dead(self) -> str:
        await self._died.wait()
        assert self.failure is not None
        return self.failure

    async def until_refused(self) -> NoReturn:
        raise EngineDead(f"{self._make} engine: {await self.until_dead()}")

    def require(self, event: EngineEvent) -> None:
        state = self.state
        if state in ALLOWED[event]:
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
        self.require(EngineEvent.RECEIVE)
        if self.update is None:
            raise RuntimeError("no weight update has begun: begin_weight_update comes first")
        return self.update

    # ------------------------------------------------------------ what happens

    def start(self) -> None:
        self.require(EngineEvent.START)
        self.failure = None
        self._enter_whole()

    def pause(self) -> None:
        self.require(EngineEvent.PAUSE)
        self.paused = True
        self._follow()

    def resume(self) -> None:
        self.require(EngineEvent.RESUME)
        self.paused = False
        self._follow()

    def begin_update(self, update: WeightUpdate) -> None:
        self.require(EngineEvent.BEGIN_UPDATE)
        self.update = update
        if self.state is EngineState.HALF_UPDATED:
            self.state = EngineState.UPDATING

    def receive(self) -> WeightUpdate:
        update = self.require_update()
        self.state = EngineState.UPDATING
        return update

    def break_off(self, half_way: bool) -> None:
        self.require(EngineEvent.BREAK_OFF)
        if half_way:
            self.state, self.update = EngineState.HALF_UPDATED, None
        else:
            self._enter_whole()

    def finish_update(self, version: int) -> None:
        self.require(EngineEvent.FINISH_UPDATE)
        self.update, self.version, self.blank = None, version, False
        self._enter_whole()

    def offload(self, parts: Iterable[EngineMemory]) -> None:
        self.require(EngineEvent.OFFLOAD)
        self.away |= set(parts)
        self._follow()

    def load(self, parts: Iterable[EngineMemory]) -> None:
        self.require(EngineEvent.LOAD)
        self.away -= set(parts)
        self._follow()

    def die(self, why: str) -> None:
        if self.state is not EngineState.DEAD:
            self.state, self.failure = EngineState.DEAD, why
            self._died.set()

    def _follow(self) -> None:
        if self.state not in (EngineState.UPDATING, EngineState.HALF_UPDATED):
            self._enter_whole()

    def _enter_whole(self) -> None:
        if self.away:
            self.state = EngineState.WEIGHTS_OFFLOADED if EngineMemory.WEIGHTS in self.away else EngineState.CACHE_OFFLOADED
        else:
            self.state = EngineState.PAUSED if self.paused else EngineState.SERVING
