from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roll_lite.data.samples import (
    FinishReason,
    GenerationRequest,
    Prompt,
    Sample,
    SampleId,
    SampleOutcome,
    Score,
    TokenRow,
    Transcript,
    Turn,
)
from roll_lite.scheduler.engines import Asked


@dataclass(frozen=True)
class SavedTurn:
    """Response in an unfinished episode; partial if its finish reason is ABORT.

    `number`: unique in the sample. `after`: `number` of the response before the input; None for a prompt. `given`: number of new input
    tokens; `given_ids`: their ids (int32).
    """

    number: int
    after: int | None
    given: int
    turn: Turn
    branches: bool
    """True if the response starts a new training row, because another already follows `after`."""
    given_ids: bytes = b""
    limits: tuple[int | None, tuple[str, ...]] | None = None
    """(maximum tokens, stop strings) of its request; None matches any."""


@dataclass(frozen=True)
class SavedSample:
    """State of a sample in a checkpoint: tokens so far, and the score if complete."""

    attempt: int
    transcript: Transcript
    outcome: SampleOutcome | None = None
    """None while the sample is generated or scored."""
    score: Score | None = None
    failure: str | None = None
    timed_out: bool = False
    turns: tuple[SavedTurn, ...] = ()
    """Responses so far of an unfinished episode."""

    @staticmethod
    def of(sample: Sample) -> SavedSample:
        return SavedSample(sample.id.attempt, sample.transcript, sample.outcome, sample.score, sample.failure, sample.timed_out)

    def sample(self, sample_id: SampleId, prompt: Prompt) -> Sample:
        assert self.outcome is not None
        return Sample(sample_id, prompt, self.transcript, self.outcome, self.score, self.failure, self.timed_out)

    @property
    def response(self) -> Turn | None:
        if self.outcome is not None or self.transcript.finish_reason is not FinishReason.ABORT:
            return None
        last, text, tokens = self.transcript.segments[-1], self.transcript.text, self.transcript.tokens
        return Turn("", last.length, text, FinishReason.ABORT, last.versions, tokens=tokens, engines=last.engines)


SavedGroups = Mapping[int, Mapping[int, SavedSample]]
"""{group number: {index in the group: saved sample}}."""
NONE_SAVED: SavedGroups = {}


class Pieces(NamedTuple):
    """Tokens of a response in progress: context and prompt of `request`, then `parts`. After an interruption, the context includes the
    earlier part of the response."""

    request: GenerationRequest
    parts: Sequence[TokenRow]

    @staticmethod
    def of(asked: Asked) -> Pieces:
        return Pieces(asked.request, [part.tokens for part in asked.parts if part.tokens is not None])


class Unfinished(NamedTuple):
    """Sample to save in a checkpoint."""

    sample: SavedSample
    under_way: Mapping[int, Pieces] = {}
    """{index of a row, or of a turn in an unfinished episode: tokens of the response in progress}."""
