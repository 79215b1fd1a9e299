"""What a rollout worker tries before the engines are ready."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.config.schema.domains import DomainConfig, RewardConfig
from roll_lite.data.prompts import PromptSet
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.workers.environment import EnvironmentPool, EnvironmentWorker
from roll_lite.workers.rollout import RolloutWorker

ROOT = Path(__file__).resolve().parents[2]


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


async def test_differences_from_the_chat_template_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's template leaves out earlier thoughts."""
    model, template = ROOT / "roll_lite/examples/models/tiny_chat", ROOT / "tests/environments/templates/qwen3.jinja"
    section = {"name": "function", "function": "tests.workers.environment_cases.HigherLower"}
    given = {"data": {"train": "x.jsonl"}, "template": {"name": "chat", "file": template}, "environment": section}
    domain = DomainConfig.model_validate(given)
    pool = EnvironmentPool("guess", domain, model)
    [member] = pool._fleet.members
    monkeypatch.setattr(member, "prepare", EnvironmentWorker(model, domain, "guess").prepare)
    await member.start()
    worker: Any = object.__new__(RolloutWorker)
    worker._pools, worker._environments, worker._data_notes = {}, {"guess": pool}, ["a note"]
    first, note = await worker.notes()
    assert first == "a note" and note.startswith("domains.guess.template: in a conversation with two turns"), note
    assert "\n  in a conversation with thoughts" in note
