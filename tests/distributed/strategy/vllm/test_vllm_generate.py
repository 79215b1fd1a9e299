"""Rollouts of the real engine, checked against the Hugging Face model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from engine_harness import Harness, assert_log_probs
from support_models import EOS_ID, VOCAB_SIZE

from roll_lite.data.samples import Completion, FinishReason, VersionSpan
from roll_lite.distributed.strategy.base import PauseMode

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_MODEL_LEN = 512
LONG = 450


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    # Few batched tokens: several long prompts do not fit into one forward pass.
    harness = await Harness.start(tmp_path_factory.mktemp("model") / "m", max_model_len=MAX_MODEL_LEN, max_batched_tokens=1024)
    yield harness
    await harness.stop()


async def start(engine: Harness, count: int, **options: int) -> tuple[list[str], asyncio.Task[list[Completion]]]:
    """Requests that run for a while, on their way."""
    requests = [engine.request(LONG, temperature=1.0, min_tokens=LONG, seed=number) for number in range(count)]
    task = asyncio.create_task(engine.all(requests))
    await asyncio.sleep(0.15)
    return [request.request_id for request in requests], task


# ---------------------------------------------------------------- numbers


async def test_greedy_equals_hugging_face(engine: Harness) -> None:
    for prompt in ((20, 7, 33, 41), (5,), tuple(range(10, 60))):
        completion = await engine.one(32, prompt)
        assert list(completion.token_ids) == engine.hf_greedy(32, prompt)
        assert_log_probs(completion, engine.hf_logits(completion.token_ids, prompt))
        assert completion.versions == (VersionSpan(0, engine.version),)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_the_sampled_distribution(engine: Harness, temperature: float) -> None:
    requests = [engine.request(48, (9, 10 + n), temperature, seed=n) for n in range(16)]
    prompts = {request.request_id: request.prompt_ids for request in requests}
    for completion in await engine.all(requests):
        logits = engine.hf_logits(completion.token_ids, prompts[completion.request_id])
        assert_log_probs(completion, logits / temperature)


async def test_log_probs_under_truncation_are_renormalised(engine: Harness) -> None:
    completion = await engine.one(48, temperature=0.7, top_k=3, seed=5)
    logits = engine.hf_logits(completion.token_ids) / 0.7
    third = logits.topk(3).values[:, -1:]
    assert_log_probs(completion, logits.masked_fill(logits < third, float("-inf")))


async def test_seeds(engine: Harness) -> None:
    requests = [engine.request(24, temperature=1.0, seed=seed) for seed in (11, 12, 13, 14, 11)]
    by_id = {completion.request_id: completion for completion in await engine.all(requests)}
    first, *others, again = (by_id[request.request_id].token_ids for request in requests)
    assert first == again
    assert len({first, *others}) == 4
    later = await engine.one(24, temperature=1.0, seed=11)
    assert later.token_ids == first


async def test_seeded_prompts_beyond_one_forward_pass(engine: Harness) -> None:
    """Prefilling a seeded prompt in pieces kills vLLM's CPU engine."""
    requests = [engine.request(8, [3 + (n * 7 + i) % 90 for i in range(300)], 1.0, seed=n) for n in range(20)]
    completions = await engine.all(requests)
    assert [completion.error for completion in completions] == [None] * 20


# ---------------------------------------------------------------- ends of a response


async def test_eos_is_part_of_the_response(engine: Harness) -> None:
    completions = await engine.all([engine.request(200, temperature=1.0, seed=n) for n in range(40)])
    stopped = [completion for completion in completions if completion.finish_reason == FinishReason.STOP]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == EOS_ID and EOS_ID not in completion.token_ids[:-1]
        assert "<eos>" not in completion.text
        assert len(completion.log_probs) == len(completion.token_ids)


async def test_length(engine: Harness) -> None:
    completion = await engine.one(10, temperature=1.0, min_tokens=10)
    assert completion.finish_reason == FinishReason.LENGTH and len(completion.token_ids) == 10


async def test_stop_string(engine: Harness) -> None:
    free = await engine.one(40, min_tokens=40)
    stop = free.text[20:22]
    end = free.text.index(stop) + len(stop)
    completion = await engine.one(40, min_tokens=0, stop=(stop,))
    assert completion.finish_reason == FinishReason.STOP
    assert completion.text == free.text[:end]
    assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) == len(completion.log_probs)


async def test_shorter_ones_come_first(engine: Harness) -> None:
    requests = [engine.request(length, temperature=1.0, min_tokens=length) for length in (200, 5, 80)]
    completions = await engine.all(requests)
    assert [len(completion.token_ids) for completion in completions] == [5, 80, 200]


async def test_as_many_out_as_in(engine: Harness) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 40, (200,), generator=generator).tolist()
    requests = [engine.request(length, temperature=1.0) for length in lengths]
    completions = await engine.all(requests)
    assert sorted(c.request_id for c in completions) == sorted(r.request_id for r in requests)
    assert all(c.error is None and len(c.token_ids) <= length for c, length in zip(completions, [40] * 200, strict=True))
    health = await engine.strategy.health()
    assert health.alive and health.running == health.waiting == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt is empty"),
        ((5,) * MAX_MODEL_LEN, f"{MAX_MODEL_LEN} tokens, which leaves no room"),
        ((5,) * 3000, "3000 tokens"),
        ((5, VOCAB_SIZE), "outside the vocabulary"),
        ((5, -1), "outside the vocabulary"),
    ],
)
async def test_impossible_prompts_fail_alone(engine: Harness, prompt: tuple[int, ...], message: str) -> None:
    bad, good = engine.request(4, prompt), engine.request(4)
    completions = {completion.request_id: completion for completion in await engine.all([bad, good])}
    assert message in (completions[bad.request_id].error or "")
    assert completions[good.request_id].error is None


async def test_impossible_sampling_fails_alone(engine: Harness) -> None:
    completion = await engine.one(4, temperature=1.0, top_p=2.0)
    assert "top_p" in (completion.error or "")
    assert (await engine.one(4)).error is None


# ---------------------------------------------------------------- abort and pause


async def test_abort_one_many_unknown_all(engine: Harness) -> None:
    ids, task = await start(engine, 5)
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
    assert_log_probs(completions[ids[0]], _without_eos(engine.hf_logits(completions[ids[0]].token_ids)))


async def test_abort_right_after_submission(engine: Harness) -> None:
    requests = [engine.request(LONG, min_tokens=LONG) for _ in range(3)]
    task = asyncio.create_task(engine.all(requests))
    await asyncio.sleep(0)
    await engine.strategy.abort([request.request_id for request in requests])
    assert [completion.finish_reason for completion in await task] == [FinishReason.ABORT] * 3


async def test_leaving_the_stream_aborts_the_rest(engine: Harness) -> None:
    stream = engine.strategy.generate([engine.request(2), engine.request(LONG, min_tokens=LONG)])
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(2):
        while (await engine.strategy.health()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert engine.strategy._llm.get_num_unfinished_requests() == 0


async def test_pause_abort(engine: Harness) -> None:
    ids, task = await start(engine, 3)
    await engine.strategy.pause(PauseMode.ABORT)
    completions = await task
    assert {c.request_id for c in completions} == set(ids)
    assert all(c.finish_reason == FinishReason.ABORT and 0 < len(c.token_ids) < LONG for c in completions)
    await _waits_for_resume(engine)


async def test_pause_wait(engine: Harness) -> None:
    _, task = await start(engine, 2)
    await engine.strategy.pause(PauseMode.WAIT)
    assert all(len(c.token_ids) == LONG for c in await asyncio.wait_for(task, 1.0))
    await _waits_for_resume(engine)


async def test_pause_keep(engine: Harness) -> None:
    _, task = await start(engine, 2)
    await engine.strategy.pause(PauseMode.KEEP)
    health = await engine.strategy.health()
    assert (health.running, health.waiting) == (0, 2)
    await asyncio.sleep(0.3)
    assert not task.done()
    await engine.strategy.abort((await _first(engine),))
    await engine.strategy.resume()
    completions = await task
    assert all(len(c.token_ids) == LONG and c.error is None for c in completions)
    for completion in completions:
        assert_log_probs(completion, _without_eos(engine.hf_logits(completion.token_ids)))


async def _first(engine: Harness) -> str:
    """An id that is not running: aborting it while paused must not disturb the others."""
    return f"request/{engine.counter + 1000}"


async def _waits_for_resume(engine: Harness) -> None:
    task = asyncio.create_task(engine.one(4))
    await asyncio.sleep(0.2)
    assert not task.done()
    await engine.strategy.resume()
    assert (await asyncio.wait_for(task, 5.0)).error is None


def _without_eos(logits: torch.Tensor) -> torch.Tensor:
    """min_tokens forbids EOS before the last token."""
    logits = logits.clone()
    logits[:, EOS_ID] = float("-inf")
    return logits


async def test_admitted_while_paused_is_deterministic(engine: Harness) -> None:
    waves = []
    for _ in range(2):
        await engine.strategy.pause(PauseMode.KEEP)
        requests = [engine.request(30, (7, 8 + n), 1.0, seed=n) for n in range(24)]
        task = asyncio.create_task(engine.all(requests))
        while (await engine.strategy.health()).waiting < len(requests):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await engine.strategy.resume()
        by_id = {completion.request_id: completion for completion in await task}
        waves.append([(by_id[r.request_id].token_ids, by_id[r.request_id].log_probs) for r in requests])
    assert waves[0] == waves[1]


async def test_the_environment_is_in_place(engine: Harness) -> None:
    import os

    from roll_lite.distributed.strategy.vllm import engine_environment

    assert all(os.environ[name] == value for name, value in engine_environment(cuda=False).items())
    assert not engine.strategy.capabilities.frees_memory
    await engine.strategy.offload()  # nothing to free on a CPU: the engine goes on
    assert (await engine.one(2)).error is None
    await engine.strategy.load()
