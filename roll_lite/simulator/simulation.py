"""Simulate the training loop with the real schedulers and router; engines, rewards and trainer only take time."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from roll_lite.data.samples import Sample, SampleGroup, SampleOutcome
from roll_lite.scheduler.domain import DataExhausted, DomainFailed
from roll_lite.scheduler.engines import leaving
from roll_lite.scheduler.filters import FilterFailed, filter_of
from roll_lite.scheduler.router import NoEngineLeft, Router
from roll_lite.scheduler.service import RolloutResult, RolloutService
from roll_lite.scheduler.supply import least_early, pacing_of
from roll_lite.simulator.clock import run_virtual
from roll_lite.simulator.engine import SimulatedEngine, Span
from roll_lite.simulator.scenario import Scenario
from roll_lite.simulator.workload import domains, lengths, uniform

LOOK_S = 1.0
GC_THRESHOLDS = (1_000_000, 50, 1000)


@dataclass(frozen=True)
class SimulatedPhase:
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    end: float
    waited_s: float
    trained_s: float
    tokens: int
    response_tokens: int
    work_s: float
    """Seconds that one engine would take for the step's responses with an always full batch and one prefill per group."""
    samples: int
    groups: dict[str, int]
    staleness: float
    staleness_max: int
    engines: int
    """Engines at the step's end, including those being replaced."""


@dataclass
class SimulatedRun:
    scenario: Scenario
    steps: list[Step] = field(default_factory=list)
    phases: list[SimulatedPhase] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    deaths: list[tuple[float, int]] = field(default_factory=list)
    hangs: list[tuple[float, int]] = field(default_factory=list)
    """Hangs: (second, engine number). These engines die later."""
    failed: int = 0
    put_back: int = 0
    """Requests preempted by a full KV cache."""
    filtered: int = 0
    lost: int = 0
    behind_s: float = 0.0
    """Seconds, summed over domains, that later batches' prompts were held back: a batch or more of samples awaited scores."""
    early: int = 0
    exhausted: bool = False
    error: str = ""

    @property
    def early_end(self) -> str:
        why = self.error or ("no domain has prompts left (data.epochs, simulation.*.prompts)" if self.exhausted else "")
        return why and f"ends after {len(self.steps)} steps of {self.scenario.steps}: {why}"

    @property
    def steady(self) -> list[Step]:
        """Steps after the warm-up. During the warm-up, asynchronous runs deliver mostly short responses."""
        return self.steps[self.warm_up :]

    @property
    def warm_up(self) -> int:
        return min(2 + pacing_of(self.scenario.rollout).supply.max_staleness, len(self.steps) - 1)

    @property
    def step_s(self) -> float:
        first = self.steps[self.warm_up - 1].end if self.warm_up else 0.0
        return (self.steps[-1].end - first) / len(self.steady)

    @property
    def ideal_s(self) -> float:
        """Lower bound of a step: the longer of generation with fully used engines, and training."""
        return max(self.work_s, fmean(step.trained_s for step in self.steady))

    @property
    def work_s(self) -> float:
        return fmean(step.work_s / step.engines for step in self.steady)

    @property
    def utilisation(self) -> float:
        return self.work_s / self.step_s

    @property
    def of_ideal(self) -> float:
        return self.ideal_s / self.step_s

    @property
    def tokens_per_s(self) -> float:
        return fmean(step.response_tokens for step in self.steady) / self.step_s

    @property
    def staleness(self) -> float:
        return fmean(step.staleness for step in self.steady)

    @property
    def staleness_max(self) -> int:
        return max(step.staleness_max for step in self.steady)

    @property
    def shares(self) -> dict[str, float]:
        total = sum(sum(step.groups.values()) for step in self.steps)
        return {name: sum(step.groups.get(name, 0) for step in self.steps) / total for name in self.steps[0].groups}


def simulate(scenario: Scenario, spans: bool = False) -> SimulatedRun:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        return run_virtual(_Simulation(scenario, spans).run())
    finally:
        gc.set_threshold(*before)


def accepted(group: SampleGroup) -> list[Sample]:
    return [sample for sample in group.samples if sample.outcome is SampleOutcome.ACCEPTED]


def tokens_of(group: SampleGroup) -> int:
    return sum(sample.transcript.prompt_length + sample.transcript.response_length for sample in accepted(group))


class _Simulation:
    def __init__(self, scenario: Scenario, spans: bool) -> None:
        self.scenario = scenario
        self.outcome = SimulatedRun(scenario)
        self.keep_spans = spans
        self.version = 0
        self.engines: dict[int, SimulatedEngine] = {}
        self.gone: list[SimulatedEngine] = []
        self.present = scenario.engines
        self.draining: set[str] = set()
        self.leaving: set[int] = set()
        self.slots = scenario.mean_slots
        self.early: dict[int, int] = {}
        self.passing_until = 0.0
        self.given_up = asyncio.Event()

    async def run(self) -> SimulatedRun:
        scenario, rollout = self.scenario, self.scenario.rollout
        self.clock = asyncio.get_running_loop().time
        self.length = lengths(scenario.domains, scenario.seed)
        self.tasks: set[asyncio.Task[None]] = set()
        self.node_of: dict[int, int] = {}
        per_node = scenario.failures.engines_per_node
        first = [self.start_engine(number, number // per_node) for number in range(scenario.engines)]
        nodes = 1 + max(self.node_of.values())
        limits = scenario.limits.slots, rollout.max_tokens_per_engine
        self.router = Router(first, rollout.request_timeout_s, scenario.deterministic, *limits)
        self.service = RolloutService(
            domains(scenario.domains, scenario.seed, filter_of(rollout.filter)),
            self.router,
            rollout.retries,
            pacing=pacing_of(rollout, engines_rest=scenario.offload_s is not None),
        )
        for number, at in enumerate(sorted(scenario.joining)):
            self.later(self.join(at, nodes + number // per_node))
        for at, node in scenario.leaving:
            self.later(self.drain(at, node))
        try:
            for _ in range(scenario.steps):
                await self.step()
        except DataExhausted:
            self.outcome.exhausted = True
        except (DomainFailed, NoEngineLeft, FilterFailed) as error:
            self.outcome.error = str(error)
        finally:
            await self.close()
        return self.outcome

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.service.close()
        for _ in range(3):
            await asyncio.sleep(0)
        for engine in [*self.engines.values(), *self.gone]:
            engine.kill("the simulation is over")
            self.outcome.put_back += engine.put_back

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self.clock()
        yield
        self.outcome.phases.append(SimulatedPhase(name, start, self.clock()))

    # ------------------------------------------------------------ the verbs of a step

    async def step(self) -> None:
        if self.scenario.offload_s is not None:
            with self.phase("move"):
                await asyncio.sleep(self.scenario.offload_s)
        await self.sync_weights()
        asked = self.clock()
        looking = asyncio.ensure_future(self.pass_early())
        try:
            result = await self.service.next_batch(self.scenario.rollout.prompts_per_step)
        finally:
            looking.cancel()
        ready = self.clock()
        with self.phase("train"):
            await self.train(result)
        self.record(result, ready - asked, self.clock() - ready)

    async def pass_early(self) -> None:
        """Simulate pipeline/early_passes.py: log-probs of finished groups that will be in the batch, computed during generation, one pass
        at a time."""
        least = least_early(self.scenario.rollout.prompts_per_step)
        while self.scenario.rollout.stream_log_probs:
            groups = [group for group in self.service.finished() if group.group not in self.early]
            if len(groups) >= least:
                self.early |= {group.group: tokens_of(group) for group in groups}
                seconds = self.scenario.trainer.pass_seconds(sum(map(tokens_of, groups)))
                self.passing_until = self.clock() + seconds
                await asyncio.sleep(seconds)
            else:
                await asyncio.sleep(LOOK_S)

    async def train(self, result: RolloutResult) -> None:
        await asyncio.sleep(max(0.0, self.passing_until - self.clock()))
        early = [group for group in result.groups if group.group in self.early]
        self.outcome.early += sum(len(accepted(group)) for group in early)
        await asyncio.sleep(self.scenario.trainer.seconds(sum(map(tokens_of, result.groups)), sum(map(tokens_of, early))))
        self.early = {}
        self.version += 1

    async def sync_weights(self) -> None:
        if self.version:
            with self.phase("hold"):
                await self.service.hold()
            with self.phase("sync"):
                for engine in self.engines.values():
                    engine.freeze()
                await asyncio.sleep(self.scenario.trainer.sync_s)
                while any(engine.hangs for engine in self.engines.values()):  # it cannot receive weights; wait until it is dead
                    self.given_up.clear()
                    await self.given_up.wait()
                for engine in self.engines.values():
                    engine.update(self.version)
        self.service.set_version(self.version)

    def record(self, result: RolloutResult, waited_s: float, trained_s: float) -> None:
        version = result.stats.version
        samples = [sample for group in result.groups for sample in accepted(group)]
        staleness = [version - min(span.version for span in sample.transcript.versions) for sample in samples]
        groups = dict.fromkeys((model.name for model in self.scenario.domains), 0)
        work = 0.0
        for group in result.groups:
            groups[group.domain] += 1
            for place, sample in enumerate(group.samples):
                transcript = sample.transcript
                prompt = transcript.prompt_length
                # At best, the prompt is prefilled only once for all samples of a group.
                work += self.scenario.rates.work(prompt, transcript.policy_tokens, self.slots, 1 if place else prompt)
        for domain in result.stats.domains.values():
            self.outcome.failed += domain.failed
            self.outcome.lost += domain.lost_groups
            self.outcome.filtered += sum(domain.filtered.values())
            self.outcome.behind_s += domain.behind_s
        self.outcome.steps.append(
            Step(
                end=self.clock(),
                waited_s=waited_s,
                trained_s=trained_s,
                tokens=sum(map(tokens_of, result.groups)),
                response_tokens=sum(sample.transcript.policy_tokens for sample in samples),
                work_s=work,
                samples=len(samples),
                groups=groups,
                staleness=fmean(staleness) if staleness else 0.0,
                staleness_max=max(staleness, default=0),
                engines=self.present,
            )
        )

    # ------------------------------------------------------------ engines that come and go

    def start_engine(self, number: int, node: int) -> SimulatedEngine:
        scenario = self.scenario
        if (mean_s := scenario.failures.mean_node_s) is not None and node not in self.node_of.values():
            self.later(self.fail_node(node, mean_s))
        self.node_of[number] = node
        engine = SimulatedEngine(number, scenario.rates, scenario.limits, self.length, self.outcome.spans if self.keep_spans else None)
        engine.update(self.version)
        self.engines[number] = engine
        failures = scenario.failures
        for hangs in (False, True):  # its first failure and its first hang, planned or random
            what, given, mean_s = ("hang", failures.hangs, failures.mean_hang_s) if hangs else ("failure", failures.given, failures.mean_s)
            times = [at for at, failing in given if failing == number]
            if mean_s is not None:
                times.append(self.clock() - mean_s * math.log(uniform(scenario.seed, what, number)))
            if times:
                self.later(self.fail(min(times), number, hangs))
        return engine

    def later(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(change)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def join(self, at: float, node: int, is_new: bool = True) -> None:
        await asyncio.sleep(at - self.clock())
        self.router.add(self.start_engine(len(self.engines) + len(self.gone), node))
        self.present += is_new
        self.follow_drains()

    async def drain(self, at: float, node: int) -> None:
        await asyncio.sleep(at - self.clock())
        self.draining.add(str(node))
        self.follow_drains()

    def follow_drains(self) -> None:
        nodes = {engine: {str(self.node_of[engine])} for engine in self.engines if engine not in self.leaving}
        for engine in leaving(nodes, self.draining):
            self.leaving.add(engine)
            self.later(self.leave(engine, self.engines[engine].name))

    async def leave(self, number: int, name: str) -> None:
        await self.router.drain(name, interrupt=True)
        if number in self.engines:
            self.gone.append(self.engines.pop(number))
            self.present -= 1

    async def fail(self, at: float, number: int, hangs: bool) -> None:
        await asyncio.sleep(at - self.clock())
        if hangs and number in self.engines:
            self.engines[number].hang()
            self.outcome.hangs.append((self.clock(), number))
            await asyncio.sleep(self.scenario.failures.hang_s)
        if number not in self.engines:
            return
        engine = self.engines.pop(number)
        engine.kill("simulated failure")
        self.given_up.set()
        self.gone.append(engine)
        self.outcome.deaths.append((self.clock(), number))
        if self.scenario.failures.start_s is not None:
            await self.join(self.clock() + self.scenario.failures.start_s, self.node_of[number], is_new=False)

    async def fail_node(self, node: int, mean_s: float) -> None:
        for time in itertools.count():
            await asyncio.sleep(-mean_s * math.log(uniform(self.scenario.seed, "node failure", node, time)))
            for number in [number for number in self.engines if self.node_of[number] == node]:
                self.later(self.fail(self.clock(), number, hangs=False))
