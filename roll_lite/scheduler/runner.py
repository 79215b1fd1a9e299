"""Generate and score a sample, with retries: a single response or an environment's episode of turns."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from roll_lite.data.samples import (
    TURN,
    Author,
    Branch,
    EpisodeRecord,
    FinishReason,
    GenerationRequest,
    Prompt,
    RewardInput,
    Sample,
    SampleId,
    SampleOutcome,
    Sampling,
    Score,
    Segment,
    Transcript,
    Turn,
)
from roll_lite.data.stable_hash import stable_hash
from roll_lite.rewards.base import RewardFailed
from roll_lite.scheduler.flight import RequestFailed
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.stats import Recorder
from roll_lite.scheduler.unfinished import Pieces, SavedSample, SavedTurn, Unfinished

Ask = Callable[[GenerationRequest, Turn | None], Awaitable[Turn]]
"""Generates the response to a request, or continues the given partial response."""


class _Row:
    """Training row of a sample, along one branch."""

    __slots__ = ("free", "last", "length", "segments", "tokens")

    def __init__(self, context: Turn | None = None) -> None:
        """`context`: earlier response where a new branch starts. All tokens up to its end become the row's prompt."""
        self.tokens = None if context is None else context.tokens
        self.length = 0 if self.tokens is None else self.tokens.length
        self.segments: tuple[Segment, ...] = (Segment(Author.PROMPT, self.length),) if self.length else ()
        self.last: int | None = None
        self.free = False
        """True until a request continues the row's last response."""

    def add(self, author: Author, tokens: int, number: int, turn: Turn) -> None:
        if tokens:
            self.segments += (Segment(author, tokens),)
        self.segments += (Segment(Author.POLICY, turn.length, turn.versions, turn.engines, number),)
        self.length += tokens + turn.length
        self.tokens, self.last, self.free = turn.tokens, number, True


class Conversation:
    """Sample being generated: a tree of responses, usually a single one.

    Branches become training sequences (rows). If several requests continue one response, the first extends its row, others start new rows:
    every response is trained in exactly one row.
    """

    __slots__ = ("_ask", "_end", "_first_new", "_kept", "_rows", "_saved", "_turns", "_wants_ids", "request_id", "sampling", "under_way")

    def __init__(
        self,
        ask: Ask,
        request_id: str,
        sampling: Sampling,
        wants_ids: bool = False,
        saved: Sequence[SavedTurn] = (),
    ) -> None:
        """`wants_ids`: return token ids of responses.

        `saved`: responses from a resumed checkpoint. If the episode sends the same requests, parallel ones in any order, complete responses
        are returned and partial ones continue.
        """
        self._ask = ask
        self.request_id = request_id
        self.sampling = sampling
        self._wants_ids = wants_ids
        self._rows: list[_Row] = []
        self._turns: dict[int, tuple[_Row, Turn]] = {}
        self._saved = {one.number: one for one in saved}
        self._kept: dict[int, SavedTurn] = {}
        self._first_new = 1 + max(self._saved, default=-1)
        """Offset of new responses' numbers in checkpoints: saved responses keep theirs."""
        self.under_way: dict[str, SavedTurn] = {}
        """{request id: response being generated}, without the tokens of the running request."""
        self._end: tuple[EpisodeRecord, FinishReason | None] | None = None

    async def respond(
        self, token_ids: Sequence[int], number: int = 0, after: int | None = None, most: int | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        """Let the policy respond to tokens; RequestFailed on a failure.

        `number`: of this response, from 0. `after`: number of the response that the tokens follow; None: they are a prompt. `most`: maximum
        tokens; None: all that the sample has left. `stop`: further stop strings.
        """
        given, limits = array("i", token_ids).tobytes() if self._wants_ids else b"", (most, tuple(stop))
        is_placed = after is None or after in self._kept
        place = self._kept[after].number if after in self._kept else None
        saved = self._saved_turn(after, place, given, limits) if is_placed else None
        row = self._row(after, saved is not None and saved.branches)
        if most is None:
            most = self.sampling.max_tokens - (row.length - row.segments[0].length + len(token_ids) if row.segments else 0)
            if most < 1:
                what = f"no room for a response within {self.sampling.max_tokens} tokens; end the episode"
                raise ValueError(f"request {self.request_id}: {what}")
        request = self._request(tuple(token_ids), row, number, after, most, stop)
        author = Author.PROMPT if after is None else Author.ENVIRONMENT
        asked = saved or SavedTurn(self._first_new + number, place, len(token_ids), Turn(""), request.masks_context, given, limits)
        turn = None if saved is None else saved.turn
        try:
            if turn is None or turn.finish_reason is FinishReason.ABORT:
                if self._wants_ids and is_placed:
                    self.under_way[request.request_id] = asked
                turn = await self._ask(request, turn)
        except RequestFailed as failure:
            if failure.partial is not None:
                row.add(author, len(token_ids), number, failure.partial)
                self._turns[number] = row, failure.partial
            raise
        finally:
            self.under_way.pop(request.request_id, None)
        row.add(author, len(token_ids), number, turn)
        self._turns[number] = row, turn
        if self._wants_ids and is_placed and turn.tokens is not None:
            self._kept[number] = replace(asked, turn=turn)
        return turn

    def _saved_turn(
        self, after: int | None, place: int | None, given: bytes, limits: tuple[int | None, tuple[str, ...]]
    ) -> SavedTurn | None:
        """Take the saved response to an equal request. A response that extends a row needs that row free: its saved tokens include the
        row's, unmasked."""
        for saved in self._saved.values():
            is_same = (saved.after, saved.given_ids) == (place, given) and saved.limits in (None, limits)
            if is_same and (saved.branches or after is None or self._free_row(after)):
                return self._saved.pop(saved.number)
        return None

    def saved(self) -> tuple[SavedTurn, ...]:
        """Return the episode's complete responses, and saved responses not requested since the resume."""
        return (*self._kept.values(), *self._saved.values())

    def _free_row(self, after: int) -> _Row | None:
        row, _ = self._turns[after]
        return row if row.free and row.last == after else None

    def _row(self, after: int | None, branches: bool) -> _Row:
        if after is not None and not branches and (row := self._free_row(after)) is not None:
            row.free = False
            return row
        row = _Row(None if after is None else self._turns[after][1])
        self._rows.append(row)
        return row

    def end(self, record: EpisodeRecord, finish_reason: FinishReason | None = None) -> None:
        self._end = record, finish_reason

    def transcript(self) -> Transcript:
        record, limit = self._end or (None, None)
        turns = [turn for _, turn in self._turns.values()]
        reason = limit or (turns[-1].finish_reason if turns else None)
        cut = {number for number, (_, turn) in self._turns.items() if turn.finish_reason is FinishReason.LENGTH}
        if limit is FinishReason.LENGTH:
            cut.add(max(self._turns, default=0))
        rows = [row for row in self._rows if row.last is not None] or [_Row()]
        first, text = rows[0], "\n".join(turn.text for turn in turns)
        branches = tuple(Branch(row.segments, row.tokens, cut=row.last in cut) for row in rows[1:])
        return Transcript(first.segments, first.tokens, text, reason, record, branches, cut=first.last in cut)

    def _request(
        self, token_ids: tuple[int, ...], row: _Row, number: int, after: int | None, most: int, stop: Sequence[str]
    ) -> GenerationRequest:
        sampling = self.sampling
        if most < sampling.max_tokens or stop:
            least = min(sampling.min_tokens, most)
            sampling = replace(sampling, max_tokens=most, min_tokens=least, stop=(*sampling.stop, *stop))
        if number and sampling.seed is not None:
            sampling = replace(sampling, seed=stable_hash(sampling.seed, "turn", number))
        name = f"{self.request_id}{TURN}{number}" if number else self.request_id
        branches = after is not None and row.last != after
        return GenerationRequest(name, token_ids, sampling, row.tokens, wants_ids=self._wants_ids, masks_context=branches)


UNCOUNTED_LOSSES = 8
"""Losses of a sample's worker that do not count as retries: other episodes may have killed the worker."""


class EpisodeFailed(Exception):
    def __init__(self, cause: str, counts: bool = True) -> None:
        super().__init__(cause)
        self.cause = cause
        self.counts = counts


Episode = Callable[[Prompt, Conversation], Awaitable[None]]
"""Runs one conversation. Lets RequestFailed pass; raises EpisodeFailed if the environment fails."""


async def one_response(prompt: Prompt, conversation: Conversation) -> None:
    await conversation.respond(prompt.token_ids)


Seeds = Callable[[SampleId], int | None]


def seeds_from(run_seed: int) -> Seeds:
    """Return a function that derives a seed from a sample's identity and attempt: restarted runs generate the same samples."""

    def seed(sample: SampleId) -> int:
        return stable_hash(run_seed, sample.domain, sample.prompt_uid, sample.epoch, sample.index, sample.attempt)

    return seed


def no_seeds(_: SampleId) -> None:
    """Return None, so that the engine chooses the seed."""


class RewardClient(Protocol):
    async def score(self, item: RewardInput) -> Score:
        """Score a sample. Raise RewardFailed if scoring fails, instead of returning zero."""
        ...

    @property
    def capacity(self) -> float: ...


class SampleRunner:
    """Generates and scores one domain's samples. A permanently failed sample is returned with its cause."""

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
        """`generated` is called when a sample starts to wait for its score. `queue`: in the router; default: the domain's name."""
        self.scoring = 0
        self._reached: dict[tuple[int, int], Callable[[], Unfinished | None]] = {}
        self._domain = domain
        self._router = router
        self._rewards = rewards
        self._retries, self._reward_retries = retries, reward_retries
        self._seeds = seeds
        self._recorder = recorder
        self._episode = episode
        self._queue = queue or domain
        self._generated = generated

    def start(self, sample_id: SampleId, prompt: Prompt, sampling: Sampling, saved: SavedSample | None = None) -> asyncio.Task[Sample]:
        task = asyncio.get_running_loop().create_task(self._run(sample_id, prompt, sampling, saved), name=self._domain)
        task.add_done_callback(lambda _: self._reached.pop((sample_id.group, sample_id.index), None))
        gate = self._router.gate
        if gate is not None:
            gate.join()
            task.add_done_callback(lambda _: gate.leave())
        return task

    def reached(self, group: int, index: int) -> Unfinished | None:
        """Return what a checkpoint stores of a running sample; None without tokens."""
        tell = self._reached.get((group, index))
        return None if tell is None else tell()

    def _responses(self, attempt: int, conversation: Conversation) -> Unfinished | None:
        if self._episode is not one_response:  # an environment's state cannot be saved, but it can be played again
            turns, pieces = list(conversation.saved()), {}
            for request_id, asked in conversation.under_way.items():
                flight = self._router.flight(request_id)
                if flight is not None and (response := flight.response) is not None:
                    if (own := Pieces.of(flight)).parts:
                        pieces[len(turns)] = own
                    turns.append(replace(asked, turn=response))
            return Unfinished(SavedSample(attempt, Transcript(), turns=tuple(turns)), pieces) if turns else None
        flight = self._router.flight(conversation.request_id)  # a later turn has another id
        if flight is None or (response := flight.response) is None:
            return None
        # `response.tokens` ends where the current request starts; that request's tokens are in `own`.
        prompt, own = Segment(Author.PROMPT, len(flight.first.prompt_ids)), Pieces.of(flight)
        segments = prompt, Segment(Author.POLICY, response.length, response.versions, response.engines)
        transcript = Transcript(segments, response.tokens, response.text, FinishReason.ABORT)
        return Unfinished(SavedSample(attempt, transcript), {0: own} if own.parts else {})

    async def _run(self, first: SampleId, prompt: Prompt, sampling: Sampling, saved: SavedSample | None) -> Sample:
        cause, timed_out = "", False
        clock = asyncio.get_running_loop().time
        asked, before = clock(), 0
        if saved is not None:
            before = saved.attempt
            if saved.outcome is not None:
                return saved.sample(replace(first, attempt=before), prompt)
            if saved.response is None and not saved.turns:
                return await self._scored(replace(first, attempt=before), prompt, saved.transcript, asked)
        attempt, tries, lost = before, max(1, self._retries + 1 - (0 if saved is not None and saved.turns else before)), 0
        while True:
            sample_id = replace(first, attempt=attempt) if attempt else first
            conversation = self._conversation(sample_id, sampling, saved)
            saved = None
            self._reached[first.group, first.index] = partial(self._responses, attempt, conversation)
            try:
                await self._episode(prompt, conversation)
                return await self._scored(sample_id, prompt, conversation.transcript(), asked)
            except EpisodeFailed as failed:
                cause, timed_out = f"environment: {failed.cause}", False
                lost += not failed.counts
                if failed.counts or lost > UNCOUNTED_LOSSES:
                    tries -= 1
            except RequestFailed as failure:
                cause, timed_out = f"generation: {failure.cause}", failure.timed_out
                reached = conversation.transcript()
                if failure.final or (timed_out and (failure.began or any(row.policy_tokens for row in reached.rows))):
                    # A retry after a time-out would succeed only with a shorter response, which is a bias.
                    return Sample(sample_id, prompt, reached, SampleOutcome.FAILED, failure=cause, timed_out=timed_out, asked=asked)
                tries -= 1
            if tries < 1:
                return Sample(sample_id, prompt, Transcript(), SampleOutcome.FAILED, failure=cause, timed_out=timed_out, asked=asked)
            attempt += 1
            self._recorder.domains[self._domain].retries[cause] += 1

    def _conversation(self, sample_id: SampleId, sampling: Sampling, saved: SavedSample | None) -> Conversation:
        seed = self._seeds(sample_id)
        seeded = sampling if seed is None else replace(sampling, seed=seed)
        turns = () if saved is None else saved.turns
        if saved is not None and saved.response is not None:
            turns = (SavedTurn(0, None, 0, saved.response, False),)
        return Conversation(self._generate, sample_id.request_id(), seeded, self._episode is not one_response, turns)

    async def _scored(self, sample_id: SampleId, prompt: Prompt, transcript: Transcript, asked: float) -> Sample:
        clock = asyncio.get_running_loop().time
        generated, cause = clock(), ""
        self._reached[sample_id.group, sample_id.index] = lambda: Unfinished(SavedSample(sample_id.attempt, transcript))
        self.scoring += 1
        self._generated()
        try:
            item = RewardInput.of(prompt, transcript.last_text, str(transcript.finish_reason), transcript.episode)
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
        finally:
            self.scoring -= 1

    async def _generate(self, request: GenerationRequest, so_far: Turn | None) -> Turn:
        recorder, clock = self._recorder, asyncio.get_running_loop().time
        sent = clock()
        turn = await self._router.generate(self._queue, request, so_far)
        recorder.last_completion = clock()
        stats = recorder.domains[self._domain]
        stats.generation_s += recorder.last_completion - sent
        stats.prompt_tokens += request.prompt_length
        stats.cached_tokens += turn.cached_tokens
        stats.drafted += turn.drafted
        stats.accepted_drafts += turn.accepted
        stats.response_tokens += turn.length - (0 if so_far is None else so_far.length)
        stats.finish_reasons[str(turn.finish_reason)] += 1
        return turn
