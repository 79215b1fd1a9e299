"""Requests in, completions out: how responses end, what is refused, abort and pause."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
import torch
from engine_harness import Harness, assert_log_probs
from support_models import EOS_ID, VOCAB_SIZE

from roll_lite.data.samples import FinishReason
from roll_lite.distributed.strategy.base import PauseMode
from roll_lite.distributed.strategy.inference import requests as in_flight
from roll_lite.distributed.strategy.inference.life import EngineMemory

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 600
LONGEST = 960
"""For responses that must not end while a busy machine lets the test wait."""


# ---------------------------------------------------------------- ends of a response


async def test_eos_is_part_of_the_response(engine: Harness) -> None:
    completions = await engine.all([engine.request(100, temperature=1.0, seed=n) for n in range(40)])
    stopped = [completion for completion in completions if completion.finish_reason == FinishReason.STOP]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == EOS_ID and EOS_ID not in completion.token_ids[:-1]
        assert "<eos>" not in completion.text
        assert len(completion.log_probs) == len(completion.token_ids)


async def test_length(engine: Harness) -> None:
    completion = await engine.one(10, temperature=1.0, min_tokens=10)
    assert completion.finish_reason == FinishReason.LENGTH and len(completion.token_ids) == 10


async def test_the_context_ends_a_response_too(engine: Harness) -> None:
    length = engine.strategy.max_model_len
    completion = await engine.one(LONG, [3 + n % 90 for n in range(length - 20)], min_tokens=20)
    assert completion.finish_reason == FinishReason.LENGTH and len(completion.token_ids) == 20
    completion = await engine.one(LONG, [3 + n % 90 for n in range(length - 1)])
    assert completion.error is None and len(completion.token_ids) == 1


async def test_stop_string(engine: Harness) -> None:
    free = await engine.free(40, min_tokens=40)
    stop = free.text[20:22]
    end = free.text.index(stop) + len(stop)
    completion = await engine.one(40, min_tokens=0, stop=(stop,))
    assert completion.finish_reason == FinishReason.STOP
    assert completion.text == free.text[:end]
    assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) == len(completion.log_probs)


async def test_stop_token(engine: Harness) -> None:
    free = await engine.free(40, min_tokens=40)
    token = free.token_ids[12]
    first = free.token_ids.index(token)
    absent = max(set(range(VOCAB_SIZE)) - set(free.token_ids))
    completion = await engine.one(40, stop_token_ids=(absent, token))
    assert completion.finish_reason == FinishReason.STOP
    assert completion.token_ids == free.token_ids[: first + 1]
    assert free.text.startswith(completion.text)
    assert_log_probs(completion, engine.hf_logits(completion.token_ids))


async def test_min_tokens_forbids_stop_tokens_too(engine: Harness) -> None:
    """They have no probability there, and the log-probs are those of what is left."""
    token = (await engine.one(1)).token_ids[0]
    completion = await engine.one(30, temperature=1.0, seed=2, min_tokens=10, stop_token_ids=(token,), keep_mask=True)
    assert not {token, EOS_ID} & set(completion.token_ids[:10])
    logits = engine.hf_logits(completion.token_ids)
    logits[:10, [token, EOS_ID]] = -torch.inf
    assert_log_probs(completion, logits)
    assert completion.kept_ids is not None
    for position, kept in enumerate(completion.kept_ids):
        assert set(kept) == set(range(VOCAB_SIZE)) - ({token, EOS_ID} if position < 10 else set())


async def test_shorter_ones_come_first(engine: Harness) -> None:
    requests = [engine.request(length, temperature=1.0, min_tokens=length) for length in (200, 5, 80)]
    completions = await engine.all(requests)
    assert [(c.error, c.finish_reason, len(c.token_ids)) for c in completions] == [(None, FinishReason.LENGTH, n) for n in (5, 80, 200)]


async def test_as_many_out_as_in(engine: Harness) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 40, (200,), generator=generator).tolist()
    requests = [engine.request(length, temperature=1.0) for length in lengths]
    longest = {request.request_id: request.sampling.max_tokens for request in requests}
    completions = await engine.all(requests)
    assert sorted(c.request_id for c in completions) == sorted(longest)
    assert all(c.error is None and 0 < len(c.token_ids) <= longest[c.request_id] for c in completions)
    health = await engine.strategy.health()
    assert health.alive and health.running == health.waiting == 0


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt is empty"),
        ((5,) * 1024, "1024 tokens, which leaves no room"),
        ((5,) * 3000, "3000 tokens"),
        ((5, VOCAB_SIZE), "outside the vocabulary"),
        ((5, -1), "outside the vocabulary"),
    ],
    ids=["empty", "full", "too long", "beyond the vocabulary", "negative"],
)
async def test_impossible_prompts_fail_alone(engine: Harness, prompt: tuple[int, ...], message: str) -> None:
    bad, good = engine.request(4, prompt), engine.request(4)
    completions = {completion.request_id: completion for completion in await engine.all([bad, good])}
    assert message in (completions[bad.request_id].error or "")
    assert completions[good.request_id].error is None


@pytest.mark.parametrize(
    ("sampling", "message"),
    [({"top_p": 2.0}, "top_p"), ({"stop_token_ids": (7, VOCAB_SIZE)}, "stop_token_ids holds a token outside the vocabulary")],
    ids=["top_p", "stop token"],
)
async def test_impossible_sampling_fails_alone(engine: Harness, sampling: dict[str, Any], message: str) -> None:
    completion = await engine.one(4, temperature=1.0, min_tokens=2, **sampling)
    assert message in (completion.error or "")
    assert (await engine.one(4)).error is None


async def test_seeded_prompts_beyond_one_forward_pass(engine: Harness) -> None:
    """Prefilling a seeded prompt in pieces kills vLLM's CPU engine."""
    requests = [engine.request(8, [3 + (n * 7 + i) % 90 for i in range(300)], 1.0, seed=n) for n in range(20)]
    completions = await engine.all(requests)
    assert [completion.error for completion in completions] == [None] * 20


# ---------------------------------------------------------------- abort


async def test_abort_one_many_unknown_all(engine: Harness) -> None:
    ids, task = await engine.started(5, LONG)
    await engine.strategy.abort(["never heard of", ids[0]])
    await asyncio.sleep(0.05)
    await engine.strategy.abort(ids[1:3])
    await engine.strategy.abort()
    completions = {completion.request_id: completion for completion in await task}
    assert set(completions) == set(ids)
    for completion in completions.values():
        assert completion.finish_reason == FinishReason.ABORT and completion.error is None
        assert 0 < len(completion.token_ids) < LONG
        assert len(completion.log_probs) == len(completion.token_ids)
    assert_log_probs(completions[ids[0]], engine.hf_logits(completions[ids[0]].token_ids, without_eos=True))


async def test_a_response_that_ends_at_the_token_after_its_abort_has_ended(engine: Harness) -> None:
    """Whenever the abort comes, some response is one token before its end: after min_tokens nearly every token ends one."""
    ends = set(range(10, VOCAB_SIZE))
    least = [20 + number % 60 for number in range(240)]
    await engine.strategy.pause(PauseMode.KEEP)
    requests = [engine.request(LONG, temperature=1.0, min_tokens=n, stop_token_ids=tuple(ends)) for n in least]
    answers = [engine.strategy.generate(request) for request in requests]
    while (await engine.strategy.health()).waiting < len(requests):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await engine.strategy.resume()
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    await engine.strategy.abort()
    found = await asyncio.gather(*answers)
    aborted = [completion for completion in found if completion.finish_reason is FinishReason.ABORT]
    assert 0 < len(aborted) < len(found) and all(ends.isdisjoint(completion.token_ids) for completion in aborted)


async def test_an_id_that_another_begins_with_is_aborted_alone(engine: Harness) -> None:
    first, second = engine.request(LONG, min_tokens=LONG), engine.request(80, min_tokens=80)
    task = asyncio.create_task(engine.all([first, engine.renamed(second, first.request_id + "0")]))
    await engine.one(2)
    await engine.strategy.abort([first.request_id])
    found = {completion.request_id: completion.finish_reason for completion in await task}
    assert found == {first.request_id: FinishReason.ABORT, first.request_id + "0": FinishReason.LENGTH}


async def test_abort_right_after_submission(engine: Harness) -> None:
    requests = [engine.request(LONG, min_tokens=LONG) for _ in range(3)]
    task = asyncio.create_task(engine.all(requests))
    await asyncio.sleep(0)
    await engine.strategy.abort([request.request_id for request in requests])
    assert [completion.finish_reason for completion in await task] == [FinishReason.ABORT] * 3


async def test_cancelling_a_request_aborts_it(engine: Harness) -> None:
    short, long = [engine.strategy.generate(one) for one in (engine.request(2), engine.request(LONG, min_tokens=LONG))]
    await short
    long.cancel()
    async with asyncio.timeout(60):
        while (await engine.strategy.health()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await engine.one(4)).error is None


async def test_what_has_begun_is_told_with_its_growth_and_what_waits_is_not(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests beyond what the engine runs at a time wait; the others have begun, soon after their first token, and never have more tokens
    than come out in the end."""
    slots = engine.strategy.options.max_running_requests
    requests = [engine.request(LONG, min_tokens=LONG) for _ in range(slots + 2)]
    ids = [request.request_id for request in requests]
    monkeypatch.setattr(in_flight, "BEGUN_POLL_S", 0.01)
    monkeypatch.setattr(in_flight, "PARTS_EVERY", 1)
    told: dict[str, list[int]] = {request_id: [] for request_id in ids}
    answers = [engine.strategy.generate(one, lambda found, own=told[one.request_id]: own.append(found.generated)) for one in requests]
    async with asyncio.timeout(60):
        while not all(own and own[-1] > own[0] for own in (told[one] for one in ids[:slots])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [bool(told[one]) for one in ids] == [True] * slots + [False] * 2
    await engine.strategy.abort(ids)
    lengths = [len(completion.token_ids) for completion in await asyncio.gather(*answers)]
    assert all(0 < told[one][0] <= told[one][-1] <= length for one, length in zip(ids[:slots], lengths, strict=False))
    counts = [len(own) for own in told.values()]
    await asyncio.sleep(0.05)
    assert [len(own) for own in told.values()] == counts


# ---------------------------------------------------------------- pause


async def test_pause_abort(engine: Harness) -> None:
    ids, task = await engine.started(3, LONGEST)
    await engine.strategy.pause(PauseMode.ABORT)
    completions = await task
    assert {c.request_id for c in completions} == set(ids)
    assert all(c.finish_reason == FinishReason.ABORT and 0 < len(c.token_ids) < LONGEST for c in completions)
    await _waits_for_resume(engine)


async def test_pause_keep(engine: Harness) -> None:
    _, task = await engine.started(2, LONG)
    await engine.strategy.pause(PauseMode.KEEP)
    health = await engine.strategy.health()
    assert (health.running, health.waiting) == (0, 2)
    await asyncio.sleep(0.3)
    assert not task.done()
    await engine.strategy.abort(["never heard of"])
    await engine.strategy.resume()
    completions = await task
    assert all(len(c.token_ids) == LONG and c.error is None for c in completions)
    for completion in completions:
        assert_log_probs(completion, engine.hf_logits(completion.token_ids, without_eos=True))


async def test_abort_while_paused_returns_all_that_was_generated(engine: Harness) -> None:
    ids, task = await engine.started(3, LONG)
    await engine.strategy.pause(PauseMode.KEEP)
    late = asyncio.create_task(engine.one(LONG, min_tokens=LONG))
    await asyncio.sleep(0.1)
    await engine.strategy.abort()
    await engine.strategy.resume()
    for completion in await task:
        assert completion.finish_reason == FinishReason.ABORT and 0 < len(completion.token_ids) < LONG
        assert_log_probs(completion, engine.hf_logits(completion.token_ids, without_eos=True))
    never_begun = await late
    assert never_begun.finish_reason == FinishReason.ABORT and never_begun.token_ids == ()
    assert len(ids) == 3


async def test_frozen_requests_end_where_the_engine_aborts_them(engine: Harness) -> None:
    ids, task = await engine.started(2, LONG)
    await engine.strategy.pause(PauseMode.KEEP)
    await asyncio.wait_for(engine.strategy.pause(PauseMode.ABORT), 30.0)
    assert {c.request_id: c.finish_reason for c in await asyncio.wait_for(task, 30.0)} == dict.fromkeys(ids, FinishReason.ABORT)
    await _waits_for_resume(engine)


async def test_pausing_twice_is_pausing_once(engine: Harness) -> None:
    _, task = await engine.started(2, 200)
    await engine.strategy.pause(PauseMode.KEEP)
    await engine.strategy.pause(PauseMode.KEEP)
    await engine.strategy.resume()
    await engine.strategy.resume()
    assert all(len(c.token_ids) == 200 for c in await task)


async def _waits_for_resume(engine: Harness) -> None:
    task = asyncio.create_task(engine.one(4))
    await asyncio.sleep(0.2)
    assert not task.done()
    await engine.strategy.resume()
    assert (await asyncio.wait_for(task, 60.0)).error is None


# ---------------------------------------------------------------- memory


async def test_offloaded_and_loaded_again_it_serves(engine: Harness) -> None:
    before = await engine.one(8)
    ids, task = await engine.started(3, LONG)
    await engine.strategy.offload()
    completions = await task
    assert {completion.request_id for completion in completions} == set(ids)
    assert all(c.finish_reason == FinishReason.ABORT and 0 < len(c.token_ids) < LONG for c in completions)
    await engine.strategy.load()
    engine.assert_as_before(await engine.one(8), before)


@pytest.mark.parametrize("parts", list(itertools.permutations(EngineMemory)), ids="+".join)
async def test_requests_wait_until_every_part_is_back(engine: Harness, parts: tuple[EngineMemory, EngineMemory]) -> None:
    before = await engine.one(8)
    first, second = parts
    await engine.strategy.offload([first])
    await engine.strategy.offload([first])
    late = asyncio.create_task(engine.one(8))
    await engine.strategy.resume()  # which is not loading
    await asyncio.sleep(0.1)
    health = await engine.strategy.health()
    assert (health.running, health.waiting, engine.strategy.life.away) == (0, 1, {first})
    await engine.strategy.offload([second])
    await engine.strategy.load([first])
    await asyncio.sleep(0.1)
    assert not late.done()
    await engine.strategy.load()
    engine.assert_as_before(await late, before)
    assert not engine.strategy.life.away


async def test_a_paused_engine_is_still_paused_when_it_is_loaded(engine: Harness) -> None:
    await engine.strategy.pause(PauseMode.KEEP)
    await engine.strategy.offload()
    await engine.strategy.load()
    await _waits_for_resume(engine)
    await engine.strategy.offload()
    await engine.strategy.pause(PauseMode.KEEP)
    await engine.strategy.load()
    await _waits_for_resume(engine)


async def test_requests_that_wait_for_memory_can_be_aborted(engine: Harness) -> None:
    await engine.strategy.offload([EngineMemory.KV_CACHE])
    late = [asyncio.create_task(engine.one(8)) for _ in range(2)]
    await asyncio.sleep(0.1)
    await engine.strategy.pause(PauseMode.ABORT)
    await engine.strategy.load()
    await engine.strategy.resume()
    assert [(await task).finish_reason for task in late] == [FinishReason.ABORT] * 2
    assert (await engine.one(4)).error is None
