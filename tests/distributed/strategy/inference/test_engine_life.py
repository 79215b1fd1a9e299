"""The states of an engine: every transition that is allowed, and every one that is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roll_lite.distributed.strategy.inference.life import ALLOWED, EngineDead, EngineEvent, EngineLife, EngineMemory, EngineState
from roll_lite.distributed.weight_sync.plan import ExportedTensor
from roll_lite.distributed.weight_sync.update import WeightUpdate

WEIGHTS, CACHE = EngineMemory.WEIGHTS, EngineMemory.KV_CACHE
BOTH = (WEIGHTS, CACHE)
S, E = EngineState, EngineEvent

AWAKE = {S.SERVING, S.PAUSED}
AWAY = {S.CACHE_OFFLOADED, S.WEIGHTS_OFFLOADED}

LEADS_TO: dict[EngineState, dict[EngineEvent, set[EngineState]]] = {
    S.STARTING: {E.START: {S.SERVING}, E.DIE: {S.DEAD}},
    S.SERVING: {
        E.PAUSE: {S.PAUSED},
        E.RESUME: {S.SERVING},
        E.CONNECT: {S.SERVING},
        E.BEGIN_UPDATE: {S.SERVING},
        E.RECEIVE: {S.UPDATING},
        E.READ_WEIGHTS: {S.SERVING},
        E.OFFLOAD: AWAY,
        E.LOAD: {S.SERVING},
        E.DIE: {S.DEAD},
    },
    S.PAUSED: {
        E.PAUSE: {S.PAUSED},
        E.RESUME: {S.SERVING},
        E.CONNECT: {S.PAUSED},
        E.BEGIN_UPDATE: {S.PAUSED},
        E.RECEIVE: {S.UPDATING},
        E.READ_WEIGHTS: {S.PAUSED},
        E.OFFLOAD: AWAY,
        E.LOAD: {S.PAUSED},
        E.DIE: {S.DEAD},
    },
    S.UPDATING: {
        E.PAUSE: {S.UPDATING},
        E.RESUME: {S.UPDATING},
        E.RECEIVE: {S.UPDATING},
        E.BREAK_OFF: AWAKE | {S.CACHE_OFFLOADED, S.HALF_UPDATED},
        E.FINISH_UPDATE: AWAKE | {S.CACHE_OFFLOADED},
        E.LOAD: {S.UPDATING},
        E.DIE: {S.DEAD},
    },
    S.HALF_UPDATED: {
        E.PAUSE: {S.HALF_UPDATED},
        E.RESUME: {S.HALF_UPDATED},
        E.CONNECT: {S.HALF_UPDATED},
        E.BEGIN_UPDATE: {S.UPDATING},
        E.RECEIVE: {S.UPDATING},
        E.LOAD: {S.HALF_UPDATED},
        E.DIE: {S.DEAD},
    },
    S.CACHE_OFFLOADED: {
        E.PAUSE: {S.CACHE_OFFLOADED},
        E.RESUME: {S.CACHE_OFFLOADED},
        E.CONNECT: {S.CACHE_OFFLOADED},
        E.BEGIN_UPDATE: {S.CACHE_OFFLOADED},
        E.RECEIVE: {S.UPDATING},
        E.READ_WEIGHTS: {S.CACHE_OFFLOADED},
        E.OFFLOAD: AWAY,
        E.LOAD: AWAKE | {S.CACHE_OFFLOADED},
        E.DIE: {S.DEAD},
    },
    S.WEIGHTS_OFFLOADED: {
        E.PAUSE: {S.WEIGHTS_OFFLOADED},
        E.RESUME: {S.WEIGHTS_OFFLOADED},
        E.CONNECT: {S.WEIGHTS_OFFLOADED},
        E.OFFLOAD: {S.WEIGHTS_OFFLOADED},
        E.LOAD: AWAKE | AWAY,
        E.DIE: {S.DEAD},
    },
    S.DEAD: {E.DIE: {S.DEAD}},
}
"""What each state allows, and where that leads. Where several states may follow, it is the parts that are away and the callers' last word
that decide."""


def update() -> WeightUpdate:
    return WeightUpdate([ExportedTensor("w", (1,), torch.float32, 0, 0)])


def life(*steps: Callable[[EngineLife], Any]) -> EngineLife:
    one = EngineLife("any")
    for step in steps:
        step(one)
    return one


def start(one: EngineLife) -> None:
    one.start()


def announce(one: EngineLife) -> None:
    one.begin_update(update())


def receive(one: EngineLife) -> None:
    announce(one)
    one.receive()


def half_way(one: EngineLife) -> None:
    one.break_off(half_way=True)


def before_the_first(one: EngineLife) -> None:
    one.break_off(half_way=False)


def offload(*parts: EngineMemory) -> Callable[[EngineLife], None]:
    return lambda one: one.offload(parts)


WAYS: dict[EngineState, Callable[[], EngineLife]] = {
    S.STARTING: life,
    S.SERVING: lambda: life(start),
    S.PAUSED: lambda: life(start, EngineLife.pause),
    S.UPDATING: lambda: life(start, receive),
    S.HALF_UPDATED: lambda: life(start, receive, half_way),
    S.CACHE_OFFLOADED: lambda: life(start, offload(CACHE)),
    S.WEIGHTS_OFFLOADED: lambda: life(start, offload(*BOTH)),
    S.DEAD: lambda: life(start, lambda one: one.die("power cut")),
}

DOES: dict[EngineEvent, Callable[[EngineLife], Any]] = {
    E.START: EngineLife.start,
    E.PAUSE: EngineLife.pause,
    E.RESUME: EngineLife.resume,
    E.CONNECT: lambda one: one.require(E.CONNECT),
    E.BEGIN_UPDATE: announce,
    E.RECEIVE: EngineLife.receive,
    E.BREAK_OFF: lambda one: one.break_off(half_way=False),
    E.FINISH_UPDATE: lambda one: one.finish_update(7),
    E.READ_WEIGHTS: lambda one: one.require(E.READ_WEIGHTS),
    E.OFFLOAD: offload(*BOTH),
    E.LOAD: lambda one: one.load(BOTH),
    E.DIE: lambda one: one.die("power cut"),
}


def test_the_table_is_what_it_is_meant_to_be() -> None:
    assert {state: {event for event in EngineEvent if state in ALLOWED[event]} for state in EngineState} == {
        state: set(events) for state, events in LEADS_TO.items()
    }


@pytest.mark.parametrize(("state", "event"), list(itertools.product(EngineState, EngineEvent)), ids=str)
def test_every_event_in_every_state(state: EngineState, event: EngineEvent) -> None:
    one = WAYS[state]()
    assert one.state is state
    if event is E.RECEIVE and one.update is None and event in LEADS_TO[state]:
        announce(one)
    if event in LEADS_TO[state]:
        DOES[event](one)
        assert one.state in LEADS_TO[state][event]
        return
    before = (one.state, one.paused, set(one.away), one.update, one.version, one.failure)
    with pytest.raises(EngineDead if state in (S.STARTING, S.DEAD) and event is not E.START else RuntimeError):
        DOES[event](one)
    assert (one.state, one.paused, set(one.away), one.update, one.version, one.failure) == before


FOLLOWING: list[tuple[str, EngineLife, Callable[[EngineLife], Any], EngineState]] = [
    ("the weights leave alone", life(start), offload(WEIGHTS), S.WEIGHTS_OFFLOADED),
    ("the cache leaves alone", life(start), offload(CACHE), S.CACHE_OFFLOADED),
    ("and the weights follow", life(start, offload(CACHE)), offload(WEIGHTS), S.WEIGHTS_OFFLOADED),
    ("the cache returns first", life(start, offload(*BOTH)), lambda one: one.load([CACHE]), S.WEIGHTS_OFFLOADED),
    ("the weights return first", life(start, offload(*BOTH)), lambda one: one.load([WEIGHTS]), S.CACHE_OFFLOADED),
    ("both return", life(start, offload(*BOTH)), lambda one: one.load(BOTH), S.SERVING),
    ("both return to a paused engine", life(start, EngineLife.pause, offload(*BOTH)), lambda one: one.load(BOTH), S.PAUSED),
    ("paused while they were away", life(start, offload(*BOTH), EngineLife.pause), lambda one: one.load(BOTH), S.PAUSED),
    (
        "resumed while they were away",
        life(start, EngineLife.pause, offload(CACHE), EngineLife.resume),
        lambda one: one.load(BOTH),
        S.SERVING,
    ),
    ("an update ends", life(start, receive), lambda one: one.finish_update(1), S.SERVING),
    ("an update of a paused engine ends", life(start, EngineLife.pause, receive), lambda one: one.finish_update(1), S.PAUSED),
    ("paused in an update", life(start, receive, EngineLife.pause), lambda one: one.finish_update(1), S.PAUSED),
    ("an update ends without the cache", life(start, offload(CACHE), receive), lambda one: one.finish_update(1), S.CACHE_OFFLOADED),
    ("the cache returned meanwhile", life(start, offload(CACHE), receive, lambda o: o.load(BOTH)), lambda o: o.finish_update(1), S.SERVING),
    ("an update breaks off", life(start, receive), before_the_first, S.SERVING),
    ("an update breaks off half-way", life(start, receive), half_way, S.HALF_UPDATED),
    ("another one does too", life(start, receive, half_way, receive), half_way, S.HALF_UPDATED),
    ("another one ends", life(start, receive, half_way, receive), lambda one: one.finish_update(2), S.SERVING),
    ("one of a paused engine breaks off", life(start, EngineLife.pause, receive), before_the_first, S.PAUSED),
    ("one without the cache breaks off", life(start, offload(CACHE), receive), before_the_first, S.CACHE_OFFLOADED),
]


@pytest.mark.parametrize(("one", "step", "state"), [case[1:] for case in FOLLOWING], ids=[case[0] for case in FOLLOWING])
def test_where_several_states_may_follow(one: EngineLife, step: Callable[[EngineLife], Any], state: EngineState) -> None:
    step(one)
    assert one.state is state


@pytest.mark.parametrize(
    ("state", "event", "message"),
    [
        (S.SERVING, E.START, "starts its engine once"),
        (S.DEAD, E.START, "starts its engine once"),
        (S.STARTING, E.RESUME, "any engine: not started"),
        (S.DEAD, E.RESUME, "any engine: power cut"),
        (S.UPDATING, E.BEGIN_UPDATE, "a weight update is under way: finish it first"),
        (S.UPDATING, E.CONNECT, "a weight update is under way: finish it first"),
        (S.UPDATING, E.OFFLOAD, "finish it before anything is offloaded"),
        (S.UPDATING, E.READ_WEIGHTS, "holds parts of two sets of weights"),
        (S.HALF_UPDATED, E.OFFLOAD, "a weight update broke off half-way: the engine waits for another one"),
        (S.HALF_UPDATED, E.READ_WEIGHTS, "a weight update broke off half-way"),
        (S.WEIGHTS_OFFLOADED, E.RECEIVE, "weights are offloaded: load them first"),
        (S.SERVING, E.RECEIVE, "no weight update has begun: begin_weight_update comes first"),
        (S.SERVING, E.FINISH_UPDATE, "no weight update is under way"),
    ],
)
def test_a_refusal_says_what_to_do(state: EngineState, event: EngineEvent, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        DOES[event](WAYS[state]())


def test_versions_change_when_an_update_is_finished_and_not_before() -> None:
    one = life(start, receive)
    assert one.version == 0
    one.finish_update(7)
    assert one.version == 7 and one.update is None and one.state is S.SERVING
