"""Episodes: one prompt and one response by default, several turns with an environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from roll_lite.data.samples import TURN, Author, GenerationRequest, Prompt, Sampling, Segment, TokenRow, Transcript, Turn
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.router import RequestFailed

Ask = Callable[[GenerationRequest], Awaitable[Turn]]


class Conversation:
    """A sample under construction. Tokens of earlier turns stay elsewhere; requests refer to them."""

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
        """Tokens that the policy may still write; max_tokens limits all of its turns together."""
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
        """Transcript of the episode so far."""
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
        self._segments += (Segment(Author.POLICY, turn.length, turn.versions),)
        self._turns += (turn,)
        self._tokens = turn.tokens


Episode = Callable[[Prompt, Conversation], Awaitable[None]]
"""Runs one conversation. It must let RequestFailed pass: the sample is then retried, or reported as failed."""


async def one_response(prompt: Prompt, conversation: Conversation) -> None:
    await conversation.respond(prompt.token_ids, Author.PROMPT)
