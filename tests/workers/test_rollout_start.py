"""What a rollout worker tries before the engines are ready."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.prompts import PromptSet
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.workers.rollout import RolloutWorker


@pytest.mark.parametrize(("unreadable", "starts"), [({0}, True), ({0, 2, 4}, False), (set(), True)])
async def test_one_reference_that_cannot_be_read_does_not_keep_a_run_from_starting(unreadable: set[int], starts: bool) -> None:
    class Pool:
        async def score(self, item: RewardInput) -> Score:
            if item.answer in unreadable:
                raise RewardFailed("the reference answer cannot be read")
            return Score(0.0)

    prompts = PromptSet("sums")
    for answer in range(5):
        prompts.add("?", [answer], answer=answer)
    worker: Any = object.__new__(RolloutWorker)
    worker._pools, worker._environments, worker._domains = {"sums": Pool()}, {}, [SimpleNamespace(name="sums", prompts=prompts)]
    worker._config = SimpleNamespace(domains={"sums": SimpleNamespace(reward=RewardConfig(name="math", retries=1))})
    with nullcontext() if starts else pytest.raises(ValueError, match="domains.sums.reward: .* failed: the reference answer cannot"):
        await worker._try_rewards({})
