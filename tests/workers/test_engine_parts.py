"""Whose fault it is that an engine that spans nodes does not start, and what becomes of its parts. Actors are stand-ins; real ones, on two
nodes: tests/distributed/test_spanning_engines.py."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError

from roll_lite.config.schema.models import ModelConfig, VllmStrategyConfig
from roll_lite.distributed.failures import MemberLost
from roll_lite.distributed.place import Place
from roll_lite.distributed.strategy.base import EngineNode, EngineSpec
from roll_lite.distributed.strategy.inference.processes import EngineProcesses
from roll_lite.workers import engine_parts
from roll_lite.workers.engine_parts import EngineParts, EnginePartWorker

SPEC = EngineSpec(ModelConfig(path=Path("model")), VllmStrategyConfig(tensor_parallel=4), 64)
PLACE = Place("its node", 1, "10.0.0.2")


@pytest.fixture(autouse=True)
def until_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The thread beside the event loop must not meet the real Ray."""
    yield
    for thread in threading.enumerate():
        if thread.name == "engine-parts":
            thread.join(30)


class Answer:
    """A reference to the answer of an actor."""

    def __init__(self, error: RayError | None = None, never: bool = False) -> None:
        self.error, self.never, self.gate = error, never, asyncio.Event()
        if not never:
            self.gate.set()

    def __await__(self) -> Generator[Any, None, Place]:
        yield from self.gate.wait().__await__()
        if self.error is not None:
            raise self.error
        return PLACE


async def nothing() -> None:
    pass


class Rays:
    """What of Ray the parts use; the actor of node 1 answers as it is told to."""

    def __init__(self, started: Answer, death: Answer) -> None:
        self.answers = [(started, death), (Answer(), Answer(never=True))]
        self.placed = Answer()
        self.made: list[tuple[dict[str, Any], EngineNode]] = []
        self.killed: list[Any] = []

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda spec, node: self.make(options, node)))

    def make(self, options: dict[str, Any], node: EngineNode) -> Any:
        started, death = self.answers[len(self.made)]
        self.made.append((options, node))
        answers = {"place": self.placed, "start": started, "until_death": death}
        return SimpleNamespace(**{name: SimpleNamespace(remote=lambda answer=answer: answer) for name, answer in answers.items()})

    def wait(self, pending: Sequence[Answer], timeout: float) -> tuple[list[Answer], list[Answer]]:
        time.sleep(0.01)
        return [one for one in pending if not one.never], [one for one in pending if one.never]

    def get(self, answer: Answer) -> None:
        if answer.error is not None:
            raise answer.error

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


def parts_of(monkeypatch: pytest.MonkeyPatch, started: Answer, death: Answer | None = None) -> tuple[EngineParts, Rays]:
    rays = Rays(started, death or Answer(never=True))
    monkeypatch.setattr(engine_parts, "ray", SimpleNamespace(**{name: getattr(rays, name) for name in ("remote", "wait", "get", "kill")}))
    monkeypatch.setattr(engine_parts, "own_address", lambda: "127.0.0.1")
    return EngineParts(SPEC, [{"num_cpus": 1}, {"num_cpus": 2}]), rays


async def test_every_further_node_has_an_actor_that_knows_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, rays = parts_of(monkeypatch, Answer())
    await parts.start(nothing)
    first = parts.spec.node
    assert first is not None and (first.nodes, first.number, first.address) == (3, 0, "127.0.0.1")
    assert [(options["num_cpus"], node.number) for options, node in rays.made] == [(1, 1), (2, 2)]
    assert all(node.meeting == first.meeting for _, node in rays.made)
    assert parts.places == (PLACE, PLACE)
    parts.kill()
    assert len(rays.killed) == 2


async def test_an_engine_that_waits_for_a_part_that_is_gone_is_ended_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, rays = parts_of(monkeypatch, Answer(RayError("no memory")))
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(engine_parts, "kill_all", lambda _: loop.call_soon_threadsafe(ended.set))

    async def engine() -> None:
        await ended.wait()
        raise ValueError("the engine's process ended while it started")

    with pytest.raises(RuntimeError, match=r"the engine's part on its node 1 \(10\.0\.0\.2\): RayError: no memory"):
        await asyncio.wait_for(parts.start(engine), 30)
    assert len(rays.killed) == 2


async def test_an_engine_that_fails_by_itself_takes_its_parts_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, rays = parts_of(monkeypatch, Answer(never=True))

    async def engine() -> None:
        raise ValueError("kv_cache_mb is too little")

    with pytest.raises(ValueError, match="kv_cache_mb is too little"):
        await parts.start(engine)
    assert len(rays.killed) == 2


async def test_an_engine_starts_once_all_its_nodes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, rays = parts_of(monkeypatch, Answer())
    gate, begun = asyncio.Event(), []
    rays.placed.gate = gate
    placing = asyncio.create_task(parts.place())
    starting = asyncio.create_task(parts.start(lambda: asyncio.sleep(0, begun.append(True))))
    await asyncio.sleep(0.05)
    assert (len(rays.made), parts.places, begun, placing.done()) == (2, (), [], False)
    gate.set()
    await asyncio.wait_for(asyncio.gather(placing, starting), 30)
    assert (len(rays.made), parts.places, begun) == (2, (PLACE, PLACE), [True])


async def test_an_actor_that_cannot_start_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, rays = parts_of(monkeypatch, Answer())
    rays.placed.error = RayError("no memory")
    with pytest.raises(RuntimeError, match="the engine's part on its node 1: RayError: no memory"):
        await parts.start(nothing)
    assert len(rays.killed) == 2


async def test_the_loss_of_a_part_has_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Answer(RayActorError(error_msg="its node died"))
    parts, _ = parts_of(monkeypatch, Answer(), lost)
    await parts.start(nothing)
    assert await parts.until_lost() == parts.lost
    assert parts.lost == "the engine's part on its node 1 (10.0.0.2): its process died: its node died"


async def test_a_part_of_which_nothing_is_heard_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node is cut off, or its process is stopped: Ray notices the one after a minute, the other never."""
    parts, rays = parts_of(monkeypatch, Answer())
    parts.spec = replace(parts.spec, silence_s=0.3)
    await parts.start(nothing)
    rays.placed.gate.clear()
    cause = await asyncio.wait_for(parts.until_lost(), 30)
    assert re.fullmatch(r"the engine's part on its node \d \(10\.0\.0\.2\): nothing was heard of its process for 0\.3 s .*", cause)


async def test_a_stopped_process_ends_its_part() -> None:
    worker = EnginePartWorker.__new__(EnginePartWorker)
    worker._end, worker._has_ended, worker._silence_s = None, asyncio.Event(), 0.3
    with subprocess.Popen(["sleep", "100"]) as process:  # noqa: ASYNC220
        worker._processes = EngineProcesses()
        worker._processes.watch([process.pid])
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.wait_for(worker._watch(), 30)
        finally:
            process.kill()
    with pytest.raises(MemberLost, match=r"its process \d+ \(sleep\) has been stopped, as by SIGSTOP, for 0\.3 s"):
        await worker.until_death()
