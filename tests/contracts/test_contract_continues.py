"""A response that was ended in its middle goes on with another request, through the token blocks, as if nothing had happened."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import reduce
from itertools import pairwise

import pytest
import torch
from engine_harness import BLOCK, EXACT, PROMPT, Harness, assert_likeliest, assert_near, exact, log_probs_of
from support_local_engine import collect, fetch_block
from support_models import EOS_ID

from roll_lite.data.samples import FinishReason, GenerationRequest, TokenRow, Turn, VersionSpan, joined, since_token
from roll_lite.distributed.strategy.inference import requests as in_flight
from roll_lite.workers.completions import CompletionPump
from roll_lite.workers.token_blocks import KEPT_IDS, TokenRecord, joined_block

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 600
KEPT = {"top_k": 8, "top_p": 0.9, "keep_mask": True}


@pytest.fixture
def pump(engine: Harness) -> CompletionPump:
    return CompletionPump(engine.strategy, fetch_block, linger_s=0.0, columns=[KEPT_IDS])


async def turns(pump: CompletionPump, *requests: GenerationRequest) -> dict[str, Turn]:
    await pump.submit(requests, frozen=False)
    return await answers(pump, len(requests))


async def answers(pump: CompletionPump, count: int) -> dict[str, Turn]:
    found: dict[str, Turn] = {}
    while len(found) < count:
        found |= {turn.request_id: turn for turn in (await collect(pump, 30.0)).turns}
    return found


async def interrupted(engine: Harness, pump: CompletionPump, request: GenerationRequest) -> Turn:
    """Ended by an abort, somewhere in the middle; again where a busy machine had it end before."""
    for _ in range(30):
        await pump.submit([request], frozen=False)
        answer = asyncio.create_task(answers(pump, 1))
        while not answer.done() and not await engine.generated([request.request_id]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await pump.abort([request.request_id])
        turn = (await answer)[request.request_id]
        if turn.length < request.sampling.max_tokens:
            break
    assert turn.finish_reason is FinishReason.ABORT and 0 < turn.length < request.sampling.max_tokens, turn
    return turn


def rest_of(request: GenerationRequest, turn: Turn, part: int = 1) -> GenerationRequest:
    """What is missing, as a request: `turn` is what there is of it."""
    sampling = request.sampling
    missing = replace(
        sampling, max_tokens=sampling.max_tokens - turn.length, min_tokens=max(0, sampling.min_tokens - turn.length), seed=None
    )
    return GenerationRequest(f"{request.request_id}/part{part}", (), missing, turn.tokens, request.resumed_tokens + turn.length)


def whole(turn: Turn) -> TokenRecord:
    assert turn.error is None and isinstance(turn.tokens, TokenRow), turn
    return TokenRecord.read(turn.tokens.block, turn.tokens.row)


def assert_record(record: TokenRecord, logits: torch.Tensor) -> None:
    prompt = len(PROMPT)
    assert record.ids[:prompt].tolist() == list(PROMPT) and record.mask.tolist() == [False] * prompt + [True] * (len(record) - prompt)
    expected = log_probs_of(logits, record.ids[prompt:].tolist())
    assert_near(torch.from_numpy(record.log_probs[prompt:]), expected)


async def test_greedy_equals_the_uninterrupted_response_twice_interrupted(engine: Harness, pump: CompletionPump) -> None:
    request = engine.request(LONG, min_tokens=LONG)
    uninterrupted = await engine.one(LONG, min_tokens=LONG)
    first = await interrupted(engine, pump, request)
    rest = rest_of(request, first)
    second = await interrupted(engine, pump, rest)
    last = rest_of(rest, second, part=2)
    third = (await turns(pump, last))[last.request_id]
    assert first.length + second.length + third.length == LONG and third.finish_reason is FinishReason.LENGTH
    spoken = GenerationRequest(f"{request.request_id}/turn1", (5, 6), replace(request.sampling, max_tokens=4, min_tokens=0), third.tokens)
    turn = (await turns(pump, spoken))[spoken.request_id]
    assert len(PROMPT) + LONG - 2 * BLOCK < turn.cached_tokens <= len(PROMPT) + LONG, "a later turn finds what was said in the cache"
    record = whole(third)
    tokens = record.ids[len(PROMPT) :].tolist()
    assert third.text.startswith(second.text) and second.text.startswith(first.text)
    if EXACT:
        assert tokens == list(uninterrupted.token_ids) and third.text == uninterrupted.text
    logits = engine.hf_logits(tokens, without_eos=True)
    assert_likeliest(tokens, logits)
    assert_record(record, logits)


async def test_sampled_under_truncation_and_three_sets_of_weights(engine: Harness, pump: CompletionPump) -> None:
    """Log-probs and masks of each part are those of the weights that it was sampled from, and the versions of the whole say which."""
    request = engine.request(LONG, temperature=0.8, min_tokens=LONG, **KEPT)
    weights = [(engine.reference, engine.version)]
    parts = [await interrupted(engine, pump, request)]
    for number, seed in enumerate((191, 193), start=1):
        await engine.update(seed)
        weights.append((engine.reference, engine.version))
        request = rest_of(request, parts[-1], number)
        parts.append(await interrupted(engine, pump, request) if number == 1 else (await turns(pump, request))[request.request_id])
    starts = [0, parts[0].length, parts[0].length + parts[1].length, LONG]
    spans = tuple(VersionSpan(start, version) for start, (_, version) in zip(starts, weights, strict=False))
    assert reduce(joined, parts).versions == spans and len({span.version for span in spans}) == 3
    record = whole(parts[-1])
    assert len(record) == len(PROMPT) + LONG and KEPT_IDS in record.extra
    tokens = record.ids[len(PROMPT) :].tolist()
    under = [replace(engine, reference=reference).hf_logits(tokens, without_eos=True) for reference, _ in weights]
    logits = torch.cat([one[start:end] for one, (start, end) in zip(under, pairwise(starts), strict=True)]) / 0.8
    for position, kept in enumerate(record.extra[KEPT_IDS][len(PROMPT) :]):
        dropped = torch.ones(logits.shape[-1], dtype=torch.bool)
        dropped[torch.from_numpy(kept[kept >= 0]).long()] = False
        assert 1 <= int((~dropped).sum()) <= 9 and not dropped[tokens[position]]
        logits[position, dropped] = -torch.inf
    assert_record(record, logits)
    for part in parts[:-1]:
        earlier = whole(part)
        assert record.log_probs[: len(earlier)].tolist() == earlier.log_probs.tolist(), "nothing of earlier parts has been recomputed"


@exact
async def test_a_stop_text_across_the_seam_ends_it_at_the_same_token(engine: Harness, pump: CompletionPump) -> None:
    free = await engine.one(60, min_tokens=60)
    stop = free.text[20:24]
    ended = await engine.one(60, stop=(stop,))
    length = len(ended.token_ids)
    assert ended.finish_reason is FinishReason.STOP and free.text.count(stop, 0, 24) == 1 and length < 60
    for seam in range(length - 3, length):
        before = engine.request(seam, min_tokens=seam)
        first = (await turns(pump, before))[before.request_id]
        assert first.length == seam
        asked = replace(before, sampling=replace(before.sampling, max_tokens=60, min_tokens=0, stop=(stop,)))
        rest = rest_of(asked, first)
        second = (await turns(pump, rest))[rest.request_id]
        assert (second.length, second.finish_reason, second.text) == (length - seam, FinishReason.STOP, ended.text)
        assert whole(second).ids[len(PROMPT) :].tolist() == list(ended.token_ids)
    # What ended before the seam, where min_tokens forbade it, does not end what comes after.
    before = engine.request(length, min_tokens=length)
    first = (await turns(pump, before))[before.request_id]
    rest = rest_of(replace(before, sampling=replace(before.sampling, max_tokens=length + 3, min_tokens=length + 3, stop=(stop,))), first)
    assert (await turns(pump, rest))[rest.request_id].length == 3


async def test_parts_that_are_handed_out_on_the_way_are_the_response(
    engine: Harness, pump: CompletionPump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined they are what the response begins with, to the last bit of the log-probs, and with its masks and versions, also where weights
    change on the way."""
    monkeypatch.setattr(in_flight, "BEGUN_POLL_S", 0.01)
    monkeypatch.setattr(in_flight, "PARTS_EVERY", 1)
    requests = [engine.request(LONG, temperature=0.8, min_tokens=LONG, seed=n, **sampling) for n, sampling in enumerate(({}, KEPT))]
    parts: dict[str, list[Turn]] = {request.request_id: [] for request in requests}
    turns: dict[str, Turn] = {}
    await engine.update(197)  # the next one is quick
    before = engine.version
    await pump.submit(requests, frozen=False)
    while len(turns) < len(requests):
        if engine.version == before and all(parts.values()):
            await engine.update(199)
        collected = await collect(pump, 30.0)
        turns |= {turn.request_id: turn for turn in collected.turns}
        for part in collected.parts:
            assert part.finish_reason is None and part.length == (part.tokens.length if part.tokens else 0) - 1
            parts[part.request_id].append(part)
    for request in requests:
        rows = [part.tokens for part in parts[request.request_id] if part.tokens is not None]
        assert len(rows) > 1, "several parts"
        begun, record = TokenRecord.read(await joined_block(request, rows, fetch_block), 0), whole(turns[request.request_id])
        count = len(begun)
        assert len(PROMPT) < count < len(record), "the newest token may be the response's last, which only the answer tells"
        assert begun.ids.tolist() == record.ids[:count].tolist() and begun.mask.tolist() == record.mask[:count].tolist()
        assert begun.log_probs.tolist() == record.log_probs[:count].tolist()
        if request.sampling.keep_mask:
            kept = [[set(row[row >= 0]) for row in one.extra[KEPT_IDS][:count]] for one in (begun, record)]
            assert kept[0] == kept[1] and any(kept[0])
        versions = turns[request.request_id].versions
        assert [span.version for span in versions] == [before, engine.version]
        assert reduce(joined, parts[request.request_id]).versions == since_token(versions, 0, count - len(PROMPT)) == versions


async def test_continued_samples_follow_the_distribution(engine: Harness, pump: CompletionPump) -> None:
    """The first token after the seam, over many requests."""
    before = engine.request(12, min_tokens=12)
    first = (await turns(pump, before))[before.request_id]
    count, tokens = 1500, whole(first).ids[len(PROMPT) :].tolist()
    asked = [rest_of(replace(before, sampling=replace(before.sampling, temperature=1.0, max_tokens=13)), first, n) for n in range(count)]
    drawn = [int(whole(turn).ids[-1]) for turn in (await turns(pump, *asked)).values()]
    probabilities = engine.hf_logits([*tokens, EOS_ID])[-1].softmax(-1)
    expected, counts = probabilities * count, torch.bincount(torch.tensor(drawn), minlength=len(probabilities)).float()
    often = expected > 5
    chi_squared = (((counts - expected) ** 2) / expected)[often].sum()
    degrees = int(often.sum())
    assert degrees > 3 and chi_squared < degrees + 5 * (2 * degrees) ** 0.5
