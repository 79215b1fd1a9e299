"""Token proof on engines: agents converse with them in every way that agents have, and weights change in the middle.

Each sampled token trains exactly once, with the id, log-prob and version that the engine gave it, behind the tokens that the engine saw.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch
from engine_harness import Harness, Make, log_probs_of
from support_local_engine import LocalEngine

from roll_lite.data.samples import TURN, Author, Branch, Completion, GenerationRequest, Sampling, Transcript
from roll_lite.distributed.strategy.base import PauseMode
from roll_lite.environments.episode import Ask, Limits
from roll_lite.scheduler.router import Router
from roll_lite.workers.token_blocks import TokenRecord
from tests.environments.conftest import _tokenizer
from tests.environments.test_rendering import FAMILIES
from tests.environments.test_token_proof import Agent, played, renderers_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly, pytest.mark.timeout(900)]

CONVERSATIONS, AT_ONCE = 50, 10
"""Per family: 200 in all."""
ROOM = MAX_PROMPT = 1000
SHORTEST, LONGEST = 5, 60


class Sampled(NamedTuple):
    """What the engine was given and what it gave."""

    before: list[int]
    completion: Completion


class Engine:
    """An engine that keeps what it samples, and gets new weights while it samples."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.sampled = harness, dict[str, list[Sampled]]()
        self.router = Router([LocalEngine("engine0", harness.strategy)], timeout_s=120.0)
        self.weights = {harness.version: harness.reference}
        self._generate = harness.strategy.generate
        harness.strategy.generate = self.generate  # type: ignore[method-assign]

    def generate(self, request: GenerationRequest, *more: Any) -> asyncio.Future[Completion]:
        answer = self._generate(request, *more)
        answer.add_done_callback(partial(self._keep, request))
        return answer

    def _keep(self, request: GenerationRequest, answer: asyncio.Future[Completion]) -> None:
        """One record per part of a response that was interrupted."""
        name = request.request_id.partition("~")[0]
        self.sampled.setdefault(name, []).append(Sampled(list(request.prompt_ids), answer.result()))

    async def update(self, seed: int, how: str) -> None:
        """Send new weights. `how`: running requests end before, are interrupted, or are paused and continue under the new weights."""
        if how == "pause":
            await self.harness.strategy.pause(PauseMode.KEEP)
        else:
            await self.router.hold(interrupt=how == "abort")
        await self.harness.update(seed)
        self.weights[self.harness.version] = self.harness.reference
        if how == "pause":
            await self.harness.strategy.resume()
        self.router.weights_changed()
        self.router.release()


@pytest_asyncio.fixture(loop_scope="session", params=FAMILIES)
async def engine(request: pytest.FixtureRequest, make: Make, tmp_path: Path) -> AsyncIterator[tuple[Engine, str, Any]]:
    tokenizer = _tokenizer(request.param)
    shape = {"vocab_size": -(-len(tokenizer) // 64) * 64, "eos_token_id": tokenizer.eos_token_id}
    harness = await Harness.start(tmp_path / "m", max_model_len=ROOM + MAX_PROMPT, make=make, shape=shape, tokenizer=tokenizer)
    yield Engine(harness), request.param, tokenizer
    await harness.stop()


async def test_every_sampled_token_trains_once(engine: tuple[Engine, str, Any]) -> None:
    sampler, family, tokenizer = engine
    chance = random.Random(family)
    ends = tuple(chance.sample(range(len(tokenizer)), len(tokenizer) // 25))  # a random model seldom ends by itself
    sampling = Sampling(1.0, ROOM, stop_token_ids=ends)
    renderers = renderers_of(tokenizer)

    async def play(number: int) -> tuple[Agent, list[Ask], Transcript]:
        own = random.Random(f"{number} {family}")
        limits = Limits(own.choice((4, 20)), 60.0, MAX_PROMPT, max_turn_tokens=own.randint(SHORTEST, LONGEST))
        return await played(own, family, partial(sampler.router.generate, "agents"), renderers, sampling, limits, f"proof{number}")

    rows = branches = interrupted = several = cached = 0
    for start in range(0, CONVERSATIONS, AT_ONCE):
        how = ("abort", "wait", "abort", "pause", "abort")[start // AT_ONCE]
        playing = asyncio.gather(*map(play, range(start, start + AT_ONCE)))
        seed = 1000 * (1 + start)
        while not playing.done():
            await asyncio.wait([playing], timeout=chance.uniform(0.1, 0.5))
            if not playing.done():
                seed += 1
                await sampler.update(seed, how)
        for number, (_, asks, transcript) in enumerate(await playing, start):
            parts = {
                ask.number: sampler.sampled.pop(f"proof{number}{TURN}{ask.number}" if ask.number else f"proof{number}") for ask in asks
            }
            check(parts, transcript.rows)
            cached += sum(part.completion.cached_tokens for number, own in parts.items() if number for part in own)
            for row in transcript.rows:
                if how != "pause":  # else tokens after the update depend on the cache of the weights before
                    check_log_probs(sampler, row)
                versions = {span.version for span in row.versions if span.version is not None}
                several += len(versions) > 1
            rows += len(transcript.rows)
            branches += len(transcript.branches)
            interrupted += sum(len(found) > 1 for found in parts.values())
    assert not sampler.sampled, "each response belongs to a conversation"
    print(f"{family}: {rows} rows, {branches} of them branches, {several} of several versions, {interrupted} interrupted responses")
    print(f"{family}: {cached} tokens of prompts from the prefix cache")
    assert cached > rows, "later responses found tokens of earlier ones in the prefix cache"
    assert branches > CONVERSATIONS / 5 and several > CONVERSATIONS / 5 and interrupted > 5


def check(sampled: dict[int, list[Sampled]], rows: Sequence[Branch]) -> None:
    """Compare rows with what the engine gave: `sampled` has the parts of each response, by its number."""
    trained: list[int] = []
    for row in rows:
        assert row.tokens is not None
        record = TokenRecord.read(row.tokens.block, row.tokens.row)
        starts = {row.prompt_length + span.start: span.version for span in row.versions}
        masked, position = 0, 0
        for segment in row.segments:
            end = position + segment.length
            if segment.author is Author.POLICY:
                assert segment.turn is not None
                masked += segment.length
                trained.append(segment.turn)
                assert record.mask[position:end].all()
                for before, completion in sampled[segment.turn]:
                    length = len(completion.token_ids)
                    if length:
                        assert record.ids[:position].tolist() == before, "behind the tokens that the engine saw"
                    assert record.ids[position : position + length].tolist() == list(completion.token_ids), "its own ids"
                    own = torch.tensor(completion.log_probs).tolist()
                    assert record.log_probs[position : position + length].tolist() == own, "their own log-probs"
                    for span in completion.versions if length else ():
                        at = max(place for place in starts if place <= position + span.start)
                        assert starts[at] == span.version, "their own version"
                    position += length
                assert position == end
            position = end
        assert position == len(record) and masked == int(record.mask.sum())
    given = {number for number, parts in sampled.items() if any(part.completion.token_ids for part in parts)}
    assert sorted(trained) == sorted(given), "each response in one row"


def check_log_probs(engine: Engine, row: Branch) -> None:
    """Compare each token's log-prob with that of transformers under the weights of its version."""
    assert row.tokens is not None
    record = TokenRecord.read(row.tokens.block, row.tokens.row)
    starts = [(row.prompt_length + span.start, span.version) for span in row.versions]
    ends = [*(start for start, _ in starts[1:]), len(record)]
    for (start, version), end in zip(starts, ends, strict=True):
        mask = torch.from_numpy(record.mask[start:end].copy())
        if version is None or not mask.any():
            continue
        with torch.no_grad():
            logits = engine.weights[version](torch.tensor(record.ids[:end].tolist())[None]).logits[0, start - 1 : -1]
        expected = log_probs_of(logits, record.ids[start:end].tolist())
        found = torch.from_numpy(record.log_probs[start:end].copy())
        torch.testing.assert_close(found[mask], expected[mask], atol=1e-4, rtol=0)
