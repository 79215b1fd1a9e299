"""A mixture of experts in an engine: it generates what Hugging Face does, before and after new weights have come."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from engine_harness import DEVICE, DTYPE, EXACT, ON_GPU, Harness, Make, assert_log_probs, require
from support_models import load_hf, make_tiny_model

from roll_lite.config.schema.models import ModelConfig, SglangStrategyConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, GenerationRequest, Sampling
from roll_lite.distributed.strategy.base import EngineSpec
from roll_lite.distributed.strategy.build import build_engine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2, "expert_parallel": 2}, {"tensor_parallel": 2}], ids=["one", "EP2", "TP2"])
@pytest.mark.parametrize("make", ["vllm", "sglang"])
async def test_new_weights_of_experts(tmp_path: Path, make: Make, layout: dict[str, int]) -> None:
    """By EP each of two workers has half of the experts, and gets no others; by TP half of every expert."""
    require(make)
    engine = await Harness.start(tmp_path / "model", "qwen3_moe", tied=False, make=make, **layout)
    try:
        for seed in (None, 101, 102):
            if seed is not None:
                await engine.update(seed)
                assert await engine.strategy.weight_checksums() == engine.checksums()
            completion = await engine.one(32)
            engine.assert_greedy(completion, 32)
            assert_log_probs(completion, engine.hf_logits(completion.token_ids))
    finally:
        await engine.stop()


def choices(path: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """[tokens, layers with experts, k], sorted: those of transformers' routers."""
    with torch.no_grad():
        logits = load_hf(path)(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([each.topk(2).indices.sort(1).values for each in logits], dim=1)


NOT_ON_CPU = pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU vLLM does not tell of experts")


@pytest.mark.parametrize("make", ["sglang", pytest.param("vllm", marks=NOT_ON_CPU)])
async def test_the_engine_says_where_its_tokens_went(tmp_path: Path, make: Make) -> None:
    """Of prompts, also cached ones, and responses, also continued and aborted ones; all tokens but the last, which it has not run."""
    require(make)
    path = make_tiny_model(tmp_path / "model", "qwen3_moe", tied=False, sharpness=2.0, layers=3)
    options = (ON_GPU if DEVICE == "cuda" else {}) | {"kv_cache_mb": 64, "max_running_requests": 8}
    strategy = SglangStrategyConfig(**options) if make == "sglang" else VllmStrategyConfig(**options)
    engine = build_engine(EngineSpec(ModelConfig(path=path, dtype=DTYPE), strategy, max_model_len=512, columns=("rollout_experts",)))
    await engine.initialize()

    async def checked(*requests: GenerationRequest, abort_after: float | None = None) -> list[Completion]:
        prompts = {request.request_id: request.prompt_ids for request in requests}
        if abort_after is not None:
            asyncio.get_running_loop().call_later(abort_after, lambda: asyncio.ensure_future(engine.abort()))
        found = await asyncio.gather(*map(engine.generate, requests))
        for completion in found:
            assert completion.error is None and completion.experts is not None
            tokens = (*prompts[completion.request_id], *completion.token_ids)
            assert completion.experts.shape == (len(tokens) - 1, 3 * 2)
            told = torch.from_numpy(completion.experts).view(-1, 3, 2).long().sort(2).values
            alike = (told == choices(path, tokens)[:-1]).float().mean()
            assert alike == 1 if EXACT else alike > 0.9
        return found

    try:
        prompt = (20, 7, 33, 41, 8, 9, 10, 61)
        requests = [GenerationRequest(f"r/{number}", (*prompt, 30 + number), Sampling(1.0, 24, seed=number)) for number in range(6)]
        first, *_ = await checked(*requests)
        before = next(request for request in requests if request.request_id == first.request_id)
        await checked(GenerationRequest("more", (*before.prompt_ids, *first.token_ids), Sampling(1.0, 12, seed=9)))
        await checked(
            *(GenerationRequest(f"long/{number}", prompt, Sampling(1.0, 400, min_tokens=400)) for number in range(2)), abort_after=1
        )
    finally:
        await engine.shutdown()
