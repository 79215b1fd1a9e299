"""Rewards that are slower than engines: what waits for its score is bounded, and every batch is completed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_support import TimedReward, by_tokens, make_domain, make_service, schedulers_of

from roll_lite.data.samples import RewardInput, Score
from roll_lite.scheduler.domain import Domain
from roll_lite.scheduler.filters import FUNCTION, GroupFilter, LeftOut
from roll_lite.scheduler.stats import RolloutStats
from roll_lite.scheduler.supply import Asynchronous, OneStepOff, Supply, Synchronous
from roll_lite.simulator.clock import run_virtual


class Pool(TimedReward):
    """Scores so many at a time. `tells`: the schedulers know that."""

    def __init__(self, seconds: float, workers: int, tells: bool = True) -> None:
        super().__init__(seconds)
        self.capacity = workers if tells else inf
        self._free = asyncio.Semaphore(workers)

    async def score(self, item: RewardInput) -> Score:
        async with self._free:
            return await super().score(item)


@dataclass
class Seen:
    batches: list[Counter[str]] = field(default_factory=list)
    """Groups of each domain."""
    stats: list[RolloutStats] = field(default_factory=list)
    scoring: list[int] = field(default_factory=list)
    """Samples of all domains that waited for their scores, when a batch was complete."""
    most_scoring: Counter[str] = field(default_factory=Counter)
    most_live: Counter[str] = field(default_factory=Counter)
    """Groups that were admitted and had not ended."""
    staleness: int = 0

    def behind_s(self, name: str) -> float:
        return sum(stats.domains[name].behind_s for stats in self.stats)


def run(domains: list[Domain], batches: int, prompts: int = 4, train_s: float = 1.0, slots: int = 4, **how: Any) -> Seen:
    """One engine: a response takes 0.25 s."""

    async def main() -> Seen:
        seen = Seen()
        service, _, (engine,) = make_service(domains, [by_tokens(25)], slots=slots, engine_slots=slots, **how)

        async def watch() -> None:
            while True:
                for name, scheduler in schedulers_of(service).items():
                    live = scheduler.running + scheduler.finished
                    seen.most_scoring[name] = max(seen.most_scoring[name], service._runners[name].scoring)
                    seen.most_live[name] = max(seen.most_live[name], live)
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        for version in range(batches):
            await service.hold()
            await engine.begin_weight_update([])
            await engine.receive_bucket([])
            await engine.finish_weight_update(version)
            service.set_version(version)
            async with asyncio.timeout(10_000):
                result = await service.next_batch(prompts)
            seen.batches.append(Counter(group.domain for group in result.groups))
            seen.stats.append(result.stats)
            seen.scoring.append(sum(runner.scoring for runner in service._runners.values()))
            samples = [sample for group in result.groups for sample in group.samples]
            oldest = [span.version for sample in samples for span in sample.transcript.versions]
            seen.staleness = max(seen.staleness, version - min(oldest, default=version))
            await asyncio.sleep(train_s)
        watching.cancel()
        service.close()
        return seen

    return run_virtual(main())


def slow(tells: bool) -> Domain:
    """Its rewards score 4 samples a second, of which the engine makes 16."""
    return make_domain("a", rewards=Pool(0.5, workers=2, tells=tells))


def test_what_waits_for_its_score_grows_no_more_than_a_batch_beyond_what_was_asked_for() -> None:
    """Batches of 16 samples. 2 are scored at a time, and the engine has 6 that nobody waits for yet."""
    unbounded = run([slow(tells=False)], 8, supply=Asynchronous(30))
    bounded = run([slow(tells=True)], 8, supply=Asynchronous(30))
    assert unbounded.scoring == sorted(unbounded.scoring) and unbounded.most_scoring["a"] > 250
    assert bounded.most_scoring["a"] <= 2 + 2 * 16 + 6
    for seen in (unbounded, bounded):
        assert seen.batches == [{"a": 4}] * 8
    assert unbounded.behind_s("a") == 0
    assert bounded.behind_s("a") > 10
    # The rewards are what everything waits for, and never without work: nothing is lost.
    assert sum(stats.wall_s for stats in bounded.stats) == pytest.approx(sum(stats.wall_s for stats in unbounded.stats), rel=0.1)


def test_rewards_that_take_long_and_score_many_at_a_time_hold_nothing_back() -> None:
    seen = run([make_domain("a", rewards=Pool(20.0, workers=1000))], 10, supply=Asynchronous(8))
    assert seen.most_scoring["a"] > 100 and seen.behind_s("a") == 0


def test_other_domains_go_on() -> None:
    def domains() -> list[Domain]:
        return [slow(tells=True), make_domain("b", 1, rewards=TimedReward(0.1))]

    roomy = run(domains(), 8, slots=32, supply=Asynchronous(4))
    assert roomy.most_live["b"] == 5 * 2, "all that their staleness allows, where the engine takes it"
    seen = run(domains(), 8, supply=Asynchronous(4))
    assert seen.batches == roomy.batches == [{"a": 2, "b": 2}] * 8
    assert seen.most_scoring["a"] <= 2 + 2 * 8 + 6
    assert seen.behind_s("a") > 0 and seen.behind_s("b") == 0
    assert seen.staleness <= 4


async def test_a_batch_waits_for_its_prompts_where_engines_have_no_room_for_them_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    service, router, _ = make_service([make_domain("a")], [by_tokens(1, 0.0)], engine_slots=4)
    monkeypatch.setattr(router, "has_room", lambda announced, tokens: False)
    batch = asyncio.create_task(service.next_batch(2))
    await asyncio.sleep(0.01)
    assert not batch.done()
    monkeypatch.undo()
    router.on_room()
    assert len((await batch).groups) == 2


SUPPLIES: list[Supply] = [Synchronous(), Synchronous(2), OneStepOff(), *map(Asynchronous, (0, 1, 3, 9))]


@settings(max_examples=60, deadline=None)
@given(
    supply=st.sampled_from(SUPPLIES),
    workers=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seconds=st.lists(st.sampled_from([0.0, 0.05, 1.0, 7.0]), min_size=3, max_size=3),
    shares=st.lists(st.integers(1, 20), min_size=3, max_size=3),
    samples=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    prompts=st.integers(1, 7),
    slots=st.integers(1, 30),
    train_s=st.sampled_from([0.0, 3.0]),
    oversample=st.sampled_from([1.0, 1.5]),
    filtered=st.integers(2, 6),
    lossy=st.booleans(),
    epochs=st.sampled_from([None, 3]),
)
@example(  # the trainer is behind one domain, and what another one owes comes after places that are not due
    supply=Asynchronous(9), workers=[2, 1, 1], seconds=[0.0, 0.05, 7.0], shares=[18, 1, 8], samples=[1, 1, 1], prompts=3, slots=1,
    train_s=3.0, oversample=1.0, filtered=5, lossy=False, epochs=None,
)  # fmt: skip
def test_every_batch_is_completed_whatever_is_slow(
    supply: Supply, workers: list[int], seconds: list[float], shares: list[int], samples: list[int], prompts: int, slots: int,
    train_s: float, oversample: float, filtered: int, lossy: bool, epochs: int | None,
) -> None:  # fmt: skip
    def domain(number: int) -> Domain:
        pool = Pool(seconds[number], workers[number])
        pool.fails = lambda item, asked: lossy and int(item.prompt.split()[1]) % 5 == 0
        chosen = GroupFilter(
            lambda group: LeftOut(FUNCTION, "unlucky") if group.samples[0].id.prompt_uid % filtered == 0 else None, tries=100
        )
        first = number == 0
        return make_domain(
            "abc"[number], number, prompts=40 if first else 1000, share=shares[number], samples=samples[number], rewards=pool,
            filter=chosen, epochs=epochs if first and len(workers) > 1 else None,
        )  # fmt: skip

    domains = [domain(number) for number in range(len(workers))]
    surplus = {"oversample": oversample} if isinstance(supply, Synchronous) else {}
    seen = run(domains, 6, prompts=prompts, train_s=train_s, slots=slots, supply=supply, **surplus)
    assert [batch.total() for batch in seen.batches] == [prompts] * 6
    assert seen.staleness <= supply.max_staleness
    delivered = sum(seen.batches, Counter())
    for number in range(len(workers)):
        assert abs(delivered["abc"[number]] - 6 * prompts * shares[number] / sum(shares[: len(workers)])) < 1
