"""Two engines behind one router, one of which leaves in the middle of a step: the other goes on with what it had begun, or, where there is
time, it ends that by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engine_harness import PROMPT, Harness, Make, require
from scheduler_support import by_tokens, make_domain, tokens_of
from support_local_engine import LocalEngine
from support_scripted import ScriptedEngine

from roll_lite.data.samples import FinishReason, GenerationRequest, Prompt, Sample, SampleOutcome, Sampling, VersionSpan
from roll_lite.distributed.strategy.base import PauseMode
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.service import RolloutService

LENGTH = 400
COUNT = 8


class Questions:
    def __len__(self) -> int:
        return 2 * COUNT

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt("a", index, str(index), (*PROMPT, 10 + index))


@pytest.mark.nightly
@pytest.mark.parametrize("make", [pytest.param("vllm", marks=pytest.mark.slow), pytest.param("sglang", marks=pytest.mark.nightly)])
async def test_an_engine_that_leaves_in_the_middle_of_a_step_costs_no_token(make: Make, tmp_path: Path) -> None:
    require(make)
    leaving, staying = [await Harness.start(tmp_path / name, make=make) for name in ("leaving", "staying")]
    try:
        await staying.update(seed=0)  # the weights that both have, as another version: a token says where it comes from
        await take_turns(leaving, staying)
    finally:
        await asyncio.gather(leaving.stop(), staying.stop())


@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_that_is_drained_ends_what_it_has_and_gets_nothing_new(engine: Harness) -> None:
    """In the middle of a step, beside one whose responses have 8 tokens. It stands still while others are asked for, so that it has not
    ended anything by then."""
    clients = [LocalEngine("drained", engine.strategy), LocalEngine("other", ScriptedEngine(by_tokens(8)))]
    router = Router(clients, 120.0, engine_slots=COUNT)
    sampling = Sampling(temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH)
    domain = replace(make_domain("a", prompts=2 * COUNT, samples=1), prompts=Questions(), sampling=sampling)
    service = RolloutService([domain], router, retries=0)
    step = asyncio.create_task(service.next_batch(COUNT))
    kept = await begun_at("drained", router, engine)
    await engine.strategy.pause(PauseMode.KEEP)
    draining = asyncio.create_task(router.drain("drained"))
    later = [GenerationRequest(f"a/{number}/1/{COUNT + number}/0/0", PROMPT, sampling) for number in range(COUNT)]
    assert [turn.length for turn in await asyncio.gather(*(router.generate("a", one) for one in later))] == [8] * COUNT
    assert not draining.done() and not step.done() and {load.client.name for load in router.engines} == {"drained", "other"}
    await engine.strategy.resume()
    groups = (await step).groups
    await draining
    assert [load.client.name for load in router.engines] == ["other"]
    ended = {sample.id.request_id(): sample.transcript for group in groups for sample in group.samples}
    assert kept and {name for name, transcript in ended.items() if transcript.policy_tokens == LENGTH} == set(kept)
    assert {ended[name].finish_reason for name in kept} == {FinishReason.LENGTH}
    assert {ended[name].versions for name in kept} == {(VersionSpan(0, engine.version),)}
    service.close()


async def take_turns(leaving: Harness, staying: Harness) -> None:
    router = Router([LocalEngine("leaving", leaving.strategy), LocalEngine("staying", staying.strategy)], 120.0, engine_slots=COUNT)
    sampling = Sampling(temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH)
    domain = replace(make_domain("a", prompts=2 * COUNT, samples=1), prompts=Questions(), sampling=sampling)
    service = RolloutService([domain], router, retries=0)
    step = asyncio.create_task(service.next_batch(COUNT))
    moved = await begun_at("leaving", router, leaving)
    draining = asyncio.create_task(router.drain("leaving"))
    await asyncio.sleep(0.05)
    assert len(moved) == COUNT // 2 and not draining.done() and not step.done()
    router.remove("leaving")
    samples = [sample for group in (await step).groups for sample in group.samples]
    await draining
    await leaving.stop()
    assert [load.client.name for load in router.engines] == ["staying"]
    check(samples, moved, staying)
    for sample, tokens in zip(samples, await uninterrupted(staying, samples, sampling), strict=True):
        assert tokens_of(sample) == [*sample.prompt.token_ids, *tokens]
    later = [sample for group in (await service.next_batch(COUNT)).groups for sample in group.samples]
    check(later, [], staying)
    service.close()


async def begun_at(name: str, router: Router, engine: Harness) -> list[str]:
    """The requests that it has, once it has generated something of each."""
    while True:
        at = [request_id for request_id, load in router._at_engines.items() if load.client.name == name]
        if at and len(await engine.generated(at)) == len(at):
            return at
        await asyncio.sleep(0.005)


def check(samples: Sequence[Sample], moved: Sequence[str], staying: Harness) -> None:
    """Those that moved have tokens of both engines, the others of the one that stays."""
    for sample in samples:
        transcript = sample.transcript
        assert (sample.outcome, sample.id.attempt) == (SampleOutcome.ACCEPTED, 0)
        assert (transcript.finish_reason, transcript.policy_tokens) == (FinishReason.LENGTH, LENGTH)
        versions = transcript.versions
        if sample.id.request_id() in moved:
            assert [span.version for span in versions] == [0, staying.version] and 0 < versions[1].start < LENGTH
        else:
            assert versions == (VersionSpan(0, staying.version),)


async def uninterrupted(engine: Harness, samples: Sequence[Sample], sampling: Sampling) -> list[tuple[int, ...]]:
    requests = [GenerationRequest(f"whole/{sample.prompt.uid}", sample.prompt.token_ids, sampling) for sample in samples]
    found = {completion.request_id: completion.token_ids for completion in await engine.all(requests)}
    return [found[request.request_id] for request in requests]
