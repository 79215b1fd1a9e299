"""One engine over two workers: each takes the full tensors and keeps its part."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_harness import Harness, assert_log_probs, random_state

from roll_lite.distributed.weight_sync.checksum import checksum


@pytest.mark.slow
async def test_two_workers(tmp: Path) -> None:
    """A single key/value head, which both workers hold."""
    engine = await Harness.start(tmp / "m", "qwen2", tied=True, tensor_parallel=2)
    try:
        assert list((await engine.one(24)).token_ids) == engine.hf_greedy(24)
        await engine.update(seed=21)
        completion = await engine.one(24)
        assert list(completion.token_ids) == engine.hf_greedy(24)
        assert_log_probs(completion, engine.hf_logits(completion.token_ids))
        expected = {name: checksum(tensor) for name, tensor in random_state("qwen2", True, 21).items()}
        assert await engine.strategy.weight_checksums() == expected
        task = asyncio.create_task(engine.one(400, min_tokens=400))
        await asyncio.sleep(0.1)
        engine.strategy._processes._all[-1].kill()  # one worker, not the engine's process
        assert "died" in ((await asyncio.wait_for(task, 10.0)).error or "")
        assert not (await engine.strategy.health()).alive
    finally:
        await engine.stop()
