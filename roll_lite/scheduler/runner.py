"""Generates and scores a sample, with retries.

An episode generates it: one prompt and one response by default, several turns with an environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from roll_lite.data.samples import (
    TURN,
    Author,
    GenerationRequest,
    Prompt,
    RewardInput,
    Sample,
    SampleId,
    SampleOutcome,
    Sampling,
    Score,
    Segment,
    TokenRow,
    Transcript,
    Turn,
)
from roll_lite.data.stable_hash import stable_hash
from roll_lite.rewards.base import RewardFailed
from roll_lite.scheduler.flight import RequestFailed
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.stats import Recorder

Ask = Callable[[GenerationRequest], Awaitable[Turn]]


class Conversation:
    """A sample being generated. Tokens of earlier turns stay in the object store; requests refer to them."""

    __slots__ = ("_ask", "_request_id", "_sampling", "_segments", "_tokens", "_turns")

    def __init__(self, ask: Ask, request_id: str, sampling: Sampling) -> None:
        self._ask = ask
        self._request_id = request_id
        self._sampling = sampling
        self._segments: tuple[Segment, ...] = ()
        self._turns: tuple[Turn, ...] = ()
        self._tokens: TokenRow | None = None

    @property
    def room(self) -> int:
        """Tokens that the policy may still write; max_tokens limits all turns together."""
        return self._sampling.max_tokens - sum(turn.length for turn in self._turns)

    async def respond(self, token_ids: Sequence[int], author: Author = Author.ENVIRONMENT) -> Turn:
        """Add tokens of the prompt or the environment, and let the policy respond. Raises RequestFailed."""
        if self.room < 1:
            raise ValueError(f"request {self._request_id}: the policy has written its {self._sampling.max_tokens} tokens; end the episode")
        request = self._request(tuple(token_ids))
        try:
            turn = await self._ask(request)
        except RequestFailed as failure:
            if failure.partial is not None:
                self._add(author, len(token_ids), failure.partial)
            raise
        self._add(author, len(token_ids), turn)
        return turn

    def transcript(self) -> Transcript:
        last = self._turns[-1].finish_reason if self._turns else None
        return Transcript(self._segments, "\n".join(turn.text for turn in self._turns), last, self._tokens)

    def _request(self, token_ids: tuple[int, ...]) -> GenerationRequest:
        number = len(self._turns)
        if not number:
            return GenerationRequest(self._request_id, token_ids, self._sampling)
        seed = self._sampling.seed
        least = min(self._sampling.min_tokens, self.room)
        further = replace(
            self._sampling, max_tokens=self.room, min_tokens=least, seed=None if seed is None else stable_hash(seed, "turn", number)
        )
        return GenerationRequest(f"{self._request_id}{TURN}{number}", token_ids, further, self._tokens)

    def _add(self, author: Author, tokens: int, turn: Turn) -> None:
        if tokens:
            self._segments += (Segment(author, tokens),)
        self._segments += (Segment(Author.POLICY, turn.length, turn.versions, turn.engine),)
        self._turns += (turn,)
        self._tokens = turn.tokens


Episode = Callable[[Prompt, Conversation], Awaitable[None]]
"""Runs one conversation. It must let RequestFailed pass: the sample is then retried, or reported as failed."""


async def one_response(prompt: Prompt, conversation: Conversation) -> None:
    await conversation.respond(prompt.token_ids, Author.PROMPT)


Seeds = Callable[[SampleId], int | None]


def seeds_from(run_seed: int) -> Seeds:
    """Function that gives each attempt at a sample its seed. The group's number is not used: a prompt started again gets the same
    samples."""

    def seed(sample: SampleId) -> int:
        return stable_hash(run_seed, sample.domain, sample.prompt_uid, sample.epoch, sample.index, sample.attempt)

    return seed


def no_seeds(_: SampleId) -> None:
    """Leave seeds to the engine."""


class RewardClient(Protocol):
    async def score(self, item: RewardInput) -> Score:
        """Score a sample. A failure raises rewards.base.RewardFailed; it is never a score of zero."""
        ...

    @property
    def capacity(self) -> float:
        """Number of samples scored at a time; others wait."""
        ...


class SampleRunner:
    """Generates and scores samples of one domain. If all retries fail, a sample is returned as failed, with the cause."""

    def __init__(
        self,
        domain: str,
        router: Router,
        rewards: RewardClient,
        retries: int,
        reward_retries: int,
        seeds: Seeds,
        recorder: Recorder,
        episode: Episode = one_response,
        queue: str | None = None,
        generated: Callable[[], None] = lambda: None,
    ) -> None:
        """`queue`: name of its queue in the router; None: the domain's. Calls `generated()` when a sample starts to wait for its score."""
        self.scoring = 0
        self._domain = domain
        self._router = router
        self._rewards = rewards
        self._retries, self._reward_retries = retries, reward_retries
        self._seeds = seeds
        self._recorder = recorder
        self._episode = episode
        self._queue = queue or domain
        self._generated = generated

    def start(self, sample_id: SampleId, prompt: Prompt, sampling: Sampling) -> asyncio.Task[Sample]:
        task = asyncio.get_running_loop().create_task(self._run(sample_id, prompt, sampling), name=self._domain)
        gate = self._router.gate
        if gate is not None:
            gate.join()
            task.add_done_callback(lambda _: gate.leave())
        return task

    async def _run(self, first: SampleId, prompt: Prompt, sampling: Sampling) -> Sample:
        cause, timed_out = "", False
        clock = asyncio.get_running_loop().time
        asked = clock()
        for attempt in range(self._retries + 1):
            sample_id = replace(first, attempt=attempt) if attempt else first
            if attempt:
                self._recorder.domains[self._domain].retries[cause] += 1
            conversation = self._conversation(sample_id, sampling)
            try:
                await self._episode(prompt, conversation)
            except RequestFailed as failure:
                cause, timed_out = f"generation: {failure.cause}", failure.timed_out
                partial = conversation.transcript()
                if failure.final or (timed_out and (failure.began or partial.policy_tokens)):
                    # A retry after a time-out would succeed only with a shorter response, which is a bias.
                    return Sample(sample_id, prompt, partial, SampleOutcome.FAILED, failure=cause, timed_out=timed_out, asked=asked)
                continue
            generated = clock()
            self.scoring += 1
            self._generated()
            try:
                return await self._score(sample_id, prompt, conversation.transcript(), asked, generated)
            finally:
                self.scoring -= 1
        return Sample(sample_id, prompt, Transcript(), SampleOutcome.FAILED, failure=cause, timed_out=timed_out, asked=asked)

    def _conversation(self, sample_id: SampleId, sampling: Sampling) -> Conversation:
        seed = self._seeds(sample_id)
        return Conversation(self._generate, sample_id.request_id(), sampling if seed is None else replace(sampling, seed=seed))

    async def _generate(self, request: GenerationRequest) -> Turn:
        recorder, clock = self._recorder, asyncio.get_running_loop().time
        sent = clock()
        turn = await self._router.generate(self._queue, request)
        recorder.last_completion = clock()
        stats = recorder.domains[self._domain]
        stats.generation_s += recorder.last_completion - sent
        stats.prompt_tokens += len(request.prompt_ids) + (request.context.length if request.context is not None else 0)
        stats.cached_tokens += turn.cached_tokens
        stats.response_tokens += turn.length
        stats.finish_reasons[str(turn.finish_reason)] += 1
        return turn

    async def _score(self, sample_id: SampleId, prompt: Prompt, transcript: Transcript, asked: float, generated: float) -> Sample:
        item = RewardInput.of(prompt, transcript.text, str(transcript.finish_reason))
        clock = asyncio.get_running_loop().time
        cause = ""
        for attempt in range(self._reward_retries + 1):
            if attempt:
                self._recorder.domains[self._domain].retries[cause] += 1
            wanted = clock()
            try:
                score: Score = await self._rewards.score(item)
            except RewardFailed as failure:
                cause = failure.cause
                continue
            self._recorder.last_score = scored = clock()
            stats = self._recorder.domains[self._domain]
            stats.reward_s += scored - wanted
            stats.scored += 1
            accepted = SampleOutcome.ACCEPTED
            return Sample(sample_id, prompt, transcript, accepted, score, asked=asked, generated=generated, scored=scored)
        return Sample(sample_id, prompt, transcript, SampleOutcome.FAILED, failure=cause, asked=asked, generated=generated)
