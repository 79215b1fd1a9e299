from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.config.schema.domains import GroupFilterConfig, RolloutConfig
from roll_lite.simulator.engine import EngineLimits, EngineRates
from roll_lite.simulator.scenario import Failures, Scenario, TrainerModel
from roll_lite.simulator.simulation import simulate
from roll_lite.simulator.workload import DomainModel, LogNormal, Quantiles

EQUAL = DomainModel("a", LogNormal(10, 10), max_tokens=100, prompt_tokens=4, samples_per_prompt=2)
LONG_TAIL = DomainModel("a", LogNormal(20, 200), max_tokens=300, prompt_tokens=4, samples_per_prompt=4)


def scenario(model: DomainModel = EQUAL, engines: int = 1, slots: int = 4, steps: int = 4, prompts: int = 2, **rollout: object) -> Scenario:
    settings = RolloutConfig(prompts_per_step=prompts, samples_per_prompt=model.samples_per_prompt, request_timeout_s=1e6, **rollout)
    return Scenario((model,), engines, EngineRates(1.0), EngineLimits(slots), settings, TrainerModel(3.0, 0.0, 2.0), steps=steps)


def test_a_synchronous_run_by_hand() -> None:
    """4 responses of 10 tokens at once: 10 s; 3 s of training; from the second step on 2 s of update before."""
    outcome = simulate(scenario())
    assert [step.end for step in outcome.steps] == pytest.approx([13, 28, 43, 58])
    assert [step.waited_s for step in outcome.steps] == pytest.approx([10] * 4)
    assert outcome.step_s == pytest.approx(15)
    assert [(phase.name, phase.start, phase.end) for phase in outcome.phases[:4]] == [
        ("train", pytest.approx(10), pytest.approx(13)),
        ("hold", pytest.approx(13), pytest.approx(13)),
        ("sync", pytest.approx(13), pytest.approx(15)),
        ("train", pytest.approx(25), pytest.approx(28)),
    ]
    # 4 slots, 4 responses: 10 passes are all that the work takes.
    assert (outcome.work_s, outcome.ideal_s, outcome.utilisation) == pytest.approx((10, 10, 2 / 3))
    assert outcome.tokens_per_s == pytest.approx(40 / 15)
    assert (outcome.staleness, outcome.staleness_max) == (0, 0)


def test_one_step_off_trains_beside_the_generation() -> None:
    """The next batch begins when one is handed out: 10 s of generation, in which 3 s of training, then the update."""
    outcome = simulate(scenario(steps=6, supply="one_step_off"))
    assert outcome.step_s == pytest.approx(12)
    assert (outcome.staleness, outcome.staleness_max) == (1, 1)


def test_an_asynchronous_run_keeps_its_engines_busy() -> None:
    """Half of the work of a step finds room while the trainer works: nothing but the update stops the engine."""
    outcome = simulate(scenario(steps=12, supply="async", max_staleness=2))
    assert outcome.step_s == pytest.approx(12, rel=0.1)
    assert outcome.staleness_max <= 2
    assert outcome.utilisation == pytest.approx(10 / 12, rel=0.1)


def test_a_trainer_that_is_slower_than_the_engines_is_the_limit() -> None:
    slow = replace(scenario(steps=8, supply="async", max_staleness=1), trainer=TrainerModel(30.0, 0.0, 2.0))
    outcome = simulate(slow)
    assert outcome.ideal_s == 30
    assert outcome.step_s == pytest.approx(32)


@pytest.mark.parametrize("settings", [{}, {"supply": "one_step_off"}, {"supply": "async", "max_staleness": 2, "on_sync": "abort"}])
def test_the_same_seed_is_the_same_run_and_another_one_is_not(settings: dict[str, object]) -> None:
    one = scenario(LONG_TAIL, engines=2, **settings)
    first, second, other = simulate(one, spans=True), simulate(one, spans=True), simulate(replace(one, seed=2))
    assert first.steps == second.steps and first.spans == second.spans
    assert first.steps != other.steps


def test_asynchronous_is_faster_where_lengths_have_a_tail() -> None:
    times = {
        supply: simulate(scenario(LONG_TAIL, engines=2, slots=8, steps=16, prompts=8, supply=supply, max_staleness=staleness)).step_s
        for supply, staleness in (("sync", 0), ("one_step_off", 1), ("async", 4))
    }
    assert times["async"] < times["one_step_off"] < times["sync"]


def test_an_engine_that_dies_is_missed_and_its_successor_helps() -> None:
    alone = simulate(replace(scenario(LONG_TAIL, engines=2, steps=12, prompts=6), failures=Failures(((50.0, 1),))))
    helped = simulate(replace(scenario(LONG_TAIL, engines=2, steps=12, prompts=6), failures=Failures(((50.0, 1),), start_s=30.0)))
    assert [number for _, number in alone.deaths] == [1] and alone.deaths[0][0] == 50
    assert alone.failed == alone.lost == 0
    assert all(step.samples == 24 for step in alone.steps)
    assert helped.step_s < alone.step_s


def test_drawn_failures_come_about_as_often_as_they_should() -> None:
    failures = Failures(mean_s=1000.0, mean_hang_s=2000.0, hang_s=5.0, start_s=10.0)
    outcome = simulate(replace(scenario(LONG_TAIL, engines=8, steps=30, prompts=8), failures=failures))
    expected = 8 * outcome.steps[-1].end / 1000
    assert len(outcome.deaths) - len(outcome.hangs) == pytest.approx(expected, rel=0.5)
    assert len(outcome.hangs) == pytest.approx(expected / 2, rel=0.5)


def test_a_lost_node_takes_all_its_engines_along() -> None:
    failures = Failures(mean_node_s=300.0, engines_per_node=4, start_s=20.0)
    outcome = simulate(replace(scenario(LONG_TAIL, engines=16, steps=20, prompts=16), failures=failures))
    by_time: dict[float, int] = {}
    for at, _ in outcome.deaths:
        by_time[at] = by_time.get(at, 0) + 1
    assert len(by_time) == pytest.approx(4 * outcome.steps[-1].end / 320, rel=0.5)
    assert set(by_time.values()) <= {1, 2, 3, 4} and list(by_time.values()).count(4) > len(by_time) / 2


def test_engines_that_joined_are_lost_with_their_own_node() -> None:
    """Two joined engines share a node, apart from the first ones' half empty node."""
    failures = Failures(mean_node_s=300.0, engines_per_node=2, start_s=20.0)
    one = replace(scenario(LONG_TAIL, engines=5, steps=30, prompts=16), failures=failures, joining=(10.0, 10.0))
    outcome = simulate(one)
    by_time: dict[float, set[int]] = {}
    for at, number in outcome.deaths:
        by_time.setdefault(at, set()).add(number)
    assert {5, 6} in by_time.values() and {4} in by_time.values()
    assert len(by_time) == pytest.approx(4 * outcome.steps[-1].end / 320, rel=0.5)
    assert outcome.steps[-1].engines == 7


def test_a_drained_node_is_the_same_one_after_losses() -> None:
    """Engine 0 returns as number 2. The engine that joins then, number 3, has the third node."""
    two = replace(scenario(LONG_TAIL, engines=2, steps=8, prompts=8), failures=Failures(((10.0, 0),), start_s=10.0))
    outcome = simulate(replace(two, joining=(30.0,), leaving=((60.0, 2),)), spans=True)
    assert 3 in {span.engine for span in outcome.spans} and {span.engine for span in outcome.spans if span.start > 200} == {1, 2}


def test_what_a_hanging_engine_has_waits_until_it_is_given_up() -> None:
    """Responses of 10 s on three engines. One hangs at 6 s and is given up at 13: what it had goes on from the 5 tokens that it has
    reported, until 18. The update that begins at 21 waits for the one that hangs at 20, until 27; it had nothing, so the next batch takes
    10 s."""
    failures = Failures(hangs=((6.0, 1), (20.0, 2)), hang_s=7.0)
    outcome = simulate(replace(scenario(engines=3, steps=2), failures=failures))
    assert (outcome.hangs, outcome.deaths) == ([(6.0, 1), (20.0, 2)], [(13.0, 1), (27.0, 2)])
    assert [step.end for step in outcome.steps] == pytest.approx([18 + 3, 27 + 10 + 3])
    assert outcome.failed == outcome.lost == 0


def test_requests_of_a_hanging_engine_may_run_out_of_their_time_before() -> None:
    """Two of four begun at 0 are cut off at 12, and the engine has another 10 s to answer that. They fail for good."""
    one = scenario(engines=2, steps=1)
    rollout = one.rollout.model_copy(update={"request_timeout_s": 12.0})
    outcome = simulate(replace(one, rollout=rollout, failures=Failures(hangs=((5.0, 1),), hang_s=100.0)))
    assert (outcome.failed, outcome.steps[0].samples, outcome.steps[0].waited_s) == (2, 2, pytest.approx(12 + 10))


def test_rewards_wait_for_each_other_where_workers_are_few() -> None:
    """4 responses after 10 s, each scored in 2 s: by one worker until 18 s, by three until 14, by four until 12."""
    waited = {
        workers: simulate(scenario(replace(EQUAL, reward_s=LogNormal(2, 2), reward_workers=workers), steps=1)).steps[0].waited_s
        for workers in (1, 3, 4, None)
    }
    assert waited == pytest.approx({1: 18, 3: 14, 4: 12, None: 12})


def test_engines_that_join_help_and_those_that_leave_finish_what_they_have() -> None:
    few = scenario(LONG_TAIL, engines=2, steps=10, prompts=8)
    spans = simulate(replace(few, joining=(60.0,), leaving=((200.0, 0),)), spans=True)
    assert spans.failed == spans.lost == 0
    served = {number: [span for span in spans.spans if span.engine == number] for number in (0, 1, 2)}
    assert min(span.start for span in served[2]) >= 60
    # Everything that ran in the one that left had begun before: a quarter more than its slots may have waited in it.
    late = [span for span in served[0] if span.start > 200]
    assert len(late) <= 1 and max(span.end for span in served[1]) > max(span.end for span in served[0])
    assert simulate(replace(few, joining=(60.0,))).step_s < simulate(few).step_s


def test_the_last_engine_stays_until_another_one_joins() -> None:
    two = scenario(LONG_TAIL, engines=2, steps=6, prompts=8)
    alone = simulate(replace(two, leaving=((30.0, 0), (30.0, 1))), spans=True)
    assert alone.lost == alone.failed == 0 and [step.engines for step in alone.steps][-1] == 1
    relieved = simulate(replace(two, joining=(60.0,), leaving=((30.0, 0), (30.0, 1))), spans=True)
    assert {span.engine for span in relieved.spans if span.start > 100} == {2}
    assert relieved.utilisation < 1


def test_filtered_groups_are_counted_and_replaced() -> None:
    model = replace(EQUAL, samples_per_prompt=8, all_right=0.3, all_wrong=0.3)
    outcome = simulate(scenario(model, slots=16, steps=6, prompts=8, filter=GroupFilterConfig(name="accuracy")))
    assert all(sum(step.groups.values()) == 8 for step in outcome.steps)
    # 60% of the prompts teach nothing, and two groups of 9 among the others.
    assert outcome.filtered / (outcome.filtered + 48) == pytest.approx(0.6 + 0.4 * 2 / 9, abs=0.1)


def test_shares_of_domains_are_kept() -> None:
    short, long = replace(EQUAL, name="short", share=3.0), replace(EQUAL, name="long", lengths=Quantiles([50, 60]))
    outcome = simulate(replace(scenario(steps=10, prompts=4, supply="async", max_staleness=1), domains=(short, long)))
    assert outcome.shares == {"short": 0.75, "long": 0.25}


def test_the_cache_limits_how_many_run_on_average() -> None:
    """Prompts of 4, responses of 10: a running one holds 4 + 5 tokens on average."""
    one = scenario(slots=64)
    assert replace(one, limits=EngineLimits(64, 90)).mean_slots == 10
    assert one.mean_slots == 64


def test_log_probs_of_what_is_finished_begin_beside_the_generation() -> None:
    """Three responses of 10 tokens and one of 50, prompts of 4: at 10 s the pass over 42 tokens begins, half of their 0.1 s each; at 50 s
    that over the 54 of the other, and the training on all 96, 0.05 s each."""
    short = replace(EQUAL, name="short", share=3.0, samples_per_prompt=1)
    long = replace(EQUAL, name="long", lengths=LogNormal(50, 50), samples_per_prompt=1)
    one = replace(scenario(steps=1, prompts=4), domains=(short, long), trainer=TrainerModel(token_s=0.1, log_probs=0.5))
    early = replace(one, rollout=one.rollout.model_copy(update={"stream_log_probs": True}))
    assert simulate(one).steps[0].end == pytest.approx(50 + 9.6)
    outcome = simulate(early)
    assert outcome.steps[0].waited_s == pytest.approx(50)
    assert outcome.steps[0].end == pytest.approx(50 + 2.7 + 4.8)
    assert outcome.early == 3
    # With 2 s a token the pass takes until 52 or 53, for what is finished is looked at once a second.
    slow = simulate(replace(early, trainer=TrainerModel(token_s=2.0, log_probs=0.5)))
    assert slow.steps[0].end == pytest.approx(52.5 + 54 + 96, abs=0.6)


def test_engines_that_rest_take_their_time_in_every_step() -> None:
    """10 s of generation, 3 of training, 4 of moving; 2 of update before all but the first."""
    outcome = simulate(replace(scenario(), offload_s=4.0))
    assert [step.end for step in outcome.steps] == pytest.approx([17, 36, 55, 74])


@pytest.mark.parametrize("rests", [True, False])
def test_nothing_runs_in_engines_that_rest_while_the_trainer_works(rests: bool) -> None:
    """What is under way beyond its batch goes on where they stay."""
    one = scenario(LONG_TAIL, oversample=2.0, max_staleness=1)
    outcome = simulate(replace(one, offload_s=4.0 if rests else None), spans=True)
    trained = [phase for phase in outcome.phases if phase.name == "train"]
    beside = [span for span in outcome.spans for phase in trained if span.start < phase.end - 1e-6 and span.end > phase.start + 1e-6]
    assert (not beside) is rests


def test_slow_rewards_hold_back_what_is_started_for_later_batches() -> None:
    """Groups of two, two in a batch, room for three batches. With one worker groups of later batches begin until four samples, as many as a
    batch holds, will wait beside the one that is scored: two groups that are due, and three."""
    slow = replace(EQUAL, reward_s=LogNormal(20, 20))
    settings = {"slots": 12, "steps": 3, "supply": "async", "max_staleness": 2}
    begun = {}
    for workers in (None, 1):
        outcome = simulate(scenario(replace(slow, reward_workers=workers), **settings), spans=True)  # type: ignore[arg-type]
        begun[workers] = sum(span.start == 0 for span in outcome.spans)
        assert (outcome.behind_s > 0) is (workers == 1)
    assert begun == {None: 12, 1: 10}


def test_a_domains_minimum_is_in_every_batch_and_its_epochs_end() -> None:
    """One of ten places by its share, two by its minimum: 20 prompts last for ten batches, and the other domain takes their places."""
    rare = replace(EQUAL, name="rare", least=2, prompts=10, epochs=2)
    often = replace(EQUAL, name="often", share=9.0)
    one = replace(scenario(slots=64, steps=12, prompts=10), domains=(rare, often))
    assert [step.groups["rare"] for step in simulate(one).steps] == [2] * 10 + [0, 0]
    outcome = simulate(replace(one, domains=(rare, replace(often, prompts=40, epochs=1))))
    # 40 and 20 prompts: five batches of 8 and 2, then one of what is left.
    assert [tuple(step.groups.values()) for step in outcome.steps] == [(2, 8)] * 5 + [(10, 0)]
    assert outcome.exhausted


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_nothing_is_lost_or_doubled(data: st.DataObject) -> None:
    """Under any policy, with engines that die, hang, start: every step has its groups, every sample is there or told, none is too old."""
    supply = data.draw(st.sampled_from(["sync", "one_step_off", "async"]))
    staleness = {"sync": 0, "one_step_off": 1}.get(supply) or data.draw(st.integers(0 if supply == "sync" else 1, 3))
    on_sync = data.draw(st.sampled_from(["drain", "pause", "abort"]))
    one = scenario(
        LONG_TAIL,
        engines=data.draw(st.integers(1, 3)),
        slots=data.draw(st.integers(1, 6)),
        steps=5,
        prompts=data.draw(st.integers(1, 5)),
        supply=supply,
        max_staleness=0 if supply == "sync" else staleness,
        on_sync=on_sync,
    )
    cached = data.draw(st.sampled_from([None, 700]))
    ends = data.draw(st.lists(st.tuples(st.booleans(), st.floats(1, 400), st.integers(0, 2)), max_size=2))
    deaths, hangs = [tuple((at, number) for hung, at, number in ends if hung is kind) for kind in (False, True)]
    one = replace(one, limits=replace(one.limits, cached_tokens=cached), failures=Failures(deaths, hangs=hangs, start_s=5.0))
    if one.engines == len({number for _, _, number in ends if number < one.engines}):
        one = replace(one, failures=Failures())  # the last engine's death ends a run
    outcome = simulate(one, spans=True)
    prompts = one.rollout.prompts_per_step
    assert [sum(step.groups.values()) for step in outcome.steps] == [prompts] * 5
    missing = [prompts * 4 - step.samples for step in outcome.steps]
    # A sample whose engines died twice is not given to a third one; it is told as failed.
    assert min(missing) >= 0 and sum(missing) <= outcome.failed <= (0 if len(outcome.deaths) < 2 else 99)
    assert all(step.staleness_max <= (0 if supply == "sync" else staleness) for step in outcome.steps)
    busy = Counter[tuple[int, int]]()
    for span in sorted(outcome.spans, key=lambda span: span.start):
        place = (span.engine, span.slot)
        assert span.start >= busy[place] - 1e-6, "two requests in one slot"
        busy[place] = span.end  # type: ignore[assignment]


def test_staleness_of_full_engines_is_that_of_the_closed_form() -> None:
    """Applied Compute: running x (longest sample of a group / mean) / batch + utilisation, where training waits for generation."""
    lengths, batch, running, group, utilisation = LogNormal(400, 1200), 120, 120, 8, 0.67
    shares = [(place + 0.5) / 20_000 for place in range(20_000)]
    mean = sum(map(lengths.draw, shares)) / len(shares)
    longest = sum(lengths.draw(share ** (1 / group)) for share in shares) / len(shares)
    trainer = TrainerModel(overhead_s=utilisation * batch * mean / running)
    one = scenario(DomainModel("a", lengths, max_tokens=10**6, prompt_tokens=2, samples_per_prompt=group), steps=60, prompts=batch // group)
    rollout = one.rollout.model_copy(update={"supply": "async", "max_staleness": 20, "request_timeout_s": 1e9, "samples_per_prompt": group})
    full = replace(one, engines=running // 8, limits=EngineLimits(8), rates=EngineRates(1.0), rollout=rollout, trainer=trainer)
    assert simulate(full).staleness == pytest.approx(running * longest / mean / batch + utilisation, rel=0.05)
