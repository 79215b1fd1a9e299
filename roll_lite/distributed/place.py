from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple

import psutil
import ray
from ray._private.state import actors
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_lite.distributed.fleet import until_silent
from roll_lite.distributed.liveness import first_of, is_stopped, status_of


class Place(NamedTuple):
    node: str
    pid: int
    address: str = ""
    further: tuple[Place, ...] = ()
    """Actors on further nodes of an engine that spans nodes."""

    @property
    def nodes(self) -> set[str]:
        return {self.node, *(part.node for part in self.further)}

    @staticmethod
    def here() -> Place:
        return Place(ray.get_runtime_context().get_node_id(), os.getpid(), ray.util.get_node_ip_address())

    @property
    def process(self) -> psutil.Process | None:
        if not ray.is_initialized() or self.node != ray.get_runtime_context().get_node_id():
            return None
        try:
            return psutil.Process(self.pid)
        except psutil.Error:
            return None

    def describe(self) -> str:
        process = self.process
        if process is None:
            return f"its process {self.pid} cannot be looked at from this node"
        status = status_of(process)
        if status == psutil.STATUS_STOPPED:
            return f"its process {self.pid} is stopped, as by SIGSTOP, and can say nothing"
        if status == psutil.STATUS_DISK_SLEEP:
            return f"its process {self.pid} waits in the kernel for a disk or a device"
        return f"its process {self.pid} is {status}, and gives no answer"


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def node_addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def where(places: Iterable[Place | None]) -> str:
    """Return " on ADDRESS, ..."; "" if unknown or the cluster has one node."""
    addresses = sorted({place.address for place in places if place is not None and place.address})
    return f" on {', '.join(addresses)}" if addresses and len(ray.nodes()) > 1 else ""


def stopped_at(places: Iterable[Place | None]) -> list[psutil.Process]:
    """Return processes at `places`, and their children, that are on this node and stopped (SIGSTOP)."""
    found = []
    for process in (process for place in places if place is not None and (process := place.process) is not None):
        try:
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
        found += [member for member in family if member.pid != os.getpid() and is_stopped(member)]
    return found


def kill_actors(actors: Iterable[Any], places: Iterable[Place | None], no_restart: bool = True) -> None:
    """Kill actors. Stopped processes (SIGSTOP) ignore ray.kill: on this node they are killed directly."""
    for actor in actors:
        ray.kill(actor, no_restart=no_restart)
    for process in stopped_at(places):
        try:
            process.kill()
        except psutil.Error:
            continue


LOOK_SECONDS = 2.0
STOPPED_LOOKS, STOPPED_LOOK_SECONDS = 40, 0.2
"""Polls in a row that must find a process stopped; a slow one runs at some poll."""
MEMBER_ROLES = {"RewardWorker": "rewards", "EnvironmentWorker": "environments"}


def member_places() -> list[tuple[str, int, Place]]:
    """Return (role, number, place) of the run's living reward and environment workers, oldest first."""
    if not ray.is_initialized():
        return []
    job = ray.get_runtime_context().worker.current_job_id
    living = actors(job_id=job, actor_state_name="ALIVE").values()
    numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
    found = []
    for actor in sorted(living, key=lambda actor: actor["StartTime"]):
        role, where = MEMBER_ROLES.get(actor["ActorClassName"]), actor["Address"]
        if role is not None:
            found.append((role, next(numbers[role]), Place(where["NodeID"], actor["Pid"], where["IPAddress"])))
    return found


class ActorMember(ABC):
    """Fleet member: one actor without devices, with methods `prepare` and `place`."""

    nodes: ClassVar[Sequence[str]] = ()
    """Nodes where members start, in turn; empty: Ray chooses."""
    _started: ClassVar[Iterator[int]] = count()

    def __init__(self, name: str, actor_class: type, *arguments: Any) -> None:
        self.actor: Any = None
        self.name = self._name = name
        self._actor_class, self._arguments = actor_class, arguments
        self._place: Place | None = None

    @property
    @abstractmethod
    def is_busy(self) -> bool: ...

    async def prepare(self) -> Any:
        self._place, self.name = None, self._name
        chosen = NodeAffinitySchedulingStrategy(self.nodes[next(self._started) % len(self.nodes)], soft=True) if self.nodes else None
        self.actor = ray.remote(self._actor_class).options(num_cpus=0, scheduling_strategy=chosen).remote(*self._arguments)
        try:
            prepared = await self.actor.prepare.remote()
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from None
        self._place = await self.actor.place.remote()
        self.name += where([self._place])
        return prepared

    async def until_lost(self) -> str:
        silent = until_silent(lambda: self.actor.place.remote(), lambda: self.is_busy)
        return f"{self.name}: {await first_of(silent, self._until_stopped())}"

    async def _until_stopped(self) -> str:
        """Wait until the process, if on this node, is stopped (SIGSTOP). Heartbeats do not cover busy members."""
        looks = 0
        while looks < STOPPED_LOOKS:
            await asyncio.sleep(STOPPED_LOOK_SECONDS if looks else LOOK_SECONDS)
            process = None if self._place is None else self._place.process
            looks = looks + 1 if process is not None and is_stopped(process) else 0
        return "its process is stopped, as by SIGSTOP"

    def kill(self) -> None:
        kill_actors([] if self.actor is None else [self.actor], [self._place])
