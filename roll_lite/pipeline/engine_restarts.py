"""Start engines during the run: replacements of lost engines, and further engines (`actor_infer.most_replicas`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import remove_placement_group

from roll_lite.distributed.cluster import Cluster
from roll_lite.distributed.failures import BUDGET_SECONDS, MemberLost, RankFailed, RestartBudget, cause_of, failure_text
from roll_lite.distributed.pending import located, pause
from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import Slot, draining_nodes
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.pipeline.clusters import Engines
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.nodes import LaterNodes
from roll_lite.scheduler.engines import leaving
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.rollout import RolloutWorker

DRAIN_SECONDS = 3.0
"""Seconds between queries for draining nodes."""


@dataclass
class _Start:
    """Engine that is starting. `calls`: Ray calls of `until_placed`, `initialize` and, for nodes new to the run, `LaterNodes.compare`."""

    calls: list[ray.ObjectRef]
    place: Place | None = None
    """Node and process; None until the engine has started."""
    since: float | None = None
    """Time at which its processes on all nodes were first seen to run; None while it may wait for devices."""


@dataclass(frozen=True)
class JoiningEngines:
    """Devices of engines that join during the run. `new_slot`: reserves devices; the engine waits until they are free."""

    slots: list[Slot]
    new_slot: Callable[[], Slot]


class EngineRestarts:
    def __init__(
        self,
        engines: Engines,
        rollouts: Cluster[RolloutWorker],
        restarts: int,
        journal: Journal,
        later_nodes: LaterNodes,
        joining: JoiningEngines | None = None,
        follows_drains: bool = False,
        start_s: float | None = None,
    ) -> None:
        """`restarts`: maximum per engine within BUDGET_SECONDS. `start_s`: seconds for a start; None: unlimited. `follows_drains`: restart
        engines of draining nodes elsewhere."""
        self.replicas = engines.replicas
        self._engines = engines
        self._rollouts = rollouts
        self._restarts = restarts
        self._journal = journal
        self._later_nodes = later_nodes
        self._group = engines.replicas.group
        self._starts: dict[int, _Start] = {}
        self._newcomers: list[int] = []
        self._joining = joining
        self._follows_drains = follows_drains
        self._start_s = start_s
        self._waiting = set(range(self._group.initial_ranks, self.replicas.world_size))
        """Engines waiting for devices; not reported as lost."""
        self._rests_until: dict[int, float] = {}
        """{engine: time of its next try}, for engines that joined during the run and used up their restarts."""
        self._asked = 0.0
        self._leaving: dict[int, ray.ObjectRef] = {}
        self._lost_at: dict[int, float] = {}
        self._budget = RestartBudget()

    def begin(self) -> None:
        """Start replacing lost engines. Earlier losses end the run."""
        if self._restarts:
            self._group.replaceable = set(range(self.replicas.world_size))
            for engine in self._waiting:
                self._start(engine, self.replicas.actors[engine])
            if not self._engines.offloads:
                WATCH.errands["engines"] = self.tend

    def end(self) -> None:
        WATCH.errands.pop("engines", None)

    @property
    def newcomers(self) -> list[int]:
        """Living engines without the current weights; they do not serve yet."""
        lost = self._group.lost
        self._newcomers = [engine for engine in self._newcomers if engine not in lost]
        return self._newcomers

    @property
    def absent(self) -> dict[int, str]:
        """{engine: reason} for engines that must not get requests: lost or newcomers."""
        return {**self._group.lost, **dict.fromkeys(self.newcomers, "its successor lacks the current weights")}

    def service_restarted(self) -> None:
        for engine, cause in dict(self._group.lost).items():  # another may be lost meanwhile
            if engine not in self._group.replaceable:
                self._rollouts.one(RolloutWorker.engine_given_up, engine, cause)

    def tell_losses(self) -> None:
        """Report each lost engine once, with the rollout service's cause or the driver's."""
        lost = {engine: cause for engine, cause in self.replicas.lost.items() if engine not in self._waiting}
        if not self._journal.knows_lost(lost):
            told = self._rollouts.one(RolloutWorker.lost_engines)
            lost |= {engine: cause for engine, cause in told.items() if engine not in self._waiting}
            self._journal.engines_lost(lost, self.replicas.world_size - len(self._waiting))

    def tend(self) -> None:
        """Start replacements, note which have started, move engines off draining nodes. Non-blocking."""
        if self._follows_drains:
            self._follow_drains()
        for engine, cause in self._group.lost.items():
            if engine not in self._group.replaceable:
                continue
            self._lost_at.setdefault(engine, time.monotonic())
            if (rests_until := self._rests_until.get(engine)) is not None:
                if time.monotonic() >= rests_until:
                    del self._rests_until[engine]
                    self._restart_where_free(engine)
                continue
            start = self._starts.get(engine)
            failure = None if start is None else self._failure(engine, start)
            if failure is not None or (start is None and not self._starts_beside(engine)):
                self._restart(engine, failure or cause)

    def may_serve(self) -> bool:
        """Call `tend`. True if started replacements may get weights and serve; with `offload: true`, only while no other engine lives."""
        self.tend()
        ready = any(start.place is not None for start in self._starts.values())
        return ready and (not self._engines.offloads or not self.replicas.left)

    def take(self, parts: Sequence[EngineMemory]) -> None:
        """Admit started replacements as `newcomers`. With `offload: true`, offload `parts`."""
        self.tell_losses()
        for engine, place in [(engine, start.place) for engine, start in self._starts.items() if start.place is not None]:
            del self._starts[engine]
            self._group.regain(engine, place)
            self._later_nodes.known[self._group.name] |= place.nodes
            self._newcomers.append(engine)
            if self._engines.offloads:
                self.replicas.start_each_own(InferWorker.offload, {engine: parts}).result()

    def living(self, parts: Sequence[EngineMemory]) -> list[int]:
        """Admit started replacements (`take`) and return the living engines; if none lives, wait for a replacement."""
        self.take(parts)
        if not self.replicas.left:
            self._journal.console.message("no engine is left; the run waits until one has devices and has started")
        with WATCHDOG.suspended():  # a weight update may wait here; limits.start limits the start on devices
            while not (left := self.replicas.left):
                self.tend()
                pause(self._group, next(iter(self._starts), 0), "the start of its successor")
                self.take(parts)
        return left

    def settle(self) -> None:
        """Wait for replacements starting on shared devices, and offload them before other roles load."""
        while self._engines.offloads and any(start.place is None for start in self._starts.values()):
            pause(self._group, next(iter(self._starts)), "the start of its successor")
            self.tend()
        if self._engines.offloads:
            self.take(tuple(EngineMemory))

    def hand_over(self, version: int | None) -> None:
        """Let the `newcomers` serve: they have the weights of `version` (None in a run that does not train)."""
        for engine in list(self.newcomers):
            self._rollouts.one(RolloutWorker.engine_restarted, engine, self.replicas.actors[engine])
            self._newcomers.remove(engine)
            seconds = time.monotonic() - self._lost_at.pop(engine)
            if engine in self._waiting:
                self._waiting.remove(engine)
                self._journal.engine_joined(engine, len(self.replicas.left), version)
            else:
                self._journal.engine_restarted(engine, seconds, version)

    def _failure(self, engine: int, start: _Start) -> str | None:
        """Return why the engine failed to start, took too long or died, if so. Sets `start.place` once it has started."""
        calls = [self._group.death_of(engine), *start.calls]
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
        try:
            answers = ray.get(ready)
        except Exception as error:  # a process edge: it becomes the cause
            return cause_of(error)
        if start.calls[0] not in ready:
            return None
        place: Place = answers[0]
        if start.since is None:
            start.since = WATCHDOG.time()
            start.calls += self._later_nodes.compare(self._group.name, place.nodes)
        if len(answers) == len(start.calls):
            start.place = place
        elif self._start_s and WATCHDOG.time() - start.since > self._start_s:
            return f"it did not start within {self._start_s:g} s (limits.start)"
        return None

    def _restart(self, engine: int, cause: str) -> None:
        self._starts.pop(engine, None)
        if self._budget.allows(engine, self._restarts):
            self._start(engine, self._group.restart(engine))
            return
        name = f"actor_infer[{engine}]{WATCH.where('actor_infer', engine)}"
        why = f"{cause.splitlines()[0]} (after {self._restarts} restarts within an hour, actor_infer.restarts)"
        if (joining := self._joining_of(engine)) is not None:
            # Ray ends its process: the node may be at fault, and other engines may need the devices.
            remove_placement_group(joining.slots[engine].reserved)
            self._waiting.add(engine)
            self._rests_until[engine] = time.monotonic() + BUDGET_SECONDS
            self._journal.console.message(f"{name} is tried again in an hour: {why}")
        else:
            self._group.replaceable.discard(engine)
            ray.kill(self.replicas.actors[engine])  # it may hang and hold its devices
            self._journal.console.message(f"{name} is not started again: {why}")
            self._rollouts.actors[0].engine_given_up.remote(engine, why)

    def _joining_of(self, engine: int) -> JoiningEngines | None:
        return self._joining if engine >= self._group.initial_ranks else None

    def _start(self, engine: int, actor: Any) -> None:
        turns = self._engines.turns
        self._starts[engine] = _Start([actor.until_placed.remote(), actor.initialize.remote(engine % turns, turns, False)])

    def _starts_beside(self, engine: int) -> bool:
        """Return True while another engine starts on the same GPU."""
        turns = self._engines.turns
        return any(other // turns == engine // turns and start.place is None for other, start in self._starts.items())

    def _follow_drains(self) -> None:
        places = {engine: pulse.place for engine, pulse in self._group.living_pulses() if pulse.place is not None}
        serving = {engine: own.nodes for engine, own in places.items() if engine not in self._newcomers and engine not in self._leaving}
        if time.monotonic() - self._asked >= DRAIN_SECONDS:
            self._asked = time.monotonic()
            for engine in leaving(serving, draining_nodes()):
                self._leaving[engine] = self._rollouts.actors[0].engine_leaves.remote(engine)
        for engine in [engine for engine, call in self._leaving.items() if ray.wait([call], timeout=0)[0]]:
            try:
                ray.get(self._leaving.pop(engine))
            except RayActorError:  # the rollout service is gone; its successor is asked
                continue
            except RayError as error:
                raise located(RankFailed("rollouts", 0, "engine_leaves", failure_text(error, None))) from error
            if engine not in self._group.lost:
                self._group.lose(engine, MemberLost("its node leaves the cluster"))
                self._waiting.add(engine)
                self._journal.engine_left(engine, len(self.replicas.left))
                self._group.pulses[engine].place = None
                self._restart_where_free(engine)

    def _restart_where_free(self, engine: int) -> None:
        """Restart an engine; one that joined during the run waits for free devices on any node."""
        if (joining := self._joining_of(engine)) is not None:
            remove_placement_group(joining.slots[engine].reserved)
            joining.slots[engine] = joining.new_slot()
        self._start(engine, self._group.restart(engine))
