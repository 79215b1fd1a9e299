"""The rollout service under schedules that nobody thought of: engines come, hang and go, weights come, requests, rewards and groups fail,
runs stop and go on, in whatever order hypothesis makes up. After each event the service must be where the model beside it is."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedule_model import DomainPlan, House, Model, Remembered
from scheduler_support import Prompts, TimedReward, counts_of, keep_stats, make_domain, schedulers_of
from support_local_engine import LocalEngine
from support_scripted import Response, ScriptedEngine

from roll_lite.data.samples import (
    TURN,
    FinishReason,
    Prompt,
    RewardInput,
    Sample,
    SampleGroup,
    SampleId,
    SampleOutcome,
    Sampling,
    Score,
)
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.domain import DataExhausted, DomainFailed
from roll_lite.scheduler.filters import FUNCTION, GroupFilter, LeftOut
from roll_lite.scheduler.router import NoEngineLeft, Router
from roll_lite.scheduler.runner import Conversation, EpisodeFailed, SampleRunner, one_response
from roll_lite.scheduler.service import RolloutService
from roll_lite.scheduler.supply import Asynchronous, OneStepOff, OnSync, Pacing, Synchronous
from roll_lite.simulator.clock import VirtualClockLoop

TIMEOUT_S = 60.0
UPDATE_S = 2.0
MOMENT_S = 1e-3
LONG_S = 2e4
"""Whatever takes longer hangs."""


class FragileEngine(ScriptedEngine):
    """It may stand still, and then answers nothing, aborts neither."""

    def __init__(self, slots: int) -> None:
        super().__init__(lambda request: Response(length_of(request.request_id), 0.1, text=request.request_id), slots)
        self._goes = asyncio.Event()
        self._goes.set()

    @property
    def hangs(self) -> bool:
        return not self._goes.is_set() and self.life.failure is None

    @property
    def healthy(self) -> bool:
        return self._goes.is_set() and self.life.failure is None

    @property
    def holds(self) -> int:
        return len(self._running) + len(self._waiting)

    def hang(self) -> None:
        self._goes.clear()
        self._freeze_all()

    def wake(self) -> None:
        self._goes.set()
        self._go_on()

    def fail_one(self, place: int) -> None:
        runs = list(self._running.values())
        if runs:
            run = runs[place % len(runs)]
            self._freeze(run)
            self._end(run, 0, FinishReason.ABORT, error="out of cache")
            self._admit()

    def _admit(self) -> None:
        if self._goes.is_set():
            super()._admit()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._goes.wait()
        await super().abort(request_ids)

    async def update(self, version: int) -> None:
        await self.begin_weight_update([])
        await self.receive_bucket([])
        await asyncio.sleep(UPDATE_S)
        if self.healthy:
            await self.finish_weight_update(version)


def length_of(request_id: str) -> int:
    """Long-tailed, by the sample and its attempt."""
    draw = stable_hash("length", request_id.partition("~")[0]) % 1000 / 1000
    return min(100, int(4 / (1.001 - draw)))


def policy_tokens(sample: Sample, turns: int) -> int:
    request = sample.id.request_id()
    return sum(length_of(request if turn == 0 else f"{request}{TURN}{turn}") for turn in range(turns))


def sample_of(request_id: str) -> str:
    """Without its attempts, continuations and turns."""
    return "/".join(request_id.partition("~")[0].split("/")[:5])


class Judge(TimedReward):
    """Fails as often as it is told to."""

    def __init__(self) -> None:
        super().__init__(0.5, lambda item, asked: self.fail_next())
        self.to_fail = 0
        self.under_way: list[str] = []
        """Samples."""

    def fail_next(self) -> bool:
        fails = self.to_fail > 0
        self.to_fail -= fails
        return fails

    async def score(self, item: RewardInput) -> Score:
        self.under_way.append(sample_of(item.response))
        try:
            return await super().score(item)
        finally:
            self.under_way.remove(sample_of(item.response))


class Environment:
    """Plays episodes; fails as often as it is told to, by its own fault or by a neighbour's."""

    def __init__(self, turns: int, branches: bool) -> None:
        """`branches`: ask twice more after the first response, at the same time, as an agent may."""
        self.turns = turns
        self.branches = branches
        self.to_fail = 0
        self.under_way: list[str] = []
        """Samples."""

    async def play(self, prompt: Prompt, conversation: Conversation) -> None:
        await conversation.respond(prompt.token_ids)
        for turn in range(1, self.turns):
            await self.step(sample_of(conversation.request_id))
            await conversation.respond((1, 2), turn, turn - 1)
        if self.branches:
            further = [asyncio.create_task(conversation.respond((3,), self.turns + number, 0)) for number in range(2)]
            try:
                await asyncio.gather(*further)
            finally:
                for one in further:  # as the pool does
                    one.cancel()

    async def step(self, sample: str) -> None:
        self.under_way.append(sample)
        try:
            await asyncio.sleep(0.5)
        finally:
            self.under_way.remove(sample)
        if self.to_fail > 0:
            self.to_fail -= 1
            raise EpisodeFailed("the tool is gone", counts=self.to_fail % 2 == 0)


@st.composite
def houses(draw: st.DrawFn) -> House:
    supply = draw(st.sampled_from([Synchronous(), Synchronous(1), OneStepOff(), Asynchronous(0), Asynchronous(1), Asynchronous(3)]))
    synchronous = supply == Synchronous()
    waves = synchronous and draw(st.booleans())
    tries = draw(st.sampled_from([None, (50, True), (2, False)]))
    rest = isinstance(supply, Synchronous) and draw(st.booleans())
    oversample = draw(st.sampled_from([1.0, 1.5])) if isinstance(supply, Synchronous) and not waves else 1.0
    turns = draw(st.integers(1, 3))
    return House(
        domains={
            "a": DomainPlan(2, 3, filter=GroupFilter(lambda group: None, *tries) if tries is not None else None),
            "b": DomainPlan(1, 3, baseline=True, least=draw(st.sampled_from([0, 0, 1]))),
            "c": DomainPlan(2, 1, prompts=5, epochs=draw(st.sampled_from([None, None, 2]))),
        },
        pacing=Pacing(supply, OnSync.ABORT if rest else draw(st.sampled_from(OnSync)), oversample, rest),
        size=draw(st.integers(1, 6)),
        engines=draw(st.integers(2, 3)),
        slots=draw(st.integers(1, 4)),
        retries=draw(st.integers(0, 2)),
        reward_retries=draw(st.integers(0, 1)),
        waves=waves,
        rest=rest,
        doomed=draw(st.booleans()),
        tokens=None if waves else draw(st.sampled_from([None, None, 300])),
        turns=turns,
        branches=turns > 1 and not waves and draw(st.booleans()),
    )


class RandomSchedules(RuleBasedStateMachine):
    """One thing is under way at a time, as in a run: a weight update, a batch, or a validation, which goes on beside the others where
    generation does. All else happens beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualClockLoop)
        self.runner.get_loop().set_exception_handler(lambda _, context: self.errors.append(context.get("exception") or context["message"]))
        self.errors: list[Any] = []
        self.work: asyncio.Task[None] | None = None
        self.validating: asyncio.Task[None] | None = None
        self.drains: list[asyncio.Task[None]] = []
        self.saved: tuple[Any, Remembered] | None = None
        self.over = False
        """The run has ended, for a good reason."""
        self.engines: dict[str, FragileEngine] = {}
        """All that there ever were."""
        self.serving: set[str] = set()
        self.leaving: set[str] = set()
        self.version = 0

    # ------------------------------------------------------------ the house

    @initialize(house=houses())
    def open(self, house: House) -> None:
        self.house = house
        self.do(lambda: self.start(None))

    def start(self, saved: tuple[Any, Remembered] | None) -> None:
        house = self.house
        self.model = Model(house, saved[1].copy([]) if saved is not None else None)
        self.judge = Judge()
        self.environment = Environment(house.turns, house.branches)
        self.to_reject = 0
        self.unfinished: set[str] = set()
        """Samples."""
        self.most_engines = 0
        """That the router has known at a time."""
        self.router = Router([], TIMEOUT_S, house.waves, house.slots, house.tokens)
        for _ in range(house.engines):
            self.start_engine()
        domains = [
            make_domain(
                name,
                number,
                plan.prompts,
                plan.share,
                plan.samples - plan.baseline,
                rewards=self.judge,
                reward_retries=house.reward_retries,
                greedy_baseline=plan.baseline,
                epochs=plan.epochs,
                least=plan.least,
                filter=replace(plan.filter, cause=self.cause) if plan.filter is not None else None,
                validation=Prompts(name, number, 2) if name == "b" else None,
                max_tokens=400,
                episode=self.environment.play if name == "a" and house.turns > 1 else one_response,
            )
            for number, (name, plan) in enumerate(house.domains.items())
        ]
        self.service = RolloutService(domains, self.router, house.retries, seed=1, pacing=house.pacing)
        keep_stats(self.service)
        for runner in self.service._runners.values():
            self.watch(runner)
        make = self.service._runner
        self.service._runner = lambda *of, **how: self.watch(make(*of, **how))  # type: ignore[method-assign]
        if saved is not None:
            self.service.load_state_dict(saved[0])
        self.service.set_version(self.version)

    def start_engine(self) -> None:
        name = f"engine {len(self.engines)}"
        self.engines[name] = engine = FragileEngine(self.house.slots)
        engine.life.version = self.version
        self.serving.add(name)
        self.router.add(LocalEngine(name, engine, frozen_admission=self.house.waves))

    def watch(self, runner: SampleRunner) -> SampleRunner:
        runner.start = partial(self.start_sample, runner.start)  # type: ignore[method-assign]
        return runner

    def start_sample(self, start: Any, sample: SampleId, *how: Any) -> asyncio.Task[Sample]:
        if sample.epoch >= 0:
            self.tell(lambda: self.model.starts(sample))
        task: asyncio.Task[Sample] = start(sample, *how)
        name = sample_of(sample.request_id())
        self.unfinished.add(name)
        task.add_done_callback(partial(self.end_sample, self.model, name))
        return task

    def end_sample(self, model: Model, name: str, task: asyncio.Task[Sample]) -> None:
        if model is self.model:
            self.unfinished.remove(name)
        if not task.cancelled() and task.exception() is None and task.result().id.epoch >= 0:
            self.tell(lambda: model.ends(task.result()))

    def cause(self, group: SampleGroup) -> LeftOut | None:
        if self.to_reject == 0:
            return None
        self.to_reject -= 1
        self.tell(lambda: self.model.rejects(group))
        return LeftOut(FUNCTION, "rejected")

    def tell(self, news: Callable[[], None]) -> None:
        """What the model finds wrong is not for the service to hear."""
        try:
            news()
        except Exception as error:
            self.errors.append(error)

    def do(self, what: Callable[[], Any], seconds: float = MOMENT_S) -> None:
        """Now; and all that happens until so much later."""

        async def main() -> None:
            what()
            await asyncio.sleep(seconds)

        self.runner.run(main())
        self.look_after_work()
        for error in self.errors:
            raise error if isinstance(error, BaseException) else AssertionError(error)

    def look_after_work(self) -> None:
        if self.work is not None and self.work.done():
            work, self.work = self.work, None
            self.look_at_end(work)
        if self.validating is not None and self.validating.done():
            validating, self.validating = self.validating, None
            self.look_at_end(validating)

    def look_at_end(self, work: asyncio.Task[None]) -> None:
        try:
            work.result()
        except NoEngineLeft:
            assert not any(self.engines[name].healthy for name in self.serving)
            self.over = True
        except DataExhausted:
            assert all(plan.epochs is not None for plan in self.house.domains.values())
            self.over = True
        except DomainFailed as error:
            (name,) = (name for name in self.house.domains if f"domain {name}:" in str(error))
            plan = self.house.domains[name]
            filtered_out = plan.filter is not None and self.model.ways[name]["filtered"] >= plan.filter.tries
            lost = self.model.lost[name]
            mostly = any(sum(lost[-last:]) >= 7 / 8 * last for last in range(32, len(lost) + 1))
            assert (len(lost) >= 8 and all(lost[-8:])) or mostly or filtered_out, str(error)
            self.over = True

    def busy(self) -> bool:
        supply = self.house.pacing.supply
        waits = self.validating is not None and (isinstance(supply, Synchronous) or supply.max_staleness == 0)
        return self.work is not None or self.over or waits

    # ------------------------------------------------------------ what a run does

    @rule(seconds=st.sampled_from([0.2, 1.0, 3.0, 10.0, 40.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.do(lambda: None, seconds)

    @precondition(lambda self: not self.busy())
    @rule(seconds=st.sampled_from([0.0, 3.0, 30.0, 100.0]))
    def ask_for_a_batch(self, seconds: float) -> None:
        """And look again so much later."""
        self.begin(self.ask(), seconds)

    @precondition(lambda self: not self.busy())
    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0]))
    def bring_weights(self, seconds: float) -> None:
        self.begin(self.update(), seconds)

    @precondition(lambda self: not self.busy())
    @rule(steps=st.integers(1, 4), seconds=st.sampled_from([30.0, 200.0]))
    def train(self, steps: int, seconds: float) -> None:
        """As a run does, until something takes longer."""
        for _ in range(steps):
            if not self.busy():
                self.bring_weights(3.0)
            if not self.busy():
                self.ask_for_a_batch(seconds)

    @precondition(lambda self: not self.busy() and self.validating is None)
    @rule()
    def validate(self) -> None:
        def start() -> None:
            self.validating = asyncio.get_running_loop().create_task(self.evaluate())

        self.do(start)

    def begin(self, work: Coroutine[Any, Any, None], seconds: float = 0.0) -> None:
        def start() -> None:
            self.work = asyncio.get_running_loop().create_task(work)

        self.do(start, MOMENT_S + seconds)

    async def ask(self) -> None:
        self.model.past.asked += 1
        result = await self.service.next_batch(self.house.size)
        for sample in (sample for group in result.groups for sample in group.samples if sample.outcome is SampleOutcome.ACCEPTED):
            turns, rows = (self.house.turns + 2 * self.house.branches, 1 + 2 * self.house.branches) if sample.id.domain == "a" else (1, 1)
            found = [row.policy_tokens for row in sample.transcript.rows]
            assert sum(found) == policy_tokens(sample, turns), "whole, however often it was interrupted"
            assert len(found) == rows
        self.model.hands_out(result)
        self.model.check_quotas()

    async def update(self) -> None:
        await self.service.hold()
        self.kill_silent_ones()
        self.model.replaced[self.version] = self.model.past.asked
        self.version += 1
        await asyncio.gather(
            *(self.engines[name].update(self.version) for name in self.serving | self.leaving if self.engines[name].healthy)
        )
        self.kill_silent_ones()
        self.service.set_version(self.version)

    def kill_silent_ones(self) -> None:
        """They would not get the weights."""
        for name in self.serving | self.leaving:
            if self.alive(name) and not self.engines[name].healthy:
                self.engines[name].kill("silent")
        self.serving = {name for name in self.serving if self.alive(name)}

    async def evaluate(self) -> None:
        try:
            result = await self.service.evaluate(2, {"b": Sampling(temperature=0.0, max_tokens=200)})
        except DomainFailed as error:
            assert "validation failed" in str(error)
            return
        assert [len(group.samples) for group in result.groups] == [2, 2]

    @precondition(lambda self: not self.busy() and self.model.past.handed_out > (self.saved[1].handed_out if self.saved is not None else 0))
    @rule()
    def save(self) -> None:
        live = [group.row for group in self.model.live.values()]
        self.saved = json.loads(json.dumps(self.service.state_dict())), self.model.past.copy(live)

    @precondition(lambda self: self.saved is not None and self.model.past.asked > self.saved[1].asked)
    @rule()
    def stop_and_resume(self) -> None:
        self.close()
        self.do(lambda: self.start(self.saved))
        self.over = False

    def close(self) -> None:
        """Nothing is left behind in engines that answer."""

        def stop() -> None:
            for task in [self.work, self.validating, *self.drains]:
                if task is not None:
                    task.cancel()
            self.work = self.validating = None
            self.service.close()

        self.do(stop)
        assert not self.unfinished
        assert not [name for name, engine in self.engines.items() if engine.holds and engine.healthy]
        self.do(lambda: [self.engines[name].kill("closed") for name in self.serving | self.leaving if self.alive(name)])
        self.drains, self.serving, self.leaving = [], set(), set()

    def alive(self, name: str) -> bool:
        return self.engines[name].life.failure is None

    # ------------------------------------------------------------ what befalls it

    def spare(self) -> list[str]:
        """Engines that the run can do without: another one serves."""
        healthy = sorted(name for name in self.serving if self.engines[name].healthy)
        return sorted(self.serving - {healthy[-1]}) if healthy else []

    @precondition(lambda self: self.spare())
    @rule(data=st.data())
    def an_engine_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.spare(), *filter(self.alive, sorted(self.leaving))]))
        self.do(lambda: self.engines[name].kill("killed"))
        self.serving.discard(name)

    @precondition(lambda self: self.spare())
    @rule(data=st.data())
    def an_engine_hangs(self, data: st.DataObject) -> None:
        self.do(self.engines[data.draw(st.sampled_from(self.spare()))].hang)

    @precondition(lambda self: any(engine.hangs for engine in self.engines.values()))
    @rule()
    def hung_engines_wake(self) -> None:
        self.do(lambda: [engine.wake() for engine in self.engines.values() if engine.hangs])

    @precondition(lambda self: len(self.serving) < 4)
    @rule()
    def an_engine_is_added(self) -> None:
        self.do(self.start_engine)

    @precondition(lambda self: self.spare())
    @rule(data=st.data())
    def an_engine_is_drained(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.spare()))
        self.serving.remove(name)
        self.leaving.add(name)
        self.do(lambda: self.drains.append(asyncio.get_running_loop().create_task(self.router.drain(name))))

    @precondition(lambda self: self.spare() or self.here())
    @rule(data=st.data())
    def an_engine_is_removed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({*self.spare(), *self.here()})))
        self.serving.discard(name)
        self.do(lambda: self.router.remove(name))

    def here(self) -> set[str]:
        """Engines that are drained and that the router still knows."""
        return self.leaving & {load.client.name for load in self.router.engines}

    @rule(engine=st.integers(0, 9), place=st.integers(0, 9))
    def a_request_fails(self, engine: int, place: int) -> None:
        names = sorted(self.serving)
        self.do(lambda: self.engines[names[engine % len(names)]].fail_one(place) if names else None)

    @rule(count=st.integers(1, 6))
    def rewards_fail(self, count: int) -> None:
        self.judge.to_fail = count

    @precondition(lambda self: self.house.turns > 1)
    @rule(count=st.integers(1, 8))
    def episodes_fail(self, count: int) -> None:
        self.environment.to_fail = count

    @precondition(lambda self: self.house.domains["a"].filter is not None)
    @rule(count=st.integers(1, 6))
    def the_filter_rejects(self, count: int) -> None:
        self.to_reject = count

    # ------------------------------------------------------------ what holds all the time

    @invariant()
    def the_model_agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        self.model.check()
        for name, scheduler in schedulers_of(self.service).items():
            counts, mine = counts_of(self.service, name), self.model.ways[name]
            assert [counts.admitted, counts.filtered, counts.stale, counts.lost] == [
                mine[way] for way in ("admitted", "filtered", "stale", "lost")
            ], name
            live = sum(group.row[0] == name for group in self.model.live.values())
            # What has been taken for a batch that other domains are not ready for is live to the model.
            taken = len(self.service._taken.get(name, []))
            assert scheduler.running + scheduler.finished + taken + counts.delivered == live + mine["delivered"]
            if self.work is None and not self.over:
                assert counts.delivered == mine["delivered"]

    @invariant()
    def every_sample_is_somewhere(self) -> None:
        """In one place: with an engine, before the engines, at the gate of waves, answered before its wave is, with the environment or the
        judge."""
        if hasattr(self, "model") and not self.over:
            gate = self.router.gate
            waves = [] if gate is None else [*gate._waiting, *(request for wave in gate._waves for request in wave._answered)]
            requests = [*self.router._at_engines, *self.queued(), *waves]
            assert len(set(requests)) == len(requests)
            assert sorted(self.unfinished) == sorted([*set(map(sample_of, requests)), *self.environment.under_way, *self.judge.under_way])
            asked = [count for (_, response), count in self.judge.asked.items() if "/-1/" not in response]  # each validation asks again
            assert max(asked, default=0) <= self.house.reward_retries + 1

    def queued(self) -> list[str]:
        queues = self.router._queues.values()
        return [flight.first.request_id for queue in queues for flight in queue if not flight.assigned.cancelled()]

    @invariant()
    def little_waits_for_the_engines(self) -> None:
        """A prompt starts while less than a quarter of what engines run waits for them: so what is in flight or waits is bounded, wherever
        engines, weights and validations send it. Second attempts follow upon failures, whatever waits."""
        if not hasattr(self, "model"):
            return
        waiting, sent = self.queued(), [*self.router._at_engines]
        assert self.router._waiting == len(waiting)
        known = {load for load in self.router.engines if load.serves} | set(self.router._at_engines.values())
        self.most_engines = max(self.most_engines, len(known))
        if self.house.waves:
            return
        full = self.router._choice.serving == 0 or self.router._choice._least() is None
        assert not waiting or self.router._held or full, "an engine has room for what waits"
        ready = self.most_per_engine * self.most_engines
        most_waiting = max(1, self.house.slots * self.most_engines // 4) - 1 + self.largest_group
        firsts = [request.partition("~")[0].split("/") for request in (*waiting, *sent) if TURN not in request]
        held_out = [epoch for _, _, epoch, _, _, attempt in firsts if attempt == "0" and epoch == "-1"]
        training = [epoch for _, _, epoch, _, _, attempt in firsts if attempt == "0" and epoch != "-1"]
        assert len(training) <= ready + most_waiting
        assert len(held_out) <= max(2, ready)

    @property
    def largest_group(self) -> int:
        return max(plan.samples for plan in self.house.domains.values())

    @property
    def most_per_engine(self) -> float:
        return math.inf if self.house.waves else self.house.slots + max(1, self.house.slots // 4)

    @invariant()
    def engines_have_what_they_may(self) -> None:
        if not hasattr(self, "model"):
            return
        most = self.most_per_engine
        loads = {load.client.name: load for load in self.router.engines}
        for name, load in loads.items():
            engine = self.engines[name]
            assert 0 <= load.requests <= most, name
            if engine.healthy and not self.house.waves:  # a wave is a moment on its way
                assert load.requests == engine.holds, name
            assert load.requests or load.tokens == 0
        assert sum(self.router._in_flight.values()) == len(self.router._at_engines)
        for load in self.router._at_engines.values():
            engine = self.engines[load.client.name]
            assert engine.life.failure is None, "a dead engine"
            assert load.client.name in loads or not engine.healthy, "an engine that is gone"

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        try:
            if hasattr(self, "model") and sys.exception() is None:
                self.come_to_an_end()
        finally:
            self.runner.close()

    def come_to_an_end(self) -> None:
        """Whatever was under way ends; the next batches come, or the error of a run without engines; and nothing is left."""
        if self.house.doomed:
            self.do(lambda: [engine.kill("power") for name, engine in self.engines.items() if self.alive(name)])
        self.hung_engines_wake()
        self.work_ends()
        for _ in range(10 if self.house.doomed else 2):  # some batches may be finished, and come all the same
            if not self.over:
                self.ask_for_a_batch(0.0)
                self.work_ends()
        assert self.over or not self.house.doomed
        assert all(task.done() and task.result() is None for task in self.drains)
        if not self.over:
            self.do(self.router.release, LONG_S)
            assert not self.unfinished
            self.the_model_agrees()
            self.engines_have_what_they_may()
        self.close()

    def work_ends(self) -> None:
        self.do(lambda: None, LONG_S)
        assert self.work is None, "it hangs"


TestRandomSchedules = RandomSchedules.TestCase
TestRandomSchedules.settings = settings(max_examples=30, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
class TestThousandsOfSchedules(RandomSchedules.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=3000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
