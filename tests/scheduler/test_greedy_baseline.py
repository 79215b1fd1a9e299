"""The greedy sample that ReMax compares with: one more of each prompt, which its group cannot do without."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_support import Prompts, TimedReward, attempt_of, counts_of, make_domain, make_service, prompt_of, tokens_of
from support_scripted import Response, Script

from roll_lite.data.samples import GenerationRequest, RewardInput, Sample, SampleGroup, SampleOutcome, Sampling
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.domain import DomainFailed, greedy
from roll_lite.scheduler.service import RolloutResult, accepted
from roll_lite.simulator.clock import run_virtual


def is_greedy(request: GenerationRequest) -> bool:
    return request.sampling.temperature == 0


def baseline_of(group: SampleGroup) -> Sample:
    assert group.baseline is not None
    return group.baseline


def one_batch(script: Script, prompts: int = 2, rewards: TimedReward | None = None, **options: Any) -> RolloutResult:
    async def main() -> RolloutResult:
        service, _, _ = make_service([make_domain("a", samples=3, greedy_baseline=True, rewards=rewards)], [script], **options)
        return await service.next_batch(prompts)

    return run_virtual(main())


def test_greedy_sampling_truncates_nothing_and_keeps_the_lengths() -> None:
    sampling = Sampling(0.7, 50, top_p=0.9, top_k=5, min_p=0.1, min_tokens=3, stop=("end",), keep_mask=True)
    assert greedy(sampling) == Sampling(0.0, 50, min_tokens=3, stop=("end",))


def test_every_prompt_gets_one_more_sample_which_is_not_among_its_samples() -> None:
    seen: list[tuple[str, float]] = []

    def script(request: GenerationRequest) -> Response:
        seen.append((request.request_id.split("/")[4], request.sampling.temperature))
        return Response(20 if is_greedy(request) else 10, 0.01)

    result = one_batch(script)
    assert sorted(seen) == sorted([("0", 1.0), ("1", 1.0), ("2", 1.0), ("3", 0.0)] * 2)
    for group in result.groups:
        assert [sample.id.index for sample in group.samples] == [0, 1, 2]
        assert (baseline_of(group).id.index, baseline_of(group).outcome) == (3, SampleOutcome.ACCEPTED)
        assert baseline_of(group).prompt == group.samples[0].prompt
        assert baseline_of(group).score is not None
    assert all(group.baseline is not None for group in accepted(result.groups))
    stats = result.stats.domains["a"]
    assert (stats.delivered, stats.accepted, stats.scored, stats.failed) == (2, 6, 8, 0)
    assert stats.response_tokens == 2 * (3 * 10 + 20)
    assert sum(stats.finish_reasons.values()) == 8


def test_without_it_nothing_changes() -> None:
    async def main() -> RolloutResult:
        service, _, _ = make_service([make_domain("a", samples=3)])
        return await service.next_batch(2)

    result = run_virtual(main())
    assert all(group.baseline is None and len(group.samples) == 3 for group in result.groups)


def test_the_greedy_sample_is_tried_again_like_the_others() -> None:
    def script(request: GenerationRequest) -> Response:
        return Response(5, 0.01, error="out of cache" if is_greedy(request) and attempt_of(request) < 2 else None)

    result = one_batch(script, retries=2)
    assert [baseline_of(group).id.attempt for group in result.groups] == [2, 2]
    assert result.stats.domains["a"].retries == {"generation: out of cache": 4}
    assert result.stats.domains["a"].lost_groups == 0


def test_a_group_whose_greedy_sample_failed_is_lost_and_replaced_and_never_judged_by_zero() -> None:
    """FINDINGS 6.8."""
    doomed: set[tuple[int, int]] = set()

    def script(request: GenerationRequest) -> Response:
        doomed.update([prompt_of(request)] if not doomed else [])
        return Response(5, 0.01, error="bad luck" if is_greedy(request) and prompt_of(request) in doomed else None)

    result = one_batch(script, retries=0)
    assert len(result.groups) == 2
    assert not doomed & {(0, group.samples[0].prompt.uid) for group in result.groups}
    assert all(baseline_of(group).score is not None for group in result.groups)
    stats = result.stats.domains["a"]
    assert (stats.delivered, stats.lost_groups, stats.accepted, stats.scored) == (2, 1, 6, 11)
    assert (stats.failed, stats.failures) == (1, {"greedy baseline: generation: bad luck": 1})


def test_a_greedy_response_that_cannot_be_scored_loses_its_group_too() -> None:
    """FINDINGS 6.8. The scripted text tells the length: greedy ones have 9 tokens."""
    judged: Counter[str] = Counter()

    def fails(item: RewardInput, asked: int) -> bool:
        judged[item.response] += 1
        return item.response == "9 tokens" and judged["9 tokens"] <= 2

    result = one_batch(lambda request: Response(9 if is_greedy(request) else 4, 0.01), 1, TimedReward(0.1, fails))
    stats = result.stats.domains["a"]
    assert (stats.delivered, stats.lost_groups, stats.failures) == (1, 1, {"greedy baseline: the judge is away": 1})
    assert stats.retries == {"the judge is away": 1}


def test_a_group_with_nothing_but_its_greedy_sample_is_lost() -> None:
    first: list[tuple[int, int]] = []

    def script(request: GenerationRequest) -> Response:
        first.append(prompt_of(request))
        return Response(5, 0.01, error="bad luck" if not is_greedy(request) and prompt_of(request) == first[0] else None)

    stats = one_batch(script, 1, retries=0).stats.domains["a"]
    assert (stats.delivered, stats.lost_groups, stats.failures) == (1, 1, {"generation: bad luck": 3})


def test_failed_samples_beside_a_good_baseline_leave_the_group_smaller() -> None:
    result = one_batch(lambda request: Response(5, 0.01, error="x" if request.request_id.split("/")[4] == "1" else None), 1, retries=0)
    (group,) = accepted(result.groups)
    assert [sample.id.index for sample in group.samples] == [0, 2]
    assert baseline_of(group).id.index == 3


def test_a_domain_whose_greedy_samples_all_fail_is_broken_with_that_cause() -> None:
    with pytest.raises(DomainFailed, match="domain a: .* of them: greedy baseline: generation: no greed"):
        one_batch(lambda request: Response(5, 0.01, error="no greed" if is_greedy(request) else None), retries=0)


def test_validation_has_no_baseline() -> None:
    async def main() -> RolloutResult:
        domain = make_domain("a", validation=Prompts("a", 0, 3), greedy_baseline=True)
        service, _, _ = make_service([domain])
        return await service.evaluate(2, {"a": Sampling(0.5, max_tokens=64)})

    assert [(len(group.samples), group.baseline) for group in run_virtual(main()).groups] == [(2, None)] * 3


# ---------------------------------------------------------------- repeatability


def fateful(jitter: float) -> list[Script]:
    """Two engines whose timing, but not whose outcomes, depends on `jitter`; greedy samples fail as often as the others."""

    def script(request: GenerationRequest) -> Response:
        fate = stable_hash("fate", request.sampling.seed) % 10
        slowness = 0.01 + jitter * (stable_hash(request.request_id, jitter) % 7)
        return Response(1 + fate, slowness, error="lost" if fate < 5 else None)

    return [script, script]


async def run_of(jitter: float, batches: int, state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    domains = [make_domain("a", 0, share=3, samples=2, greedy_baseline=True), make_domain("b", 1, share=2, samples=2, greedy_baseline=True)]
    service, router, _ = make_service(domains, fateful(jitter), slots=3, retries=1, seed=11, deterministic=True)
    if state is not None:
        service.load_state_dict(state)
    rows = []
    for _ in range(batches):
        groups = (await service.next_batch(5)).groups
        samples = [sample for group in groups for sample in (*group.samples, baseline_of(group))]
        rows.append([(sample.id, tokens_of(sample), sample.outcome) for sample in samples])
    assert all(load.tokens == pytest.approx(0) and load.requests == 0 for load in router.engines)
    return rows, json.loads(json.dumps(service.state_dict()))


def test_deterministic_runs_repeat_whatever_the_timing() -> None:
    runs = [run_virtual(run_of(jitter, 6))[0] for jitter in (0.0, 0.013, 0.5)]
    assert runs[0] == runs[1] == runs[2]
    baselines = [row for batch in runs[0] for row in batch if row[0].index == 2]
    assert len(baselines) == 30
    assert {row[0].attempt for row in baselines} == {0, 1}
    assert max(row[0].group for batch in runs[0] for row in batch) > 29, "no group was lost and replaced, the test proves too little"


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_resumed_run_continues_exactly(stop_after: int) -> None:
    first, state = run_virtual(run_of(0.3, stop_after))
    second, _ = run_virtual(run_of(0.1, 6 - stop_after, state))
    assert first + second == run_virtual(run_of(0.01, 6))[0]


def test_a_prompt_in_flight_gets_its_greedy_sample_again_after_a_resume() -> None:
    async def interrupted() -> dict[str, Any]:
        service, _, _ = make_service(
            [make_domain("a", greedy_baseline=True)], [lambda request: Response(5 if is_greedy(request) else 50, 1.0)]
        )
        waiting = asyncio.create_task(service.next_batch(2))
        await asyncio.sleep(20)
        state = service.state_dict()
        waiting.cancel()
        service.close()
        return state

    async def resumed(state: dict[str, Any]) -> RolloutResult:
        service, _, _ = make_service([make_domain("a", greedy_baseline=True)])
        service.load_state_dict(state)
        return await service.next_batch(2)

    state = run_virtual(interrupted())
    groups = run_virtual(resumed(state)).groups
    started = [one["row"] for one in state["domains"]["a"]["unfinished"]]
    assert [(group.samples[0].id.epoch, group.samples[0].id.prompt_uid) for group in groups] == started
    assert all(baseline_of(group).outcome is SampleOutcome.ACCEPTED for group in groups)


@settings(max_examples=30, deadline=None)
@given(
    generation=st.floats(0, 0.5), reward=st.floats(0, 0.5), retries=st.integers(0, 2), waves=st.booleans(), batches=st.integers(1, 3),
    salt=st.integers(0, 10**6), slots=st.sampled_from([None, 3]),
)  # fmt: skip
def test_every_prompt_ends_once_and_every_delivered_group_has_its_baseline(
    generation: float, reward: float, retries: int, waves: bool, batches: int, salt: int, slots: int | None
) -> None:
    """FINDINGS 6.8, with failures injected everywhere."""

    def script(request: GenerationRequest) -> Response:
        fate = stable_hash(salt, request.request_id) % 1000
        return Response(1 + fate % 20, 0.01, error="lost" if fate < generation * 1000 else None)

    def reward_fails(item: RewardInput, asked: int) -> bool:
        return stable_hash(salt, item.prompt, asked, item.response) % 1000 < reward * 1000

    async def main() -> None:
        domain = make_domain("a", rewards=TimedReward(0.01, reward_fails), samples=2, prompts=60, greedy_baseline=True)
        service, router, _ = make_service([domain], [script] * 2, slots=slots, retries=retries, seed=salt, deterministic=waves)
        delivered: Counter[tuple[int, int]] = Counter()
        lost = 0
        try:
            for _ in range(batches):
                result = await service.next_batch(4)
                lost += result.stats.domains["a"].lost_groups
                delivered.update((group.samples[0].id.epoch, group.samples[0].id.prompt_uid) for group in result.groups)
                for group in result.groups:
                    assert (baseline_of(group).outcome, baseline_of(group).id.index) == (SampleOutcome.ACCEPTED, 2)
                    assert baseline_of(group).score is not None
                    assert any(sample.outcome is SampleOutcome.ACCEPTED for sample in group.samples)
        except DomainFailed:
            service.close()
            return
        assert max(delivered.values()) == 1
        counts = counts_of(service, "a")
        assert counts.admitted == sum(delivered.values()) + lost
        assert counts.lost == lost
        assert all(load.tokens == pytest.approx(0) and load.requests == 0 for load in router.engines)

    run_virtual(main())
