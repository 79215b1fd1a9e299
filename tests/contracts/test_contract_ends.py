"""What min_tokens forbids and for how long, stop texts, and the room that a response has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from engine_harness import EXACT, Harness, assert_log_probs, exact, require
from support_models import EOS_ID, VOCAB_SIZE

from roll_lite.data.samples import Completion, FinishReason
from roll_lite.distributed.strategy.base import PauseMode

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEAST = 40
INTERRUPTED_AT = 60


@pytest.mark.one_in(2)
@pytest.mark.parametrize("interruption", ["pause", "update"])
async def test_an_interruption_does_not_start_min_tokens_again(engine: Harness, interruption: str) -> None:
    requests = [engine.request(300, temperature=1.0, seed=n, min_tokens=LEAST, keep_mask=True) for n in range(8)]
    models = {engine.version: engine.reference}
    task = asyncio.create_task(engine.all(requests))
    await asyncio.sleep(0)
    await engine.one(INTERRUPTED_AT, min_tokens=INTERRUPTED_AT)
    await engine.strategy.pause(PauseMode.KEEP)
    if interruption == "update":
        await engine.update(seed=61)
        models[engine.version] = engine.reference
    await engine.strategy.resume()
    completions = {completion.request_id: completion for completion in await task}
    assert max(len(completion.token_ids) for completion in completions.values()) > INTERRUPTED_AT + 5
    for completion in completions.values():
        assert completion.kept_ids is not None
        for position, kept in enumerate(completion.kept_ids):
            assert set(kept) == set(range(VOCAB_SIZE)) - ({EOS_ID} if position < LEAST else set()), position
        logits = torch.empty(len(completion.token_ids), VOCAB_SIZE)
        for span in completion.versions:
            engine.reference = models[span.version]
            logits[span.start :] = engine.hf_logits(completion.token_ids)[span.start :]
        logits[:LEAST, EOS_ID] = -torch.inf
        assert_log_probs(completion, logits)
    engine.reference = models[engine.version]
    if interruption == "update":
        assert any(len(completion.versions) == 2 for completion in completions.values())
        return
    if not EXACT:
        return
    undisturbed = await engine.all(requests)
    same = sum(completion.token_ids == completions[completion.request_id].token_ids for completion in undisturbed)
    assert same >= len(requests) - 1, "another batch rounds differently, which may turn one draw, not several"


async def free_running(engine: Harness, length: int, least: int = 0) -> tuple[tuple[int, ...], Completion]:
    """A prompt and its greedy response, which nothing ends and in which each token is a character."""
    for first in range(5, 60):
        completion = await engine.free(length, (first, 7), min_tokens=least)
        if completion.finish_reason == FinishReason.LENGTH and len(completion.text) == length:
            return (first, 7), completion
    raise AssertionError("every response of this model ends early")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("least", [0, 17, 19, 20, 30])
async def test_a_stop_text_counts_where_it_ends_after_min_tokens(engine: Harness, least: int) -> None:
    length = 50
    prompt, free = await free_running(engine, length)
    stop = free.text[17:20]
    end = next((end for end in range(least + 1, length) if free.text[:end].endswith(stop)), length)
    completion = await engine.one(length, prompt, min_tokens=least, stop=(stop, "never seen"))
    assert completion.token_ids == free.token_ids[:end]
    assert completion.finish_reason == (FinishReason.STOP if end < length else FinishReason.LENGTH)


@exact
async def test_a_stop_text_is_found_across_a_pause(engine: Harness) -> None:
    length, least = 80, 70
    prompt, free = await free_running(engine, length, least)
    stop = free.text[10:75]
    task = asyncio.create_task(engine.one(length, prompt, min_tokens=least, stop=(stop,)))
    await asyncio.sleep(0)
    for _ in range(3):
        await engine.one(12, min_tokens=12)
        await engine.strategy.pause(PauseMode.KEEP)
        await engine.strategy.resume()
    assert (await task).token_ids == free.token_ids[:75]


async def test_min_tokens_beyond_the_context_are_as_many_as_there_is_room_for(engine: Harness) -> None:
    length = engine.strategy.max_model_len
    completion = await engine.one(600, [3 + n % 90 for n in range(length - 20)], temperature=1.0, min_tokens=600)
    assert completion.finish_reason == FinishReason.LENGTH and len(completion.token_ids) == 20


@pytest.mark.parametrize("temperature", [1e-7, 0.009, 2.1, -1.0, float("nan")])
async def test_a_temperature_that_an_engine_would_replace_or_refuse_is_refused_alike(engine: Harness, temperature: float) -> None:
    completion = await engine.one(4, temperature=temperature)
    assert "engines sample between 0.01 and 2, and greedily at 0" in (completion.error or "")


@pytest.mark.parametrize("temperature", [0.01, 2.0])
async def test_the_ends_of_that_range_are_sampled(engine: Harness, temperature: float) -> None:
    completion = await engine.one(16, temperature=temperature, seed=4)
    assert_log_probs(completion, engine.hf_logits(completion.token_ids) / temperature, tolerance=1e-4 / min(temperature, 1.0))
    assert (await engine.one(4)).error is None


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_cache_too_small_for_one_request_is_refused_at_the_start(tmp: Path) -> None:
    """vLLM sees to that itself. SGLang would cut such a response short and call it complete."""
    require("sglang")
    with pytest.raises(ValueError, match=r"kv_cache_mb: 1 is too little: .* 2048 tokens, .* 6000 needs 6002; use at least 3"):
        await Harness.start(tmp / "m", make="sglang", max_model_len=6000, kv_cache_mb=1)
