"""Speculative decoding changes neither what an engine samples nor its log-probs: the tests are those of an engine without it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_harness import DEVICE, Harness, Make, assert_log_probs, make_strategy, require
from support_completions import completions
from support_models import load_hf
from test_contract_continues import (  # noqa: F401 (collected here once more, for another engine)
    pump,
    test_a_stop_text_across_the_seam_ends_it_at_the_same_token,
    test_continued_samples_follow_the_distribution,
    test_greedy_equals_the_uninterrupted_response_twice_interrupted,
    test_parts_that_are_handed_out_on_the_way_are_the_response,
    test_sampled_under_truncation_and_three_sets_of_weights,
)
from test_contract_numbers import (  # noqa: F401
    TEMPERATURE,
    assert_survivors,
    masked,
    test_a_wave_admitted_while_paused_repeats_to_the_last_bit,
    test_greedy_equals_hugging_face,
    test_log_probs_are_the_trainers,
    test_log_probs_are_those_of_the_sampled_distribution,
    test_min_tokens_forbids_the_end,
    test_requests_with_other_sampling_beside_them_change_nothing,
    test_samples_of_one_prompt_differ,
    test_seeded_requests_may_join_others_and_others_them,
    test_seeds_reproduce_alone_and_among_others,
    trainer,
)
from test_contract_requests import (  # noqa: F401
    test_abort_one_many_unknown_all,
    test_abort_while_paused_returns_all_that_was_generated,
    test_as_many_out_as_in,
    test_eos_is_part_of_the_response,
    test_length,
    test_min_tokens_forbids_stop_tokens_too,
    test_offloaded_and_loaded_again_it_serves,
    test_pause_keep,
    test_seeded_prompts_beyond_one_forward_pass,
    test_stop_string,
    test_stop_token,
    test_the_context_ends_a_response_too,
    test_what_has_begun_is_told_with_its_growth_and_what_waits_is_not,
)
from test_contract_weights import (  # noqa: F401
    test_a_response_goes_on_under_new_weights,
    test_generates_what_the_new_weights_say,
    test_nothing_of_the_old_weights_stays_in_the_prefix_cache,
)
from tokenizers import Tokenizer

from roll_lite.config.schema.models import ModelConfig, SpeculationConfig
from roll_lite.data.samples import Completion, GenerationRequest, Sampling

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.nightly]

EAGER = SpeculationConfig(tokens=4, min_match=1, max_match=3)
"""Drafts wherever the last token has been seen before."""
AGAIN = (20, 7, 33, 41, 20, 7, 52, 41) * 3
TINY = Path(__file__).parents[2] / "roll_lite/examples/models/tiny"


@pytest.fixture(scope="module")
def make() -> Make:
    require("vllm")
    return "vllm"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def speculating_engine(make: Make, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    folder = tmp_path_factory.mktemp("speculates") / "m"
    harness = await Harness.start(folder, max_model_len=1024, make=make, max_batched_tokens=1280, speculation=EAGER)
    yield harness
    await harness.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(speculating_engine: Harness) -> AsyncIterator[Harness]:
    yield speculating_engine
    await speculating_engine.strategy.resume()


def drafts(tokens: Sequence[int], speculation: SpeculationConfig = EAGER) -> list[int]:
    """Next tokens by the definition: what followed the longest match of the last tokens, at its first occurrence."""
    for length in range(speculation.max_match, speculation.min_match - 1, -1):
        end = list(tokens[-length:])
        for start in range(len(tokens) - length):
            if list(tokens[start : start + length]) == end:
                return list(tokens[start + length : start + length + speculation.tokens])
    return []


def replayed(prompt: Sequence[int], response: Sequence[int], probabilities: torch.Tensor) -> tuple[int, int, float, float]:
    """(drafted, accepted, expected number of accepted, its variance), from the definition of speculative sampling."""
    drafted = accepted = 0
    expected = variance = 0.0
    done = 1  # the first token comes with the prompt's pass
    while done < len(response):
        draft = drafts([*prompt, *response[:done]])
        drafted += len(draft)
        for token in draft[: len(response) - done]:
            chance = float(probabilities[done, token])
            expected, variance = expected + chance, variance + chance * (1 - chance)
            done += 1
            if response[done - 1] != token:
                break
            accepted += 1
        else:
            done += 1  # the token after an accepted draft, or without one
    return drafted, accepted, expected, variance


@pytest.mark.skipif(DEVICE == "cuda", reason="on GPUs vLLM fills its drafts up, where nothing matches")
async def test_drafts_are_accepted_as_often_as_the_model_would_say_them(engine: Harness) -> None:
    """The engine's own counts too, which metrics are made of."""
    requests = [engine.request(60, AGAIN, 1.0, seed=seed, min_tokens=60) for seed in range(40)]
    accepted = 0
    expected = variance = 0.0
    for completion in await engine.all(requests):
        logits = engine.hf_logits(completion.token_ids, AGAIN, without_eos=True)
        assert_log_probs(completion, logits)
        found = replayed(AGAIN, completion.token_ids, logits.softmax(-1))
        assert abs(completion.accepted - found[1]) <= EAGER.tokens and abs(completion.drafted - found[0]) <= EAGER.tokens
        accepted, expected, variance = accepted + found[1], expected + found[2], variance + found[3]
    assert accepted > 10 and abs(accepted - expected) < 5 * variance**0.5


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9}, {"top_k": 1}], ids=str)
async def test_log_probs_and_keep_masks_under_truncation(engine: Harness, sampling: dict[str, Any]) -> None:
    for completion in await engine.all([engine.request(40, AGAIN, TEMPERATURE, seed=n, keep_mask=True, **sampling) for n in range(4)]):
        logits = engine.hf_logits(completion.token_ids, AGAIN) / TEMPERATURE
        assert completion.kept_ids is not None
        assert_survivors(completion, logits, sampling)
        assert_log_probs(completion, masked(logits, completion.kept_ids))


async def test_min_p_fails_alone(engine: Harness) -> None:
    assert "min_p" in ((await engine.one(4, temperature=1.0, min_p=0.1)).error or "")
    assert (await engine.one(4, temperature=1.0)).error is None


LENGTH, SAMPLES = 20, 5000
COPY = tuple(Tokenizer.from_file(str(TINY / "tokenizer.json")).encode("7 of q:").ids)


async def sampled(**options: Any) -> list[Completion]:
    """10^5 tokens of the shipped model."""
    strategy = make_strategy("vllm", ModelConfig(path=TINY, dtype="float32"), 256, **options)
    await strategy.initialize()
    try:
        shape = Sampling(1.0, LENGTH, min_tokens=LENGTH)
        requests = [GenerationRequest(str(number), COPY, shape) for number in range(SAMPLES)]
        began = time.monotonic()
        found = [completion async for completion in completions(strategy, requests)]
        print(f"{options}: {SAMPLES * LENGTH / (time.monotonic() - began):.0f} tokens/s")
        return found
    finally:
        await strategy.shutdown()


async def test_a_hundred_thousand_tokens_are_distributed_as_without() -> None:
    """Chi-square of two samples, for each position of a response to one prompt."""
    require("vllm")
    plain, fast = await sampled(), await sampled(speculation=EAGER)
    drafted, accepted = sum(one.drafted for one in fast), sum(one.accepted for one in fast)
    passes = SAMPLES * LENGTH - accepted
    print(f"{accepted / drafted:.3f} of the drafted tokens accepted, {SAMPLES * LENGTH / passes:.2f} tokens a pass")
    assert accepted > 0.1 * SAMPLES * LENGTH and not any(one.drafted for one in plain)
    for position in range(LENGTH):
        a, b = (torch.bincount(torch.tensor([one.token_ids[position] for one in found]), minlength=300) for found in (plain, fast))
        often = a + b >= 10
        cells = torch.stack([torch.cat([each[often], each[~often].sum()[None]]) for each in (a, b)]).double()
        both = cells.sum(0)
        chi_squared = ((cells[0] - cells[1]) ** 2 / both)[both > 0].sum()
        degrees = int((both > 0).sum()) - 1
        assert chi_squared < degrees + 5 * (2 * max(1, degrees)) ** 0.5, position
    oracle, numbers = load_hf(TINY, torch.float32), torch.zeros(4, dtype=torch.float64)
    for completion in fast[:500]:
        with torch.no_grad():
            logits = oracle(torch.tensor([[*COPY, *completion.token_ids]])).logits[0, len(COPY) - 1 : -1].float()
        logits[:, oracle.config.eos_token_id] = -torch.inf
        assert_log_probs(completion, logits)
        numbers += torch.tensor(replayed(COPY, completion.token_ids, logits.softmax(-1)))
    _, accepted, expected, variance = numbers.tolist()
    print(f"{accepted:.0f} drafted tokens of 500 responses accepted, {expected:.1f} expected (standard deviation {variance**0.5:.1f})")
    assert abs(accepted - expected) < 5 * variance**0.5
