from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_support import (
    Prompts,
    TimedReward,
    all_counts,
    attempt_of,
    by_tokens,
    counts_of,
    make_domain,
    make_service,
    prompt_of,
    schedulers_of,
    tokens_of,
)
from support_scripted import Response, Script

from roll_lite.data.prompts import PromptOrder
from roll_lite.data.samples import EpisodeRecord, GenerationRequest, Prompt, RewardInput, SampleGroup, SampleOutcome, Sampling
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.domain import DomainFailed
from roll_lite.scheduler.filters import FUNCTION, GroupFilter, LeftOut
from roll_lite.scheduler.router import NoEngineLeft
from roll_lite.scheduler.runner import Conversation
from roll_lite.scheduler.service import RolloutResult, RolloutService, accepted
from roll_lite.simulator.clock import run_virtual


def drawn(result: RolloutResult) -> list[tuple[str, int, int]]:
    return [(group.domain, group.samples[0].id.epoch, group.samples[0].id.prompt_uid) for group in result.groups]


def test_samples_that_have_not_started_yet_end_with_their_group() -> None:
    """Given up in the moment of their admission: nothing of them comes to an engine."""

    async def main() -> None:
        domains = [make_domain("a", validation=Prompts("a", 0, 3))]
        for ask in (lambda service: service.next_batch(4), lambda service: service.evaluate(2, {"a": domains[0].sampling})):
            service, router, _ = make_service(domains)
            asked = asyncio.ensure_future(ask(service))
            await asyncio.sleep(0)
            service.close()
            await asyncio.sleep(0.01)
            assert not [task for task in asyncio.all_tasks() if task.get_name() == "a"] and not router._at_engines
            with pytest.raises(RuntimeError, match="closed"):
                await asked

    run_virtual(main())


def test_a_batch_of_another_size_is_refused() -> None:
    """Admission counts places in batches of one size; with others it admitted a multiple of what was asked for."""

    async def main() -> None:
        service, _, _ = make_service([make_domain("a", 0)])
        await service.next_batch(4)
        with pytest.raises(AssertionError, match="a batch of 8 prompts after batches of 4"):
            await service.next_batch(8)

    run_virtual(main())


def test_quotas_are_exact_over_a_run_and_groups_are_whole() -> None:
    async def main() -> tuple[Counter[str], Any]:
        domains = [make_domain("a", 0, share=5), make_domain("b", 1, share=3, samples=2), make_domain("c", 2, share=2)]
        service, _, _ = make_service(domains)
        counts: Counter[str] = Counter()
        for _ in range(30):
            result = await service.next_batch(7)
            assert len(result.groups) == 7
            for group in result.groups:
                assert len(group.samples) == (2 if group.domain == "b" else 4)
                assert [sample.id.index for sample in group.samples] == list(range(len(group.samples)))
            counts.update(group.domain for group in result.groups)
        return counts, result.stats

    counts, stats = run_virtual(main())
    assert counts == {"a": 105, "b": 63, "c": 42}
    assert stats.domains["a"].requested_share == pytest.approx(0.5)
    assert stats.domains["a"].realised_share == pytest.approx(0.5)


def test_prompts_come_in_the_orders_order_once_per_epoch() -> None:
    async def main() -> list[tuple[str, int, int]]:
        service, _, _ = make_service([make_domain("a", prompts=10)])
        return [row for _ in range(5) for row in drawn(await service.next_batch(4))]

    order = PromptOrder(10, 7, "a")
    assert run_virtual(main()) == [("a", *order.next()) for _ in range(20)]


def test_rewards_run_while_others_generate() -> None:
    async def main() -> tuple[list[float], RolloutResult]:
        rewards = TimedReward(seconds=1.0)

        def script(request: GenerationRequest) -> Response:
            return Response(1 + 4 * int(request.request_id.split("/")[4]), 1.0)

        service, _, _ = make_service([make_domain("a", rewards=rewards)], [script])
        result = await service.next_batch(1)
        return rewards.started, result

    started, result = run_virtual(main())
    stats, samples = result.stats, result.groups[0].samples
    # samples of 1, 5, 9, 13 tokens: each is scored when it is done, only the last score is not hidden
    assert started == pytest.approx([1, 5, 9, 13])
    assert [sample.asked for sample in samples] == pytest.approx([0] * 4)
    assert [sample.generated for sample in samples] == pytest.approx([1, 5, 9, 13])
    assert [sample.scored for sample in samples] == pytest.approx([2, 6, 10, 14])
    assert stats.wall_s == pytest.approx(14)
    assert stats.generation_s == pytest.approx(13)
    assert stats.reward_tail_s == pytest.approx(1)
    assert stats.domains["a"].generation_s == pytest.approx(28)
    assert stats.domains["a"].reward_s == pytest.approx(4)
    assert stats.domains["a"].response_tokens == 28


def test_the_progress_of_a_batch_is_told_while_it_is_made() -> None:
    async def main() -> list[dict[str, Any]]:
        rewards = TimedReward(seconds=1.0)
        service, _, _ = make_service([make_domain("a", rewards=rewards)], [lambda _: Response(4, 1.0)])
        seen = [service.progress()]
        batch = asyncio.create_task(service.next_batch(2))
        for seconds in (1.0, 3.5, 5.0):
            await asyncio.sleep(seconds)
            seen.append(service.progress())
        await batch
        return seen

    before, *told = run_virtual(main())
    assert before == {}
    assert told == [{"a": (0, 0, 8)}, {"a": (8, 0, 8)}, {"a": (8, 8, 8)}]


def failing(rate: float) -> Script:
    return lambda request: Response(
        1 + stable_hash("length", request.request_id) % 20,
        0.01,
        error="lost" if stable_hash("fate", request.request_id) % 1000 < rate * 1000 else None,
    )


@settings(max_examples=40, deadline=None)
@given(
    generation=st.floats(0, 0.6), reward=st.floats(0, 0.6), retries=st.integers(0, 2), waves=st.booleans(), batches=st.integers(1, 4),
    salt=st.integers(0, 10**6), slots=st.sampled_from([None, 3]),
)  # fmt: skip
def test_every_prompt_ends_once_whatever_fails(
    generation: float, reward: float, retries: int, waves: bool, batches: int, salt: int, slots: int | None
) -> None:
    def reward_fails(item: RewardInput, asked: int) -> bool:
        return stable_hash(salt, item.prompt, asked, item.response) % 1000 < reward * 1000

    async def main() -> None:
        domains = [
            make_domain("a", 0, share=2, rewards=TimedReward(0.01, reward_fails), samples=3, prompts=50),
            make_domain("b", 1, share=1, rewards=TimedReward(0.02, reward_fails), samples=1, prompts=50),
        ]
        service, router, _ = make_service(domains, [failing(generation)] * 2, slots=slots, retries=retries, seed=salt, deterministic=waves)
        delivered: Counter[tuple[str, int, int]] = Counter()
        lost = 0
        try:
            for _ in range(batches):
                result = await service.next_batch(6)
                assert Counter(group.domain for group in result.groups) == {"a": 4, "b": 2}
                delivered.update(drawn(result))
                lost += sum(domain.lost_groups for domain in result.stats.domains.values())
                samples = [sample for group in result.groups for sample in group.samples]
                for sample in samples:
                    assert (sample.score is not None) == (sample.outcome is SampleOutcome.ACCEPTED)
                    assert (sample.failure is not None) == (sample.outcome is SampleOutcome.FAILED)
                assert all(any(s.outcome is SampleOutcome.ACCEPTED for s in group.samples) for group in result.groups)
        except DomainFailed:
            service.close()
            return
        assert max(delivered.values()) == 1
        counts = all_counts(service)
        assert sum(count.admitted for count in counts) == sum(delivered.values()) + lost
        assert sum(count.lost for count in counts) == lost
        assert all(load.tokens == pytest.approx(0) and load.requests == 0 for load in router.engines)
        # nothing is drawn and forgotten: what was drawn is delivered or lost
        for name in schedulers_of(service):
            order = PromptOrder(50, 7, name)
            rows = {(name, *order.next()) for _ in range(counts_of(service, name).admitted)}
            assert {row for row in delivered if row[0] == name} <= rows

    run_virtual(main())


def test_a_retry_is_a_new_attempt_with_another_seed() -> None:
    seen: list[tuple[int, int | None]] = []

    def script(request: GenerationRequest) -> Response:
        seen.append((attempt_of(request), request.sampling.seed))
        return Response(5, 0.01, error="out of cache" if attempt_of(request) < 2 else None)

    async def main() -> RolloutResult:
        service, _, _ = make_service([make_domain("a", samples=1)], [script], retries=2, seed=3)
        return await service.next_batch(1)

    result = run_virtual(main())
    assert [attempt for attempt, _ in seen] == [0, 1, 2]
    assert len({seed for _, seed in seen}) == 3
    assert None not in {seed for _, seed in seen}
    (sample,) = result.groups[0].samples
    assert (sample.id.attempt, sample.outcome, sample.transcript.response_length) == (2, SampleOutcome.ACCEPTED, 5)
    assert result.stats.domains["a"].retries == {"generation: out of cache": 2}


def test_seeds_are_set_only_when_asked_for() -> None:
    seeds: list[int | None] = []

    def script(request: GenerationRequest) -> Response:
        seeds.append(request.sampling.seed)
        return Response(1)

    async def main() -> None:
        service, _, _ = make_service([make_domain("a")], [script])
        await service.next_batch(2)

    run_virtual(main())
    assert seeds == [None] * 8


def test_failed_samples_are_reported_and_never_train_as_zeros() -> None:
    def script(request: GenerationRequest) -> Response:
        return Response(5, 0.01, error="bad luck" if request.request_id.split("/")[4] in "13" else None)

    async def main() -> RolloutResult:
        service, _, _ = make_service([make_domain("a")], [script], retries=1)
        return await service.next_batch(2)

    result = run_virtual(main())
    group = result.groups[0]
    assert [sample.outcome for sample in group.samples] == [SampleOutcome.ACCEPTED, SampleOutcome.FAILED] * 2
    assert group.samples[1].failure == "generation: bad luck"
    assert group.samples[1].score is None
    training = accepted(result.groups)
    assert [[sample.id.index for sample in group.samples] for group in training] == [[0, 2], [0, 2]]
    stats = result.stats.domains["a"]
    assert (stats.accepted, stats.failed, stats.failures) == (4, 4, {"generation: bad luck": 4})


def test_a_failed_score_is_asked_for_again_and_then_a_failure() -> None:
    async def batch(retries: int) -> RolloutResult:
        rewards = TimedReward(0.1, fails=lambda item, asked: item.prompt.endswith("0") and asked <= 2)
        domain = make_domain("a", rewards=rewards, reward_retries=retries, prompts=1, samples=1)
        service, _, _ = make_service([domain])
        return await service.next_batch(1)

    result = run_virtual(batch(2))
    assert result.stats.domains["a"].retries == {"the judge is away": 2}
    assert result.groups[0].samples[0].id.attempt == 0  # the same response, scored again
    result = run_virtual(batch(1))
    # The first group ran out of retries and was replaced by the same prompt's next epoch, whose reward works by then.
    assert result.stats.domains["a"].lost_groups == 1
    assert result.groups[0].samples[0].id.epoch == 1
    assert result.stats.domains["a"].failures == {"the judge is away": 1}


def test_a_lost_group_is_replaced_so_that_the_batch_stays_exact() -> None:
    def script(request: GenerationRequest) -> Response:
        return Response(5, 0.01, error="cursed" if prompt_of(request)[1] % 3 == 0 else None)

    async def main() -> RolloutResult:
        service, _, _ = make_service([make_domain("a", 0), make_domain("b", 1)], [script], retries=0)
        return await service.next_batch(20)

    result = run_virtual(main())
    assert Counter(group.domain for group in result.groups) == {"a": 10, "b": 10}
    assert all(group.samples[0].id.prompt_uid % 3 for group in result.groups)
    assert sum(domain.lost_groups for domain in result.stats.domains.values()) > 0


def test_groups_that_do_not_train_come_with_the_batch_where_somebody_wants_them() -> None:
    def script(request: GenerationRequest) -> Response:
        return Response(5, 0.01, error="cursed" if prompt_of(request)[1] % 3 == 0 else None)

    def odd(group: SampleGroup) -> LeftOut | None:
        return LeftOut(FUNCTION, "odd") if group.samples[0].id.prompt_uid % 2 else None

    async def main(**how: Any) -> list[RolloutResult]:
        service, _, _ = make_service([make_domain("a", 0, filter=GroupFilter(odd))], [script], retries=0, **how)
        return [await service.next_batch(10) for _ in range(3)]

    results = run_virtual(main(keep_left_out=True))
    lost = [group for result in results for group in result.left_out if group.samples[0].id.prompt_uid % 3 == 0]
    filtered = [group for result in results for group in result.left_out if group.samples[0].id.prompt_uid % 3]
    assert {(one.outcome, one.failure) for group in filtered for one in group.samples} == {(SampleOutcome.FILTERED, "odd")}
    assert all(one.score is not None and one.transcript.tokens is not None for group in filtered for one in group.samples)
    assert {one.outcome for group in lost for one in group.samples} == {SampleOutcome.FAILED}
    counted = [result.stats.domains["a"] for result in results]
    assert len(lost) == sum(stats.lost_groups for stats in counted) > 0
    assert len(filtered) == sum(stats.filtered.total() for stats in counted) > 0
    assert not any(result.left_out for result in run_virtual(main())), "their tokens are let go"


@pytest.mark.parametrize(("lost", "ends"), [(7, True), (6, False)])
def test_a_domain_that_loses_seven_of_eight_prompts_is_an_error_with_the_commonest_cause(lost: int, ends: bool) -> None:
    """One after the other, so that there are never eight in a row."""
    asked = 0

    def script(request: GenerationRequest) -> Response:
        nonlocal asked
        asked += 1
        cause = "no memory" if asked % 8 else "no luck"
        return Response(5, 0.01, error=cause if asked % 8 < lost else None)

    async def main() -> None:
        service, _, _ = make_service([make_domain("a", samples=1)], [script], retries=0)
        for _ in range(20):
            await service.next_batch(1)

    if not ends:
        run_virtual(main())
        return
    with pytest.raises(DomainFailed, match=r"domain a: of the last 32 prompts 28 yielded .* can train, 24 of them: generation: no memory"):
        run_virtual(main())


def test_a_domain_that_only_fails_is_an_error_with_the_first_cause() -> None:
    asked = 0

    def script(request: GenerationRequest) -> Response:
        nonlocal asked
        asked += 1
        return Response(5, 0.01, error=f"no template {asked}" if prompt_of(request)[0] == 1 else None)

    async def main() -> None:
        service, _, _ = make_service([make_domain("good", 0), make_domain("bad", 1)], [script], retries=0)
        await service.next_batch(4)

    with pytest.raises(DomainFailed, match=r"domain bad: of the last 8 prompts 8 .*, 1 of them: generation: no template"):
        run_virtual(main())


def test_a_request_that_takes_too_long_is_a_failure() -> None:
    def script(request: GenerationRequest) -> Response:
        return Response(10, 1.0, delay_s=0.0 if attempt_of(request) else 1e6)

    async def main() -> tuple[RolloutResult, float, int]:
        service, _, engines = make_service([make_domain("a", samples=2)], [script], timeout_s=50.0, retries=1)
        result = await service.next_batch(1)
        await asyncio.sleep(0.1)
        return result, result.stats.wall_s, (await engines[0].health()).running

    result, wall, running = run_virtual(main())
    assert wall == pytest.approx(60.0)
    assert running == 0
    assert result.stats.domains["a"].retries == {"generation: time-out: the engine began with nothing within 50 s": 2}


def test_the_last_engines_death_ends_the_batch_with_its_cause() -> None:
    async def main() -> None:
        service, _, _ = make_service([make_domain("a")], [lambda request: Response(3, 1.0, error="segmentation fault", fatal=True)] * 2)
        await service.next_batch(4)

    with pytest.raises(NoEngineLeft, match="engine 0: segmentation fault; engine 1: segmentation fault"):
        run_virtual(main())


def test_one_engines_death_costs_no_sample() -> None:
    def mortal(request: GenerationRequest) -> Response:
        return Response(5, 1.0, fatal=True)

    async def main() -> RolloutResult:
        service, _, _ = make_service([make_domain("a")], [mortal, by_tokens(5)], retries=0)
        return await service.next_batch(6)

    stats = run_virtual(main()).stats.domains["a"]
    assert (stats.accepted, stats.failed, dict(stats.retries)) == (24, 0, {})


# ---------------------------------------------------------------- repeatability


def uneven(jitter: float) -> list[Script]:
    """Two engines whose timing, but not whose outcomes, depends on `jitter`."""

    def script(request: GenerationRequest) -> Response:
        fate = stable_hash("fate", request.sampling.seed) % 10
        slowness = 0.01 + jitter * (stable_hash(request.request_id, jitter) % 7)
        return Response(1 + fate, slowness, error="lost" if fate < 7 else None)

    return [script, script]


async def deterministic_run(service: RolloutService, batches: int) -> list[Any]:
    rows = []
    for _ in range(batches):
        result = await service.next_batch(5)
        rows.append([(sample.id, tokens_of(sample), sample.outcome) for group in result.groups for sample in group.samples])
    return rows


def deterministic_service() -> tuple[list[Any], dict[str, Any]]:
    return [make_domain("a", 0, share=3, samples=2), make_domain("b", 1, share=2, samples=2)], {
        "retries": 1,
        "seed": 11,
        "deterministic": True,
    }


def test_deterministic_runs_repeat_whatever_the_timing() -> None:
    async def main(jitter: float) -> list[Any]:
        domains, options = deterministic_service()
        service, _, _ = make_service(domains, uneven(jitter), slots=3, **options)
        return await deterministic_run(service, 6)

    runs = [run_virtual(main(jitter)) for jitter in (0.0, 0.013, 0.5)]
    assert runs[0] == runs[1] == runs[2]
    attempts = {row[0].attempt for batch in runs[0] for row in batch}
    assert attempts == {0, 1}
    numbers = [[row[0].group for row in batch] for batch in runs[0]]
    assert all(batch == sorted(batch) for batch in numbers)
    assert numbers[-1][-1] > 29, "no group was lost and replaced, the test proves too little"


def test_waves_reach_the_engine_whole_and_sorted() -> None:
    waves: list[list[str]] = []

    async def main() -> None:
        domains, options = deterministic_service()
        service, _, engines = make_service(domains, uneven(0.1), **options)
        for engine in engines:
            pause, generate = engine.pause, engine.generate

            def paused(mode: Any, pause: Any = pause) -> Any:
                waves.append([])
                return pause(mode)

            def watched(request: Any, report: Any, generate: Any = generate) -> Any:
                waves[-1].append(request.request_id)
                return generate(request, report)

            engine.pause, engine.generate = paused, watched  # type: ignore[method-assign, assignment]
        await service.next_batch(5)

    run_virtual(main())
    first = waves[:2]
    assert sum(map(len, first)) == 10
    assert all(wave == sorted(wave) for wave in waves)
    later = {name.rsplit("/", 1)[1] for wave in waves[2:] for name in wave}
    assert "1" in later


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_resumed_run_continues_exactly(stop_after: int) -> None:
    async def whole() -> list[Any]:
        domains, options = deterministic_service()
        service, _, _ = make_service(domains, uneven(0.01), **options)
        return await deterministic_run(service, 6)

    async def part(state: dict[str, Any] | None, batches: int) -> tuple[list[Any], dict[str, Any]]:
        domains, options = deterministic_service()
        service, _, _ = make_service(domains, uneven(0.3), **options)
        if state is not None:
            service.load_state_dict(state)
        rows = await deterministic_run(service, batches)
        return rows, json.loads(json.dumps(service.state_dict()))

    first, state = run_virtual(part(None, stop_after))
    second, _ = run_virtual(part(state, 6 - stop_after))
    assert first + second == run_virtual(whole())


def test_a_resumed_run_knows_the_mix_without_the_domains_that_have_left_it() -> None:
    """Among those that are left the account of shares goes on, and those that have left keep their epoch."""

    def service() -> RolloutService:
        domains = [make_domain("a", 0, prompts=2, epochs=2), make_domain("b", 1, share=3), make_domain("c", 2, share=2)]
        return make_service(domains, seed=11, deterministic=True)[0]

    async def mix(state: dict[str, Any] | None, batches: int) -> tuple[list[tuple[list[str], int]], dict[str, Any]]:
        one = service()
        if state is not None:
            one.load_state_dict(state)
        results = [await one.next_batch(3) for _ in range(batches)]
        given = [([group.domain for group in result.groups], result.stats.domains["a"].epoch) for result in results]
        return given, json.loads(json.dumps(one.state_dict()))

    whole, _ = run_virtual(mix(None, 16))
    assert not any("a" in batch for batch, _ in whole[10:]) and whole[-1][1] == 1
    for stop_after in range(10, 15):
        first, state = run_virtual(mix(None, stop_after))
        assert first + run_virtual(mix(state, 16 - stop_after))[0] == whole


def test_prompts_in_flight_are_taken_up_again_by_a_resumed_run() -> None:
    async def interrupted() -> tuple[dict[str, Any], set[Any]]:
        service, _, _ = make_service([make_domain("a", 0), make_domain("b", 1)], [by_tokens(10, 1.0)])
        delivered = set(drawn(await service.next_batch(4)))
        waiting = asyncio.create_task(service.next_batch(4))
        await asyncio.sleep(5)
        state = service.state_dict()
        waiting.cancel()
        service.close()
        return state, delivered

    async def resumed(state: dict[str, Any]) -> set[Any]:
        service, _, _ = make_service([make_domain("a", 0), make_domain("b", 1)])
        service.load_state_dict(state)
        assert service.state_dict()["domains"] == state["domains"]  # a run that is stopped again at once loses nothing
        return set(drawn(await service.next_batch(4)))

    state, delivered = run_virtual(interrupted())
    continued = run_virtual(resumed(state))
    expected = set()
    for name in ("a", "b"):
        order = PromptOrder(1000, 7, name)
        expected |= {(name, *order.next()) for _ in range(4)}
    assert delivered | continued == expected
    assert not delivered & continued


# ---------------------------------------------------------------- validation


def test_validation_takes_every_held_out_prompt_and_reports_failures() -> None:
    seen: set[tuple[float, int]] = set()

    def script(request: GenerationRequest) -> Response:
        seen.add((request.sampling.temperature, request.sampling.top_p, request.sampling.max_tokens))
        return Response(5, 0.01, error="bad luck" if prompt_of(request) == (1, 2) else None)

    async def main() -> tuple[RolloutResult, RolloutResult]:
        domains = [
            make_domain("a", 0, validation=Prompts("a", 0, 7)),
            make_domain("b", 1, validation=Prompts("b", 1, 5)),
            make_domain("c", 2),
        ]
        service, _, _ = make_service(domains, [script], retries=0)
        before = service.state_dict()
        sampling = {"a": Sampling(0.0, max_tokens=64), "b": Sampling(0.6, max_tokens=9, top_p=0.9)}
        result = await service.evaluate(samples_per_prompt=2, sampling=sampling)
        assert service.state_dict() == before
        return result, await service.next_batch(1)

    result, batch = run_virtual(main())
    assert [(group.domain, group.samples[0].id.prompt_uid) for group in result.groups] == [("a", i) for i in range(7)] + [
        ("b", i) for i in range(5)
    ]
    assert all(len(group.samples) == 2 for group in result.groups)
    assert all(sample.id.epoch == -1 for group in result.groups for sample in group.samples)
    stats = result.stats.domains["b"]
    assert (stats.accepted, stats.failed, stats.lost_groups, stats.failures) == (8, 2, 1, {"generation: bad luck": 2})
    assert seen == {(0.0, 1.0, 64), (0.6, 0.9, 9), (1.0, 1.0, 64)}
    assert batch.groups[0].group == 0
    assert sum(domain.accepted for domain in batch.stats.domains.values()) == 4


def test_a_validation_without_a_single_sample_is_an_error() -> None:
    async def main() -> None:
        domains = [make_domain("a", validation=Prompts("a", 0, 3))]
        service, _, _ = make_service(domains, [lambda request: Response(1, error="too long")], retries=0)
        await service.evaluate(1, {"a": Sampling(1.0, 64)})

    with pytest.raises(DomainFailed, match="domain a: every sample of the validation failed; first cause: generation: too long"):
        run_virtual(main())


def test_validation_repeats_in_deterministic_runs() -> None:
    async def main(jitter: float) -> list[Any]:
        domains = [make_domain("a", 0, validation=Prompts("a", 0, 9))]
        service, _, _ = make_service(domains, uneven(jitter), retries=1, seed=5, deterministic=True)
        result = await service.evaluate(2, {"a": Sampling(1.0, 64)})
        return [(sample.id, tokens_of(sample), sample.outcome) for group in result.groups for sample in group.samples]

    assert run_virtual(main(0.0)) == run_virtual(main(0.7))


def test_a_slow_environment_takes_no_engine_from_other_domains() -> None:
    """While its episodes wait, the engine answers the other domain's requests: these are done as early as with a quick environment."""

    def last_of(seconds: float) -> dict[str, float]:
        async def waits(prompt: Prompt, conversation: Conversation) -> None:
            await conversation.respond(prompt.token_ids, 0)
            await asyncio.sleep(seconds)
            await conversation.respond((1, 2), 1, after=0)
            conversation.end(EpisodeRecord((), (0.0, 1.0), 1.0))

        async def main() -> RolloutResult:
            domains = [make_domain("a", 0, episode=waits), make_domain("b", 1)]
            service, *_ = make_service(domains, [by_tokens(10, 1.0)], slots=4, engine_slots=4)
            result = await service.next_batch(8)
            service.close()
            return result

        found: dict[str, float] = {}
        for group in run_virtual(main()).groups:
            found[group.domain] = max(found.get(group.domain, 0.0), *(sample.generated for sample in group.samples))
        return found

    quick, slow = last_of(0.0), last_of(10_000.0)
    assert slow["a"] > 10_000.0 > 1000.0 > quick["b"] >= slow["b"] > 0.0, (quick, slow)
