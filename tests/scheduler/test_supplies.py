"""Generation and training side by side: what is admitted when, how old it may become, and that nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import pytest
from scheduler_support import TimedReward, all_counts, by_tokens, counts_of, make_domain, make_service, schedulers_of
from support_local_engine import LocalEngine
from support_scripted import Response, Script, ScriptedEngine

from roll_lite.config.schema.domains import RolloutConfig
from roll_lite.data.prompts import PromptOrder
from roll_lite.data.samples import RewardInput, SampleGroup, SampleOutcome, Score
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.domain import DataExhausted, Domain, DomainFailed
from roll_lite.scheduler.filters import FUNCTION, LOW, GroupFilter, LeftOut, kept_between, kept_by
from roll_lite.scheduler.service import RolloutService
from roll_lite.scheduler.supply import Asynchronous, OneStepOff, OnSync, Supply, Synchronous, pacing_of
from roll_lite.simulator.clock import run_virtual

MOSTLY_RIGHT = GroupFilter(kept_between("accuracy", 0.5, None))
SUPPLIES = {"sync": Synchronous(), "one_step_off": OneStepOff(), "async 1": Asynchronous(1), "async 3": Asynchronous(3)}


def whole(request_id: str) -> str:
    """Of a request that goes on with another, the first one's id."""
    return request_id.partition("~")[0]


def drawn_length(request_id: str) -> int:
    """Long-tailed, by the sample."""
    draw = stable_hash("length", whole(request_id)) % 1000 / 1000
    return int(4 / (1.001 - draw)) if draw < 0.98 else 200


def drawn(seconds_per_token: float = 0.1) -> Script:
    return lambda request: Response(drawn_length(request.request_id), seconds_per_token)


@dataclass
class Trained:
    """What a pretended trainer has seen."""

    batches: list[list[SampleGroup]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """That each batch was trained with."""
    stats: list[Any] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def staleness(self) -> list[int]:
        return [
            version - min(span.version for span in sample.transcript.versions)
            for version, batch in zip(self.versions, self.batches, strict=True)
            for group in batch
            for sample in group.samples
            if sample.outcome is SampleOutcome.ACCEPTED
        ]

    @property
    def prompts(self) -> list[tuple[str, int, int]]:
        return [(group.domain, group.samples[0].id.epoch, group.samples[0].id.prompt_uid) for batch in self.batches for group in batch]


async def train(
    service: RolloutService,
    engines: list[ScriptedEngine],
    steps: int,
    prompts: int = 4,
    seconds: float = 5.0,
    each: Callable[[], Awaitable[None]] | None = None,
) -> Trained:
    """As the pipeline does it: new weights, the next batch, training."""
    done = Trained()
    for step in range(steps):
        await service.hold()
        for engine in engines:
            if (await engine.health()).alive:
                await engine.begin_weight_update([])
                await engine.receive_bucket([])
                await engine.finish_weight_update(step)
        service.set_version(step)
        result = await service.next_batch(prompts)
        done.batches.append(result.groups)
        done.versions.append(step)
        done.stats.append(result.stats)
        if each is not None:
            await each()
        await asyncio.sleep(seconds)
    done.ended_at = asyncio.get_running_loop().time()
    return done


def run(
    steps: int = 8, engines: int = 2, slots: int = 4, seconds: float = 5.0, prompts: int = 4, **how: Any
) -> tuple[Trained, RolloutService]:
    async def main() -> tuple[Trained, RolloutService]:
        domains: list[Domain] = how.pop("domains", [make_domain("a", max_tokens=400)])
        service, _, strategies = make_service(domains, [drawn()] * engines, slots=slots, engine_slots=slots, **how)
        done = await train(service, strategies, steps, prompts, seconds)
        service.close()
        return done, service

    return run_virtual(main())


def oversample_of(supply: Supply, factor: float) -> float:
    """The others generate ahead already: their configurations have none."""
    return factor if isinstance(supply, Synchronous) else 1.0


def lengths(batch: list[SampleGroup]) -> list[int]:
    return [sample.transcript.policy_tokens for group in batch for sample in group.samples]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SUPPLIES)
@pytest.mark.parametrize("on_sync", list(OnSync))
def test_every_prompt_trains_once_in_time_and_with_the_length_that_was_drawn(name: str, on_sync: OnSync) -> None:
    supply = SUPPLIES[name]
    done, service = run(supply=supply, on_sync=on_sync)
    assert [len(batch) for batch in done.batches] == [4] * 8
    assert len(set(done.prompts)) == len(done.prompts)
    assert max(done.staleness) <= supply.max_staleness
    assert sum(done.staleness) > 0 or name == "sync"
    for batch in done.batches:
        for group in batch:
            for sample in group.samples:
                assert sample.transcript.policy_tokens == drawn_length(sample.id.request_id())
    assert all(counts.stale == 0 for counts in all_counts(service))


def test_without_staleness_asynchronous_training_is_synchronous() -> None:
    sync, _ = run(supply=Synchronous())
    asynchronous, _ = run(supply=Asynchronous(0))
    assert asynchronous.prompts == sync.prompts
    assert [lengths(batch) for batch in asynchronous.batches] == [lengths(batch) for batch in sync.batches]
    assert (asynchronous.staleness, asynchronous.ended_at) == (sync.staleness, pytest.approx(sync.ended_at))


def test_each_supply_hides_more_of_the_generation() -> None:
    ends = {name: run(steps=12, supply=supply, on_sync=OnSync.ABORT)[0].ended_at for name, supply in SUPPLIES.items()}
    assert ends["sync"] > ends["one_step_off"] > ends["async 3"]
    assert ends["async 1"] <= ends["one_step_off"]


def test_one_step_off_generates_each_batch_with_the_weights_before() -> None:
    done, _ = run(supply=OneStepOff(), on_sync=OnSync.DRAIN)
    assert set(done.staleness[:16]) == {0}
    assert set(done.staleness[16:]) == {1}


def test_an_update_does_not_wait_for_responses_whose_only_engine_died() -> None:
    """Its replacement gets the weights of that update, and then their requests."""

    async def main() -> list[int]:
        service, router, (engine,) = make_service([make_domain("a", max_tokens=400)], [drawn()], supply=OneStepOff(), on_sync=OnSync.DRAIN)
        router._engines_restart = True
        service.set_version(0)
        await service.next_batch(4)
        held = asyncio.create_task(service.hold())
        await asyncio.sleep(0.1)
        assert not held.done()
        engine.kill("scripted death")
        await asyncio.wait_for(held, 10.0)
        assert any(scheduler.running for scheduler in schedulers_of(service).values())
        service.set_version(1)
        router.add(LocalEngine("engine 0", ScriptedEngine(drawn())))
        batch = lengths((await service.next_batch(4)).groups)
        service.close()
        return batch

    assert len(run_virtual(main())) == 16


def test_nothing_is_admitted_for_batches_that_nobody_will_ask_for() -> None:
    _, service = run(steps=5, supply=Asynchronous(3), batches=5)
    counts = counts_of(service, "a")
    assert (counts.admitted, counts.delivered) == (20, 20)


def test_what_is_admitted_and_not_trained_never_exceeds_the_bound() -> None:
    seen: list[int] = []

    async def main() -> None:
        service, _, strategies = make_service([make_domain("a", max_tokens=400)], [drawn()] * 2, slots=64, supply=Asynchronous(2))

        async def watch() -> None:
            while True:
                counts = counts_of(service, "a")
                seen.append(counts.admitted - counts.delivered)
                await asyncio.sleep(0.25)

        watching = asyncio.create_task(watch())
        await train(service, strategies, 10)
        watching.cancel()
        service.close()

    run_virtual(main())
    assert max(seen) == 3 * 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_group_grows_too_old_where_some_batches_have_none_of_its_domain(staleness: int) -> None:
    """A batch is one group, so that a domain's turn comes every few batches. Others come in the place of groups that are lost, and end in
    any order: none may be left for a turn that is too late for it."""
    for number in range(8):
        lost = TimedReward(0.5, lambda item, asked, number=number: stable_hash("lost", number, item.prompt, item.response) % 4 == 0)
        domains = [
            make_domain("abc"[n], n, share=share, samples=1, rewards=lost, reward_retries=0, max_tokens=400)
            for n, share in enumerate((2, 1, 2))
        ]
        done, service = run(60, engines=1, slots=2, seconds=0.5 + number, prompts=1, domains=domains, supply=Asynchronous(staleness))
        counts = all_counts(service)
        assert [one.stale for one in counts] == [0, 0, 0] and max(done.staleness) <= staleness
        assert sum(one.lost for one in counts) > 5


def test_a_service_that_is_closed_leaves_nothing_in_its_engines() -> None:
    """What is dropped makes room, and nothing is admitted for it."""

    async def main() -> tuple[int, int, float]:
        service, router, (engine,) = make_service(
            [make_domain("a", max_tokens=400)], [drawn()], slots=4, engine_slots=4, supply=Asynchronous(3)
        )
        batch = asyncio.create_task(service.next_batch(8))
        await asyncio.sleep(1.0)
        assert router._waiting > 0
        admitted = counts_of(service, "a").admitted
        service.close()
        await asyncio.sleep(1.0)
        with pytest.raises(RuntimeError, match="closed"):
            await batch
        health = await engine.health()
        return counts_of(service, "a").admitted - admitted, health.running + health.waiting, router.engines[0].tokens

    assert run_virtual(main()) == (0, 0, 0)


def test_an_interrupted_response_keeps_its_tokens_and_their_versions() -> None:
    done, _ = run(supply=Asynchronous(3), on_sync=OnSync.ABORT, steps=10, seconds=3.0)
    several = [sample for batch in done.batches for group in batch for sample in group.samples if len(sample.transcript.versions) > 2]
    assert several
    for sample in several:
        spans = sample.transcript.versions
        assert spans[0].start == 0
        assert [span.version for span in spans] == sorted({span.version for span in spans})
        assert spans[-1].start < sample.transcript.policy_tokens == drawn_length(sample.id.request_id())
        assert sample.transcript.tokens is not None and sample.transcript.tokens.length == 4 + sample.transcript.policy_tokens


# ---------------------------------------------------------------- filters


class EveryThird(TimedReward):
    """Right for every third prompt."""

    async def score(self, item: Any) -> Any:
        found = await super().score(item)
        return type(found)(float(int(item.answer) % 3 == 0))


@pytest.mark.parametrize("name", SUPPLIES)
def test_filtered_groups_are_replaced_and_are_no_failures(name: str) -> None:
    domain = make_domain("a", max_tokens=400, rewards=EveryThird(), filter=MOSTLY_RIGHT)
    done, service = run(domains=[domain], supply=SUPPLIES[name], on_sync=OnSync.ABORT)
    assert [len(batch) for batch in done.batches] == [4] * 8
    assert all(uid % 3 == 0 for _, _, uid in done.prompts)
    counts = counts_of(service, "a")
    assert counts.lost == 0 and counts.filtered > counts.delivered
    assert sum(stats.domains["a"].filtered.total() for stats in done.stats) <= counts.filtered
    assert set(done.stats[0].domains["a"].filtered) == {LOW}


def test_too_many_filtered_groups_end_the_run_with_the_cause() -> None:
    domain = make_domain("a", max_tokens=400, filter=GroupFilter(kept_between("std", 0.0, None), tries=3))
    with pytest.raises(DomainFailed, match=r"domain a: 3 prompts for each place .* std not above 0"):
        run(domains=[domain])


def test_a_place_whose_prompt_is_put_back_may_be_tried_as_often_as_any_other() -> None:
    """Groups that were finished in time for no batch come again, and are filtered then, before the next batch is asked for."""
    seen: Counter[int] = Counter()

    def second_time(group: SampleGroup) -> LeftOut | None:
        seen[group.samples[0].id.prompt_uid] += 1
        return LeftOut(FUNCTION, "again") if seen[group.samples[0].id.prompt_uid] == 2 else None

    domains = [make_domain("a", 0, max_tokens=400, filter=GroupFilter(second_time, tries=3)), make_domain("b", 1, max_tokens=400)]
    done, service = run(domains=domains, supply=Synchronous(1), prompts=1, oversample=3.0, seconds=100.0)
    assert [len(batch) for batch in done.batches] == [1] * 8
    assert counts_of(service, "a").filtered > 0


def test_or_make_the_batch_smaller() -> None:
    rewards = EveryThird()
    domain = make_domain("a", max_tokens=400, rewards=rewards, filter=GroupFilter(kept_between("accuracy", 0.5, None), tries=2, fill=False))
    done, service = run(domains=[domain], steps=6)
    sizes = [len(batch) for batch in done.batches]
    assert 0 < sum(sizes) < 24 and max(sizes) <= 4
    counts = counts_of(service, "a")
    assert counts.admitted <= 6 * 4 * 2
    assert counts.admitted == counts.ended


class MostlyRight(TimedReward):
    async def score(self, item: RewardInput) -> Score:
        await super().score(item)
        return Score(float(stable_hash("right", item.prompt) % 10 > 0))


@pytest.mark.parametrize("how", [{"supply": Asynchronous(2)}, {"oversample": 1.5}])
def test_what_is_left_out_for_good_does_not_shorten_the_way_ahead(how: dict[str, Any]) -> None:
    """A place that a filter gives up is filled by a group of a later batch; that one's place is not given up."""
    some = GroupFilter(kept_between("accuracy", 0.5, None), tries=1, fill=False)
    done, service = run(60, prompts=8, domains=[make_domain("a", rewards=MostlyRight(), samples=1, filter=some, max_tokens=400)], **how)
    assert counts_of(service, "a").filtered > 20
    assert [len(batch) for batch in done.batches[30:]] == [8] * 30
    if "supply" in how:
        assert max(done.staleness[-80:]) == 2


def test_a_filter_that_raises_ends_the_run() -> None:
    def broken(group: SampleGroup) -> LeftOut | None:
        raise KeyError("level")

    with pytest.raises(KeyError, match="level"):
        run(domains=[make_domain("a", filter=GroupFilter(broken))])


def test_the_mistakes_of_a_users_filter_are_told_with_its_name() -> None:
    def broken(group: SampleGroup) -> bool:
        return bool(group.samples[0].prompt.columns["level"])

    mistakes: list[tuple[Any, str]] = [
        (broken, r"rollout\.filter\.name: my\.filter, asked for a group of domain a, raised KeyError: 'level'"),
        (lambda group: None, "returned None; it has to say True .* or False"),
    ]
    for function, told in mistakes:
        with pytest.raises(ValueError, match=told):
            run(domains=[make_domain("a", filter=GroupFilter(kept_by(function, "my.filter")))], steps=1)


# ---------------------------------------------------------------- domains that end, and domains with a minimum


@pytest.mark.parametrize("name", SUPPLIES)
def test_when_a_domain_has_no_more_prompts_the_others_take_its_share(name: str) -> None:
    domains = [make_domain("a", 0, prompts=6, epochs=2, max_tokens=400), make_domain("b", 1, max_tokens=400)]
    done, _ = run(domains=domains, supply=SUPPLIES[name], on_sync=OnSync.ABORT, steps=12)
    assert sorted(prompt for prompt in done.prompts if prompt[0] == "a") == [("a", epoch, uid) for epoch in (0, 1) for uid in range(6)]
    sizes = [len(batch) for batch in done.batches]
    assert sizes.count(4) >= 10 and sum(sizes) >= 44
    assert all(group.domain == "b" for group in done.batches[-1])
    assert done.stats[-1].domains["a"].requested_share == 0
    assert done.stats[-1].domains["a"].epoch == 1


@pytest.mark.parametrize("name", SUPPLIES)
def test_places_that_stay_empty_take_no_room_from_others(name: str) -> None:
    """Most of a batch is of a domain that has ended, and one group is more than the engine takes."""
    domains = [make_domain("a", 0, prompts=3, share=9, samples=8, epochs=1), make_domain("b", 1, samples=8)]
    done, _ = run(domains=domains, supply=SUPPLIES[name], engines=1, slots=1, prompts=10, steps=4)
    assert [Counter(group.domain for group in batch)["b"] for batch in done.batches][-2:] == [10, 10]


@pytest.mark.parametrize("supply", [*SUPPLIES.values(), OneStepOff(2)], ids=str)
def test_when_no_domain_has_prompts_the_run_ends_and_says_so(supply: Any) -> None:
    """Also where batches were planned beyond the last prompt: none of them is empty."""
    domains = [make_domain("a", 0, prompts=10, epochs=1), make_domain("b", 1, prompts=13, share=2, epochs=1)]
    with pytest.raises(DataExhausted, match="no domain has prompts left after 6 batches"):
        run(domains=domains, steps=7, supply=supply)


def test_a_domains_minimum_is_kept_in_every_batch() -> None:
    domains = [make_domain("a", 0, share=98), make_domain("b", 1, share=1, least=1), make_domain("c", 2, share=1, least=2)]
    done, _ = run(domains=domains, prompts=8, steps=5)
    assert [Counter(group.domain for group in batch) for batch in done.batches] == [Counter(a=5, b=1, c=2)] * 5


# ---------------------------------------------------------------- more than a batch under way


def test_a_rare_domain_with_long_responses_goes_on_while_others_have_enough() -> None:
    """One of six groups takes 100 s. Nine batches of it may be under way at a time, whatever lies finished of the other domain."""

    async def main() -> float:
        domains = [make_domain("often", 0, share=5, max_tokens=2000), make_domain("rare", 1, max_tokens=2000)]
        script: Script = lambda request: Response(1000 if request.request_id.startswith("rare") else 10, 0.1)  # noqa: E731
        service, _, engines = make_service(domains, [script] * 2, slots=32, engine_slots=32, supply=Asynchronous(8))
        done = await train(service, engines, steps=36, prompts=6, seconds=5.0)
        service.close()
        return done.ended_at

    # Of 36 batches nine at a time: at worst the next nine begin when the last of those has been trained.
    assert run_virtual(main()) < 4 * (100 + 8 * 5)


def test_oversampling_hides_the_rounds_of_a_filter() -> None:
    def walls(oversample: float) -> list[float]:
        domain = make_domain("a", max_tokens=400, rewards=EveryThird(), filter=MOSTLY_RIGHT)
        done, _ = run(domains=[domain], slots=64, oversample=oversample, steps=12)
        return [stats.wall_s for stats in done.stats]

    assert fmean(walls(4.0)) < 0.7 * fmean(walls(1.0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("supply", [Synchronous(), Synchronous(1), Asynchronous(1)])
def test_what_trains_does_not_depend_on_how_long_it_is(supply: Any) -> None:
    """The first to finish are the short ones. They are not preferred: the lengths that train are those that were drawn, of the prompts in
    the order in which they were admitted."""
    done, _ = run(steps=25, prompts=8, slots=8, oversample=oversample_of(supply, 1.5), supply=supply, on_sync=OnSync.ABORT)
    trained = [length for batch in done.batches for length in lengths(batch)]
    admitted = sorted({group.group for batch in done.batches for group in batch})
    assert trained == [drawn_length(sample.id.request_id()) for batch in done.batches for group in batch for sample in group.samples]
    # Long and short groups have the same chance: of what was admitted, nothing but the last ones (and, without staleness, those that came
    # behind a full batch) is missing.
    assert len(admitted) == 25 * 8
    everything = [drawn_length(f"x/{i}/0/{i}/{place}/0") for i in range(2000) for place in range(4)]
    assert fmean(trained) == pytest.approx(fmean(everything), rel=0.25)


def distance(some: Sequence[int], others: Sequence[int]) -> float:
    """Kolmogorov and Smirnov's, as a multiple of what two samples of one distribution exceed once in a hundred times (1.628)."""
    some, others = sorted(some), sorted(others)
    largest = max(abs(bisect_right(some, at) / len(some) - bisect_right(others, at) / len(others)) for at in {*some, *others})
    return largest / (1.628 * math.sqrt(1 / len(some) + 1 / len(others)))


@pytest.mark.nightly
@pytest.mark.parametrize("supply", [Synchronous(), Asynchronous(2)])
def test_filtered_batches_have_the_lengths_of_unfiltered_ones(supply: Any) -> None:
    """A third of the prompts do not train, whatever their answers' lengths: what takes their place is as long as everything that is drawn,
    although short answers are scored, filtered and replaced first. Of a filter that looks at lengths the same measure tells."""
    everything = [drawn_length(f"x/{i}/0/{i}/{place}/0") for i in range(1000) for place in range(4)]

    def trained(keeps: Callable[[SampleGroup], bool]) -> list[int]:
        domain = make_domain("a", max_tokens=400, filter=GroupFilter(kept_by(keeps, "left out")))
        oversample = oversample_of(supply, 1.5)
        done, service = run(40, domains=[domain], prompts=8, slots=8, oversample=oversample, supply=supply, on_sync=OnSync.ABORT)
        assert counts_of(service, "a").filtered > 100
        return [length for batch in done.batches for length in lengths(batch)]

    assert distance(trained(lambda group: stable_hash("kept", group.samples[0].id.prompt_uid) % 3 > 0), everything) < 1
    assert distance(trained(lambda group: max(lengths([group])) < 30), everything) > 2


@pytest.mark.parametrize("on_sync", list(OnSync))
def test_engines_that_rest_end_nothing_before_new_weights_come(on_sync: OnSync) -> None:
    """What was under way was interrupted when the batch before was complete: waiting for its end would be waiting for ever."""
    found = pacing_of(RolloutConfig(on_sync=on_sync.value), engines_rest=True)
    how = {"supply": Synchronous(1), "oversample": 2.0, "on_sync": found.on_sync, "engines_rest": found.engines_rest}
    done, _ = run(domains=[make_domain("a", max_tokens=400)], steps=6, batches=6, **how)
    assert [len(batch) for batch in done.batches] == [4] * 6
    assert len(set(done.prompts)) == 24
    assert max(done.staleness) == 1, "nothing was carried over, the test proves too little"


def test_late_groups_are_put_back_and_come_again() -> None:
    done, service = run(steps=10, slots=64, oversample=2.0, supply=Synchronous())
    counts = counts_of(service, "a")
    assert counts.stale > 0
    assert len(set(done.prompts)) == len(done.prompts) == 40
    # Those that were put back come first: all prompts trained are the first ones of the order.
    assert counts.admitted - counts.stale <= 48


def test_what_is_put_back_trains_in_its_order_however_often_it_comes() -> None:
    """Of four prompts one trains: short ones would be overtaken by long ones for ever if what still runs came before what is finished."""
    done, service = run(steps=20, prompts=1, slots=64, oversample=4.0)
    order = PromptOrder(1000, 7, "a")
    assert [(epoch, uid) for _, epoch, uid in done.prompts] == [order.next() for _ in range(20)]
    assert counts_of(service, "a").stale > 0


@pytest.mark.parametrize("name", SUPPLIES)
def test_the_time_of_a_batch_is_that_in_which_it_was_generated(name: str) -> None:
    done, _ = run(supply=SUPPLIES[name], on_sync=OnSync.DRAIN, slots=64)
    walls = [stats.wall_s for stats in done.stats]
    if name == "sync":
        assert all(stats.wall_s == pytest.approx(stats.generation_s) for stats in done.stats)
    else:
        assert all(wall >= 5.0 for wall in walls[1:]), "training is a part of it"


@pytest.mark.parametrize(
    ("name", "how"), [*((name, how) for name in SUPPLIES for how in ({}, {"domains": "two, filtered"})), ("sync", {"oversample": 1.5})]
)
def test_what_is_finished_early_is_in_the_batch_and_stays_what_it_is(name: str, how: dict[str, Any]) -> None:
    """Looked at ten times a second. In most cases some of it is there long before the batch is."""

    async def main() -> tuple[list[int], list[int]]:
        filtered = {"filter": MOSTLY_RIGHT} if "domains" in how else {}
        domains = [make_domain(letter, number, max_tokens=400, **filtered) for number, letter in enumerate("ab" if filtered else "a")]
        settings = {key: value for key, value in how.items() if key != "domains"}
        service, _, _ = make_service(domains, [drawn()] * 2, slots=4, engine_slots=4, supply=SUPPLIES[name], **settings)
        early, sizes = [], []
        for _ in range(5):
            making = asyncio.create_task(service.next_batch(4))
            seen: dict[int, SampleGroup] = {}
            while not making.done():
                await asyncio.sleep(0.1)
                if not making.done():
                    found = {group.group: group for group in service.finished()}
                    assert seen.items() <= found.items(), "what is certain stays so"
                    seen = found
            groups = {group.group: group for group in (await making).groups}
            assert all(groups[number] is group for number, group in seen.items())
            assert service.finished() == []
            early.append(len(seen))
            sizes.append(len(groups))
            await asyncio.sleep(5.0)
        service.close()
        return early, sizes

    early, sizes = run_virtual(main())
    assert sizes == [4] * 5 and sum(early) > 0


@pytest.mark.parametrize("supply", [Synchronous(), Asynchronous(4)], ids=["sync", "async"])
def test_what_engines_do_not_take_is_started_later(supply: Supply) -> None:
    """An engine takes 5 requests, and one waits: a group of two that is started then is the last one, also where many are to be started
    at once, or many responses end at the same time."""
    most = 0

    async def main() -> None:
        nonlocal most
        service, router, _ = make_service([make_domain("a", prompts=1000, samples=2)], [by_tokens(25)], 4, engine_slots=4, supply=supply)

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, router.under_way("a"))
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        for version in range(3):
            await service.hold()
            service.set_version(version)
            assert len((await service.next_batch(8)).groups) == 8
        watching.cancel()
        service.close()

    run_virtual(main())
    assert 5 < most <= 5 + 2
