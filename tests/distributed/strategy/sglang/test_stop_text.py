"""Stop texts against vLLM's own search, on a tokenizer whose characters need several tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll_lite.data.samples import GenerationRequest, Sampling
from roll_lite.distributed.strategy.inference.requests import stop_overlap_tokens
from roll_lite.distributed.strategy.sglang.compat.requests import StopText
from roll_lite.distributed.strategy.vllm.compat.requests import detokenizer_with_overlap


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({token: number for number, token in enumerate(["<eos>", "<pad>", *alphabet])}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>", pad_token="<pad>")


def first_stop(
    tokenizer: PreTrainedTokenizerFast, prompt: list[int], response: list[int], stops: list[str], least: int = 0, overlap: int = 0
) -> int | None:
    """So many tokens has a response that they end."""
    seen = StopText(tokenizer, prompt, stops, overlap)
    return next((seen.tokens for token in response if seen.next(token) is not None and seen.tokens > least), None)


def test_across_a_seam(tokenizer: PreTrainedTokenizerFast) -> None:
    """A character in pieces, and special tokens in between."""
    prompt, response = tokenizer.encode("ab"), tokenizer.encode("xé<eos>é.x")
    whole = [*prompt, *response]
    for length in range(1, 6):
        seen = StopText(tokenizer, whole[: 2 + length], ["éé", "ab"], overlap=length)
        assert [seen.next(token) for token in response[length:]].index("éé") == 5 - length
    again = StopText(tokenizer, whole[:8], ["é"], overlap=6)
    assert [again.next(token) for token in response[6:]] == [None, None], "what was found or passed over before is not found again"


def test_by_hand(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, response = tokenizer.encode("ab"), tokenizer.encode("xé<eos>é.x")
    assert len(response) == 8
    assert first_stop(tokenizer, prompt, response, ["é"]) == 3
    assert first_stop(tokenizer, prompt, response, ["é"], least=2) == 3
    assert first_stop(tokenizer, prompt, response, ["é"], least=3) == 6
    assert first_stop(tokenizer, prompt, response, ["éé"]) == 6, "special tokens have no text"
    assert first_stop(tokenizer, prompt, response, ["bx", "<eos>"]) is None, "the prompt does not count"
    assert first_stop(tokenizer, prompt, response, ["xéé.x", "q"], least=7) == 8, "however long, and wherever it began"


def test_vllm_finds_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = pytest.importorskip("vllm.v1.engine.detokenizer")
    chance = random.Random(4)
    pieces = ["a", "b", "é", "日", "<eos>", "\U0001f600"]
    found = 0
    for _ in range(300):
        prompt, response = (tokenizer.encode("".join(chance.choices(pieces, k=count))) for count in (4, 12))
        response = response[: chance.randint(1, len(response))]
        stops = ["".join(chance.choices(pieces[:4], k=chance.randint(1, 3))) for _ in range(2)]
        least = chance.randint(0, len(response))
        parameters = SimpleNamespace(
            stop=stops, min_tokens=least, include_stop_str_in_output=True, skip_special_tokens=True, spaces_between_special_tokens=True
        )
        theirs = detokenizer.FastIncrementalDetokenizer(
            tokenizer, SimpleNamespace(sampling_params=parameters, prompt_token_ids=prompt, request_id="r")
        )
        expected = next((count for count, token in enumerate(response, 1) if theirs.update([token], False) is not None), None)
        assert first_stop(tokenizer, prompt, response, stops, least) == expected
        found += expected is not None
        length = chance.randrange(len(response) if expected is None else expected)
        so_far, rest = [*prompt, *response[:length]], response[length:]
        sampling = Sampling(1.0, 100, min_tokens=max(0, least - length), stop=tuple(stops))
        overlap = stop_overlap_tokens(GenerationRequest("r", tuple(so_far), sampling, resumed_tokens=length))
        parameters.min_tokens = sampling.min_tokens
        if overlap:
            request = SimpleNamespace(sampling_params=parameters, prompt_token_ids=so_far, request_id="r")
            theirs = detokenizer_with_overlap(tokenizer, request, overlap)
            goes_on = next((count for count, token in enumerate(rest, 1) if theirs.update([token], False) is not None), None)
            assert goes_on == (None if expected is None else expected - length)
        assert first_stop(tokenizer, so_far, rest, stops, sampling.min_tokens, overlap) == (None if expected is None else expected - length)
    assert 50 < found < 250
