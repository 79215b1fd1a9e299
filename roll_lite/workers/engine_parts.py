"""Engine that spans nodes: InferWorker on the first node, an actor on each further node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import psutil
import ray
from ray.exceptions import RayError

from roll_lite.distributed.failures import MemberLost, cause_of
from roll_lite.distributed.liveness import Heartbeat, StoppedTime, first_of
from roll_lite.distributed.place import Place
from roll_lite.distributed.strategy.base import EngineNode, EngineSpec
from roll_lite.distributed.strategy.build import build_part
from roll_lite.distributed.strategy.inference.processes import EngineProcesses, kill_all
from roll_lite.distributed.worker import AsyncWorker, reserve_port, use_interface_of

WATCH_SECONDS = 0.25
PULSE_SECONDS = 2.0
LAST_SECONDS = 5.0
"""Seconds for an engine's actors on further nodes to shut down before they are killed."""


def own_address() -> str:
    """Return the address at which other nodes reach this one, and make gloo use its interface."""
    address = ray.util.get_node_ip_address()
    use_interface_of(address)
    return address


class EnginePartWorker(AsyncWorker):
    """Part of an engine on a further node. It ends with the InferWorker that created it."""

    lives_alone: ClassVar[bool] = True
    _watching: asyncio.Task[None] | None = None

    def __init__(self, spec: EngineSpec, node: EngineNode) -> None:
        super().__init__()
        self._part = build_part(replace(spec, node=replace(node, address=own_address())))
        self._processes = EngineProcesses()
        self._silence_s = spec.silence_s

    async def start(self) -> None:
        self._part.check_version()
        self._processes.watch(await self._part.start())
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        stopped, cause = StoppedTime(WATCH_SECONDS), None
        while cause is None:
            await asyncio.sleep(WATCH_SECONDS)
            died = None if self._processes.running() else "a process of it died"
            cause = died or stopped.look(self._processes.all, self._silence_s, "limits.engine_silence")
        self.tell_end(MemberLost(cause))

    async def shutdown(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._part.stop(self._processes)


class EngineParts:
    def __init__(self, spec: EngineSpec, options: Sequence[Mapping[str, Any]]) -> None:
        address = own_address()
        self._meeting = reserve_port(address)
        self._options = options
        node = EngineNode(len(options) + 1, 0, address, (address, self._meeting.getsockname()[1]))
        self.spec = replace(spec, node=node)
        self._node = node
        self._actors: list[Any] = []
        self._placed: asyncio.Future[list[Place]] | None = None
        self._start_is_over = threading.Event()
        self.lost: str | None = None
        self.places: tuple[Place, ...] = ()
        """Actors on further nodes; empty until all run."""

    async def place(self) -> None:
        """Create the actors, and wait until they run."""
        self._placed = self._placed or asyncio.gather(*(self._place(number, own) for number, own in enumerate(self._options, start=1)))
        self.places = tuple(await self._placed)

    async def _place(self, number: int, options: Mapping[str, Any]) -> Place:
        actor = ray.remote(EnginePartWorker).options(**options).remote(self.spec, replace(self._node, number=number))
        self._actors.append(actor)
        try:
            place: Place = await actor.place.remote()
        except RayError as error:
            raise RuntimeError(self._lost(number, cause_of(error))) from error
        return place

    async def start(self, engine: Callable[[], Awaitable[None]]) -> None:
        """Start the parts on further nodes together with `engine` (the first node's part), since each waits for the others."""
        try:
            await self.place()
            started = {actor.start.remote(): number for number, actor in enumerate(self._actors, start=1)}
            threading.Thread(target=self._look_after, args=(started,), daemon=True, name="engine-parts").start()
            await engine()
            await asyncio.gather(*started)
        except BaseException as error:
            self._start_is_over.set()
            self.kill()
            if self.lost is not None and isinstance(error, Exception):
                raise RuntimeError(self.lost) from error
            raise
        self._start_is_over.set()

    def _look_after(self, started: Mapping[ray.ObjectRef, int]) -> None:
        """Watch the starting actors. If one dies, kill this node's engine processes, which would wait forever. Runs in a thread: a starting
        engine may block the event loop."""
        pending = list(started)
        while pending and not self._start_is_over.is_set():
            ready, pending = ray.wait(pending, timeout=1.0)
            for reference in ready:
                try:
                    ray.get(reference)
                except RayError as error:
                    if not self._start_is_over.is_set():
                        self.lost = self._lost(started[reference], cause_of(error))
                    while not self._start_is_over.wait(WATCH_SECONDS):
                        kill_all(psutil.Process().children(recursive=True))
                    return

    async def until_lost(self) -> str:
        return await first_of(*(self._until_lost(number, actor) for number, actor in enumerate(self._actors, start=1)))

    async def _until_lost(self, number: int, actor: Any) -> str:
        silent = Heartbeat(actor.place.remote, self.spec.silence_s, PULSE_SECONDS).until_silent()
        try:
            limit_s = await first_of(actor.until_death.remote(), silent)
            cause = f"nothing was heard of its process for {limit_s:g} s (limits.engine_silence)"
        except RayError as error:
            cause = cause_of(error)
        self.lost = self._lost(number, cause)
        return self.lost

    def _lost(self, number: int, cause: str) -> str:
        where = f" ({self.places[number - 1].address})" if self.places else ""
        return f"the engine's part on its node {number}{where}: {cause}"

    async def shutdown(self) -> None:
        asked = [asyncio.ensure_future(actor.shutdown.remote()) for actor in self._actors]
        try:
            if asked:
                await asyncio.wait(asked, timeout=LAST_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
