"""A mixture of experts in an engine: it generates what Hugging Face does, before and after new weights have come."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_harness import Harness, assert_log_probs, require

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize("make", ["vllm", "sglang"])
async def test_new_weights_of_experts(tmp_path: Path, make: str) -> None:
    require(make)
    engine = await Harness.start(tmp_path / "model", "qwen3_moe", tied=False, make=make)
    try:
        for seed in (None, 101, 102):
            if seed is not None:
                await engine.update(seed)
            completion = await engine.one(32)
            assert list(completion.token_ids) == engine.hf_greedy(32)
            assert_log_probs(completion, engine.hf_logits(completion.token_ids))
    finally:
        await engine.stop()
