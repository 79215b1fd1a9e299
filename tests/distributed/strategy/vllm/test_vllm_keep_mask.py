"""What the real engine says survived truncation, checked against the Hugging Face model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_harness import Harness, assert_log_probs
from support_models import EOS_ID, VOCAB_SIZE

from roll_lite.data.samples import Completion
from roll_lite.distributed.strategy.vllm import compat

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPERATURE = 0.7


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    harness = await Harness.start(tmp_path_factory.mktemp("model") / "m", max_model_len=128)
    yield harness
    await harness.stop()


def survivors(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """From the definitions, in plain Python: min_p, then the k likeliest, then the smallest set of mass top_p among those."""
    p = logits.double().softmax(-1).tolist()
    tokens = [token for token in sorted(range(len(p)), key=lambda token: -p[token]) if p[token] >= min_p * max(p)]
    tokens = tokens[:top_k] if top_k else tokens
    mass, kept, reached = sum(p[token] for token in tokens), set(), 0.0
    for token in tokens:
        if reached < top_p:
            kept.add(token)
        reached += p[token] / mass
    return kept


def masked(logits: torch.Tensor, completion: Completion) -> torch.Tensor:
    assert completion.kept_ids is not None
    dropped = torch.ones_like(logits, dtype=torch.bool)
    for row, tokens in enumerate(completion.kept_ids):
        dropped[row, list(tokens) or slice(None)] = False
    return logits.masked_fill(dropped, -torch.inf)


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}, {"top_k": 1}, {"top_k": 5000}],
    ids=lambda sampling: "+".join(sampling) + str(sampling.get("top_k", "")),
)
async def test_survivors(engine: Harness, sampling: dict[str, Any]) -> None:
    completion = await engine.one(40, temperature=TEMPERATURE, seed=3, keep_mask=True, **sampling)
    assert completion.kept_ids is not None and len(completion.kept_ids) == len(completion.token_ids)
    logits = engine.hf_logits(completion.token_ids) / TEMPERATURE
    for token, kept, row in zip(completion.token_ids, completion.kept_ids, logits, strict=True):
        assert token in kept and len(set(kept)) == len(kept)
        assert set(kept) == survivors(row, **sampling)
    assert_log_probs(completion, masked(logits, completion))


async def test_min_tokens_forbids_the_end(engine: Harness) -> None:
    completion = await engine.one(30, temperature=TEMPERATURE, seed=1, keep_mask=True, min_tokens=10)
    assert completion.kept_ids is not None
    for position, kept in enumerate(completion.kept_ids):
        assert set(kept) == set(range(VOCAB_SIZE)) - ({EOS_ID} if position < 10 else set())
    assert_log_probs(completion, masked(engine.hf_logits(completion.token_ids) / TEMPERATURE, completion))


async def test_who_does_not_ask_gets_nothing_also_beside_others(engine: Harness) -> None:
    asking = engine.request(24, temperature=TEMPERATURE, top_k=3, seed=1, keep_mask=True)
    plain = engine.request(24, temperature=TEMPERATURE, top_k=3, seed=1)
    untruncated = engine.request(24, temperature=TEMPERATURE, seed=2, keep_mask=True)
    greedy = engine.request(24, temperature=0.0, top_k=3, keep_mask=True)
    found = {completion.request_id: completion for completion in await engine.all([asking, plain, untruncated, greedy])}
    assert found[plain.request_id].kept_ids is None
    assert found[plain.request_id].token_ids == found[asking.request_id].token_ids
    assert found[plain.request_id].log_probs == pytest.approx(found[asking.request_id].log_probs, abs=1e-5)
    assert all(2 < len(kept) <= 4 for kept in found[asking.request_id].kept_ids or ())
    for request in (untruncated, greedy):
        completion = found[request.request_id]
        assert completion.kept_ids == ((),) * len(completion.token_ids), "() stands for all tokens"
        assert_log_probs(completion, engine.hf_logits(completion.token_ids) / (request.sampling.temperature or 1.0))


async def test_what_is_too_large_fails_alone(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.strategy, "_vocabulary", 151_936)
    bad, good = (engine.request(4, temperature=1.0, top_p=0.9, keep_mask=asked) for asked in (True, False))
    found = {completion.request_id: completion for completion in await engine.all([bad, good])}
    assert "top_p without top_k" in (found[bad.request_id].error or "")
    assert found[good.request_id].error is None
    assert (await engine.one(4, temperature=1.0, top_k=1016, top_p=0.9)).error is None


async def test_all_tokens_that_tie_with_the_last_are_kept() -> None:
    """top_k 2 where three tokens are equally likely: the engine samples from all three, and reports k + TIE_ROOM."""
    positions = [
        [(7, math.log(0.2)), (4, math.log(0.4)), (7, math.log(0.2)), (8, math.log(0.2)), (9, math.log(0.2)), (3, -math.inf)],
        [(8, math.log(0.5)), (8, math.log(0.5)), (4, math.log(0.5)), (3, -math.inf), (2, -math.inf), (1, -math.inf)],
    ]
    flat = SimpleNamespace(
        start_indices=[0, 6],
        end_indices=[6, 12],
        token_ids=[token for position in positions for token, _ in position],
        logprobs=[log_prob for position in positions for _, log_prob in position],
    )
    response = SimpleNamespace(token_ids=[7, 8], logprobs=flat, finish_reason="length", weight_versions=None)
    output: Any = SimpleNamespace(request_id="r", outputs=[response])
    found = compat.completion(output, SimpleNamespace(decode=lambda *_, **__: ""), 0, alternatives=5)
    assert found.kept_ids == ((7, 4, 8, 9), (8, 4))
    assert found.log_probs == (math.log(0.2), math.log(0.5))
