"""What an engine samples and what it says about it, checked against the Hugging Face model and the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_harness import EXACT, Harness, MegatronProcess, assert_log_probs, assert_near, exact, log_probs_of
from support_models import EOS_ID, VOCAB_SIZE

from roll_lite.data.samples import Completion, VersionSpan

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPERATURE = 0.7


async def test_greedy_equals_hugging_face(engine: Harness) -> None:
    for prompt in ((20, 7, 33, 41), (5,), tuple(range(10, 60))):
        completion = await engine.one(32, prompt)
        engine.assert_greedy(completion, 32, prompt)
        assert_log_probs(completion, engine.hf_logits(completion.token_ids, prompt))
        assert completion.versions == (VersionSpan(0, engine.version),)


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
async def test_log_probs_are_those_of_the_sampled_distribution(engine: Harness, temperature: float) -> None:
    requests = [engine.request(48, (9, 10 + n), temperature, seed=n) for n in range(16)]
    prompts = {request.request_id: request.prompt_ids for request in requests}
    for completion in await engine.all(requests):
        logits = engine.hf_logits(completion.token_ids, prompts[completion.request_id])
        assert_log_probs(completion, logits / temperature)


@pytest.fixture(scope="module")
def trainer() -> Iterator[MegatronProcess]:
    process = MegatronProcess()
    yield process
    process.stop()


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
async def test_log_probs_are_the_trainers(engine: Harness, trainer: MegatronProcess, temperature: float) -> None:
    completions = await engine.all([engine.request(32, temperature=temperature, seed=n) for n in range(8)])
    engine.save_reference()
    expected = trainer.log_probs(engine.folder, engine.PROMPT, [c.token_ids for c in completions], temperature)
    for completion, log_probs in zip(completions, expected, strict=True):
        assert_near(torch.tensor(completion.log_probs), log_probs)


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


def assert_survivors(completion: Completion, logits: torch.Tensor, sampling: dict[str, Any]) -> None:
    """`kept_ids` are what the definitions keep; in 16 bits nearly everywhere, and elsewhere but for a few tokens at the border."""
    assert completion.kept_ids is not None
    wrong = [len(set(kept) ^ survivors(row, **sampling)) for kept, row in zip(completion.kept_ids, logits, strict=True)]
    if EXACT:
        assert not any(wrong)
    else:
        assert sum(map(bool, wrong)) <= len(wrong) / 3 and max(wrong) <= 4


def masked(logits: torch.Tensor, kept_ids: Any) -> torch.Tensor:
    dropped = torch.ones_like(logits, dtype=torch.bool)
    for row, tokens in enumerate(kept_ids):
        dropped[row, list(tokens) or slice(None)] = False
    return logits.masked_fill(dropped, -torch.inf)


TRUNCATIONS = [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}, {"top_k": 1}, {"top_k": 5000}]


def name_of(sampling: dict[str, Any]) -> str:
    return "+".join(sampling) + str(sampling.get("top_k", ""))


@pytest.mark.parametrize("sampling", TRUNCATIONS, ids=name_of)
async def test_log_probs_under_truncation_are_renormalised(engine: Harness, sampling: dict[str, Any]) -> None:
    completion = await engine.one(40, temperature=TEMPERATURE, seed=5, **sampling)
    assert completion.kept_ids is None
    logits = engine.hf_logits(completion.token_ids) / TEMPERATURE
    assert_log_probs(completion, masked(logits, [survivors(row, **sampling) for row in logits]))


@pytest.mark.parametrize("sampling", TRUNCATIONS, ids=name_of)
async def test_the_keep_mask_says_what_survived(engine: Harness, sampling: dict[str, Any]) -> None:
    completion = await engine.one(40, temperature=TEMPERATURE, seed=3, keep_mask=True, **sampling)
    assert completion.kept_ids is not None and len(completion.kept_ids) == len(completion.token_ids)
    logits = engine.hf_logits(completion.token_ids) / TEMPERATURE
    for token, kept in zip(completion.token_ids, completion.kept_ids, strict=True):
        assert token in kept and len(set(kept)) == len(kept)
    assert_survivors(completion, logits, sampling)
    assert_log_probs(completion, masked(logits, completion.kept_ids))


async def test_min_tokens_forbids_the_end(engine: Harness) -> None:
    completion = await engine.one(30, temperature=TEMPERATURE, seed=1, keep_mask=True, min_tokens=10)
    assert completion.kept_ids is not None
    for position, kept in enumerate(completion.kept_ids):
        assert set(kept) == set(range(VOCAB_SIZE)) - ({EOS_ID} if position < 10 else set())
    assert_log_probs(completion, masked(engine.hf_logits(completion.token_ids) / TEMPERATURE, completion.kept_ids))


async def test_requests_with_other_sampling_beside_them_change_nothing(engine: Harness) -> None:
    """All of them in the same batches, whose size moves the last digits of a log-prob."""
    asking = engine.request(24, temperature=TEMPERATURE, top_k=3, seed=1, keep_mask=True)
    plain = engine.request(24, temperature=TEMPERATURE, top_k=3, seed=1)
    untruncated = engine.request(24, temperature=TEMPERATURE, seed=2, keep_mask=True)
    greedy = engine.request(24, temperature=0.0, top_k=3, keep_mask=True)
    found = {completion.request_id: completion for completion in await engine.frozen_wave([asking, plain, untruncated, greedy])}
    assert found[plain.request_id].kept_ids is None
    assert found[plain.request_id].token_ids == found[asking.request_id].token_ids
    assert found[plain.request_id].log_probs == pytest.approx(found[asking.request_id].log_probs, abs=1e-5)
    assert all(2 < len(kept) <= 4 for kept in found[asking.request_id].kept_ids or ())
    for request in (untruncated, greedy):
        completion = found[request.request_id]
        assert completion.kept_ids == ((),) * len(completion.token_ids), "() stands for all tokens"
        assert_log_probs(completion, engine.hf_logits(completion.token_ids) / (request.sampling.temperature or 1.0))


async def test_what_is_too_large_for_a_keep_mask_fails_alone(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.strategy, "_vocabulary", 151_936)
        bad, good = (engine.request(4, temperature=1.0, top_p=0.9, keep_mask=asked) for asked in (True, False))
        found = {completion.request_id: completion for completion in await engine.all([bad, good])}
    assert "top_p without top_k" in (found[bad.request_id].error or "")
    assert found[good.request_id].error is None
    assert (await engine.one(4, temperature=1.0, top_k=1016, top_p=0.9)).error is None


# ---------------------------------------------------------------- chance


async def test_samples_of_one_prompt_differ(engine: Harness) -> None:
    completions = await engine.all([engine.request(24, temperature=1.0) for _ in range(16)])
    assert len({completion.token_ids for completion in completions}) == 16


async def test_seeds_reproduce_alone_and_among_others(engine: Harness) -> None:
    requests = [engine.request(24, temperature=1.0, seed=seed) for seed in (11, 12, 13, 14, 11)]
    by_id = {completion.request_id: completion for completion in await engine.all(requests)}
    first, *others, again = (by_id[request.request_id].token_ids for request in requests)
    assert len({first, *others}) == 4
    later = await engine.one(24, temperature=1.0, seed=11)
    if EXACT:
        assert first == again
        assert later.token_ids == first


def shared(one: Completion, other: Completion) -> float:
    """The part of a response up to the first token that differs."""
    alike = [mine == theirs for mine, theirs in zip(one.token_ids, other.token_ids, strict=True)]
    return [*alike, False].index(False) / len(alike)


async def test_responses_of_a_seed_begin_alike_and_others_do_not(engine: Harness) -> None:
    """In one batch, and alone. In 16 bits each token in forty is another one in a batch of another size, and then all later ones."""
    requests = [engine.request(24, temperature=1.0, seed=seed, min_tokens=24) for seed in [*range(16), *range(16)]]
    by_id = {completion.request_id: completion for completion in await engine.all(requests)}
    said = [by_id[request.request_id] for request in requests]
    alone = [await engine.one(24, temperature=1.0, seed=seed, min_tokens=24) for seed in range(16)]
    for again in (said[16:], alone):
        assert sum(map(shared, said, again)) / 16 >= (1.0 if EXACT else 0.4)
    assert sum(map(shared, said, said[1:17])) / 16 < 0.2


async def test_seeded_requests_may_join_others_and_others_them(engine: Harness) -> None:
    """A batch in which no request has a seed is sampled without seeds, until one with a seed joins it."""
    requests = [engine.request(40, temperature=1.0, seed=seed, min_tokens=40) for seed in (None, None, 21, None, 22, None)]
    alone = await engine.one(40, temperature=1.0, seed=21, min_tokens=40)
    completions: list[Completion] = []

    async def later(number: int) -> None:
        await asyncio.sleep(0.02 * number)
        completions.extend(await engine.all([requests[number]]))

    await asyncio.gather(*map(later, range(len(requests))))
    by_id = {completion.request_id: completion for completion in completions}
    if EXACT:
        assert by_id[requests[2].request_id].token_ids == alone.token_ids
    assert len({completion.token_ids for completion in completions}) == len(requests)
    for completion in completions:
        assert len(completion.token_ids) == 40
        assert_log_probs(completion, engine.hf_logits(completion.token_ids, without_eos=True))


@pytest.mark.parametrize("seeded", [True, False])
async def test_samples_follow_the_distribution(engine: Harness, seeded: bool) -> None:
    """First tokens of many samples against their probabilities: seeds must not favour anything."""
    completions = await engine.all([engine.request(1, temperature=1.0, seed=n if seeded else None) for n in range(1000)])
    counts = torch.bincount(torch.tensor([completion.token_ids[0] for completion in completions]), minlength=VOCAB_SIZE)
    expected = engine.hf_logits((5,))[0].softmax(-1) * 1000
    often = expected > 5
    chi_squared = (((counts - expected) ** 2) / expected)[often].sum()
    degrees = int(often.sum())
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


@exact
async def test_a_wave_admitted_while_paused_repeats_to_the_last_bit(engine: Harness) -> None:
    waves = []
    for _ in range(2):
        requests = [engine.request(30, (7, 8 + n), 1.0, seed=n) for n in range(24)]
        completions = await engine.frozen_wave(requests)
        by_id: dict[str, Completion] = {completion.request_id: completion for completion in completions}
        waves.append([(by_id[r.request_id].token_ids, by_id[r.request_id].log_probs) for r in requests])
    assert waves[0] == waves[1]


async def test_the_oracle_is_not_trivial(engine: Harness) -> None:
    """The model's distributions are neither flat nor certain, or the tests above would show little."""
    logits = engine.hf_logits(tuple(range(10, 40)))
    best = log_probs_of(logits, logits.argmax(-1).tolist()).exp()
    assert 0.05 < float(best.mean()) < 0.95
