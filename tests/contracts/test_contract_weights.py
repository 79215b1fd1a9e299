"""New weights from another process: what an engine generates, holds and refuses afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import BLOCK, Harness, assert_likeliest, assert_log_probs, require
from support_models import EOS_ID, Family
from test_contract_numbers import masked, survivors

from roll_lite.data.samples import Completion, FinishReason, VersionSpan
from roll_lite.distributed.strategy.base import PauseMode
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.strategy.vllm.compat import settings
from roll_lite.distributed.weight_sync.group import TransferError
from roll_lite.distributed.weight_sync.plan import ExportedTensor

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 600
LONGEST = 960
"""On a busy machine the engine is far into it when the test goes on."""


async def assert_serves_reference(engine: Harness) -> None:
    completion = await engine.one(32)
    engine.assert_greedy(completion, 32)
    assert_log_probs(completion, engine.hf_logits(completion.token_ids))
    assert completion.versions == (VersionSpan(0, engine.version),)


async def test_generates_what_the_new_weights_say(engine: Harness) -> None:
    before = await engine.one(32)
    for seed in (101, 102):
        await engine.update(seed)
        await assert_serves_reference(engine)
    sampled = await engine.one(48, temperature=0.7, seed=3)
    assert_log_probs(sampled, engine.hf_logits(sampled.token_ids) / 0.7)
    assert (await engine.one(32)).token_ids != before.token_ids
    assert engine.strategy.life.version == engine.version


async def test_each_step_may_sample_in_another_way(engine: Harness) -> None:
    """Settings change with the weights, to and fro, for all requests of a step: nothing of the last ones stays in an engine's batches."""
    steps: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 5, "top_p": 0.9},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_k": 3},
        {"temperature": 1.0},
    ]
    for number, sampling in enumerate(steps):
        await engine.update(seed=301 + number)
        temperature, truncation = sampling["temperature"] or 1.0, {name: sampling[name] for name in ("top_k", "top_p") if name in sampling}
        for completion in await engine.all([engine.request(24, seed=seed, **sampling) for seed in range(8)]):
            logits = engine.hf_logits(completion.token_ids) / temperature
            kept = [survivors(row, **truncation) for row in logits] if truncation else [()] * len(logits)
            assert_log_probs(completion, masked(logits, kept))
            if sampling["temperature"] == 0:
                assert_likeliest(completion.token_ids, logits)


async def test_checksums_are_of_what_the_engine_holds(engine: Harness) -> None:
    old = await engine.strategy.weight_checksums()
    await engine.update(seed=111)
    held = await engine.strategy.weight_checksums()
    assert held == engine.checksums()
    some = sorted(held)[::3]
    assert await engine.strategy.weight_checksums(some) == {name: held[name] for name in some}
    assert not set(held.values()) & set(old.values())


async def test_nothing_of_the_old_weights_stays_in_the_prefix_cache(engine: Harness) -> None:
    prompt = [3 + i * 11 % 90 for i in range(3 * BLOCK + 5)]
    await engine.one(4, prompt)
    assert (await engine.one(4, prompt)).cached_tokens >= 3 * BLOCK
    await engine.update(seed=121)
    completion = await engine.one(16, prompt)
    assert completion.cached_tokens == 0
    assert_log_probs(completion, engine.hf_logits(completion.token_ids, prompt))


@pytest.mark.parametrize("paused_by_caller", [True, False])
async def test_a_response_goes_on_under_new_weights(engine: Harness, paused_by_caller: bool) -> None:
    old, old_version = engine.reference, engine.version
    _, task = await engine.started(1, LONGEST, temperature=0.0)
    if paused_by_caller:
        await engine.strategy.pause(PauseMode.KEEP)
        await engine.update(seed=131)
        await asyncio.sleep(0.2)
        assert not task.done()
        await engine.strategy.resume()
    else:
        await engine.update(seed=132)
    (completion,) = await task
    assert len(completion.token_ids) == LONGEST and completion.error is None
    first, second = completion.versions
    assert (first, second.version) == (VersionSpan(0, old_version), engine.version)
    _assert_spans(engine, completion, second.start, old)


async def test_nothing_runs_on_half_loaded_weights(engine: Harness) -> None:
    """Whatever is asked of the engine between two buckets, and whoever pauses it there decides when it goes on."""
    await engine.update(seed=133)
    old, old_version = engine.reference, engine.version
    assert engine.plan is not None
    _, task = await engine.started(1, LONG, temperature=0.0)
    await engine.strategy.begin_weight_update(engine.tensors)
    await engine.transfer(0, seed=134)
    await engine.strategy.resume()
    await engine.strategy.pause(PauseMode.KEEP)
    late = asyncio.create_task(engine.one(8))
    await asyncio.sleep(0.2)
    for number in range(1, len(engine.plan.routes)):
        await engine.transfer(number, seed=134)
    await engine.finish(seed=134)
    await asyncio.sleep(0.2)
    assert not task.done() and not late.done()
    await engine.strategy.resume()
    (completion,) = await task
    assert [span.version for span in completion.versions] == [old_version, engine.version]
    _assert_spans(engine, completion, completion.versions[1].start, old)
    engine.assert_greedy(await late, 8)


def _assert_spans(engine: Harness, completion: Completion, start: int, old: torch.nn.Module) -> None:
    """Both parts are what their weights say; the second one's keys and values of all earlier tokens are the new weights'."""
    assert 0 < start < LONG
    new, engine.reference = engine.reference, old
    old_logits = engine.hf_logits(completion.token_ids)
    engine.reference = new
    logits = torch.cat([old_logits[:start], engine.hf_logits(completion.token_ids)[start:]])
    logits[:, EOS_ID] = float("-inf")
    assert_likeliest(completion.token_ids, logits)
    assert_log_probs(completion, logits, 5e-4)


async def test_new_weights_come_while_the_cache_is_away(engine: Harness) -> None:
    await engine.update(seed=135)
    await engine.strategy.offload()
    for refused in (engine.strategy.begin_weight_update(engine.tensors), engine.strategy.weight_checksums()):
        with pytest.raises(RuntimeError, match="weights are offloaded: load them first"):
            await refused
    late = asyncio.create_task(engine.one(8))
    await engine.strategy.load([EngineMemory.WEIGHTS])
    await engine.update(seed=136)
    assert await engine.strategy.weight_checksums() == engine.checksums()
    await asyncio.sleep(0.1)
    assert not late.done()
    await engine.strategy.load([EngineMemory.KV_CACHE])
    completion = await late
    engine.assert_greedy(completion, 8)
    assert completion.versions == (VersionSpan(0, engine.version),)
    await assert_serves_reference(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3_moe", False)])
async def test_an_update_replaces_all_weights_that_were_dropped(
    family: Family, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offload without a copy leaves no parameter as it was; only an update makes the engine whole again."""
    require("vllm")
    monkeypatch.setattr(settings, "WORKER_EXTENSION", "poisoned_worker.PoisonedWorker")
    engine = await Harness.start(tmp_path / "model", family, tied)
    try:
        for seed in (151, 152):
            await engine.strategy.offload()
            await engine.strategy.load([EngineMemory.WEIGHTS])
            assert min(await engine.strategy._call_workers("poison")) > 10
            await engine.update(seed=seed)
            assert await engine.strategy.weight_checksums() == engine.checksums()
            await engine.strategy.load([EngineMemory.KV_CACHE])
            await assert_serves_reference(engine)
    finally:
        await engine.stop()


async def test_nothing_leaves_in_the_middle_of_an_update(engine: Harness) -> None:
    await engine.update(seed=137)
    assert engine.plan is not None
    await engine.strategy.begin_weight_update(engine.tensors)
    await engine.transfer(0, seed=138)
    with pytest.raises(RuntimeError, match="under way: finish it before anything is offloaded"):
        await engine.strategy.offload()
    for number in range(1, len(engine.plan.routes)):
        await engine.transfer(number, seed=138)
    await engine.finish(seed=138)
    await assert_serves_reference(engine)


async def test_refusals_leave_the_engine_as_it_was(engine: Harness) -> None:
    await engine.update(seed=141)
    good = engine.tensors
    one = good[-1]
    wrong = dataclasses.replace(one, shape=(one.shape[0] + 1, *one.shape[1:]))
    cases: list[tuple[list[ExportedTensor], str]] = [
        ([*good, dataclasses.replace(one, name="model.norm.gain")], "unknown to the model: model.norm.gain"),
        ([tensor for tensor in good if tensor is not one], f"missing: {one.name}"),
        ([*good, one], f"announced twice: {one.name}"),
        ([wrong if tensor is one else tensor for tensor in good], re.escape(f"{one.name} {wrong.shape} instead of {one.shape}")),
    ]
    if engine.tied:
        head = dataclasses.replace(one, name="lm_head.weight", shape=engine.reference.lm_head.weight.shape)
        cases.append(([*good, head], "unknown to the model: lm_head.weight"))
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            await engine.strategy.begin_weight_update(tensors)
        await assert_serves_reference(engine)


async def test_an_update_is_not_finished_before_all_has_arrived(engine: Harness) -> None:
    assert engine.plan is not None
    await engine.strategy.begin_weight_update(engine.tensors)
    with pytest.raises(RuntimeError, match=f"{len(engine.tensors)} tensors have not arrived"):
        await engine.strategy.finish_weight_update(99)
    await engine.transfer(0, seed=151)
    with pytest.raises(RuntimeError, match="under way"):
        await engine.strategy.begin_weight_update(engine.tensors)
    with pytest.raises(RuntimeError, match="under way"):
        await engine.strategy.weight_checksums()
    with pytest.raises(ValueError, match="sent before"):
        await engine.strategy.receive_bucket(engine.plan.routes[:1])
    running = asyncio.create_task(engine.one(4))
    await asyncio.sleep(0.2)
    assert not running.done()  # not on half-loaded weights
    for number in range(1, len(engine.plan.routes)):
        await engine.transfer(number, seed=151)
    engine.version += 1
    await engine.strategy.finish_weight_update(engine.version)
    completion = await running
    assert completion.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert completion.versions == (VersionSpan(0, engine.version),)


async def test_trainer_that_does_not_come_is_named_and_the_engine_goes_on(engine: Harness) -> None:
    """Nothing has arrived: the engine still has its weights, and a new connection works."""
    await engine.connect(timeout_s=1.0)
    assert engine.plan is not None
    await engine.update(seed=161)
    await engine.strategy.begin_weight_update(engine.tensors)
    with pytest.raises(TransferError, match=r"trainer rank 0 did not take part in bucket 3.* within 1 s"):
        await engine.strategy.receive_bucket(engine.plan.routes[:1])
    await assert_serves_reference(engine)
    await engine.connect()
    await engine.update(seed=162)
    await assert_serves_reference(engine)
    assert await engine.strategy.weight_checksums() == engine.checksums()
