"""Records of the rollout side: prompts, requests, completions, scored samples.

They are plain and picklable, without tensors or Ray; scheduler, rewards and engines exchange them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # keeps `roll-lite check` fast
    import numpy as np

TURN = "/turn"
"""Separates the sample's id from the turn's number in the request ids of later turns."""


class FinishReason(StrEnum):
    """Reason for which an engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SampleOutcome(StrEnum):
    """End of a sample. Every sample ends in exactly one of these."""

    ACCEPTED = "accepted"
    FILTERED = "filtered"
    FAILED = "failed"


class Packed:
    """Base of records that cross process borders in large numbers: pickled as their values alone, in a third of the time."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a domain's data, tokenized."""

    domain: str
    uid: int
    """Row number in the domain's file: stable over epochs and restarts."""
    text: str
    """The model's input, template applied."""
    token_ids: tuple[int, ...]
    answer: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    """The whole row of the data, for rewards that need more than the answer."""
    weight: float = 1.0
    """Factor of its samples' weights in the loss."""
    question: Any = None
    """The prompt as the data holds it, without the template: a text, or chat messages."""


@dataclass(frozen=True, slots=True)
class SampleId:
    """Identity of one sample. Validation uses epoch -1."""

    domain: str
    prompt_uid: int
    epoch: int
    group: int
    """Number of the sample group, unique in the run."""
    index: int
    """Index in the group, 0 to n-1; n for the greedy baseline."""
    attempt: int = 0
    """Number of earlier attempts at this sample."""

    def request_id(self) -> str:
        return f"{self.domain}/{self.prompt_uid}/{self.epoch}/{self.group}/{self.index}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Sampling(Packed):
    """Sampling parameters. Temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    keep_mask: bool = False
    """Ask the engine for the tokens that survived truncation (Completion.kept_ids)."""


class TokenRow(NamedTuple):
    """Reference to the tokens, mask and log-probs of a sample: a row of a token block (workers/token_blocks.py)."""

    block: Any
    """Reference into the object store; within one process the block itself."""
    row: int
    length: int
    """Number of tokens in the row."""


@dataclass(frozen=True, slots=True)
class GenerationRequest(Packed):
    """Request for one response."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    context: TokenRow | None = None
    """Tokens before prompt_ids, from an earlier request. The worker beside the engine fetches them: engines get whole prompts."""
    resumed: int = 0
    """Number of tokens, at the end of the context, that belong to the response: an earlier request ended in the middle of it.

    The returned text is that of the whole response, and a stop string may span both parts; everything else counts the new tokens only.
    """

    @property
    def resumed_ids(self) -> tuple[int, ...]:
        """The resumed tokens, of a request with its whole prompt."""
        return self.prompt_ids[len(self.prompt_ids) - self.resumed :]


class VersionSpan(NamedTuple):
    """Version of the engine's weights from response token `start` on."""

    start: int
    version: int


def since_token(spans: Sequence[VersionSpan], first: int, end: int) -> tuple[VersionSpan, ...]:
    """Spans of the tokens `first` to `end`, counted from `first`."""
    begun = [span for span in spans if span.start <= first][-1:] if first < end else []
    return tuple(VersionSpan(max(0, span.start - first), span.version) for span in [*begun, *(s for s in spans if first < s.start < end)])


def merged(*spans: VersionSpan) -> tuple[VersionSpan, ...]:
    """Drop spans that repeat the version before them."""
    return tuple(span for place, span in enumerate(spans) if not place or spans[place - 1].version != span.version)


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's answer to one request. If `error` is set, the request failed and the rest is meaningless."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Log-probs under the sampling distribution (after temperature and truncation), one per token."""
    text: str = ""
    """The whole response, resumed tokens included, without special tokens."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    """Ids that survived truncation, for each response token, if the sampling asks for them."""
    cached_tokens: int = 0
    """Prompt tokens found in the engine's prefix cache."""
    experts: np.ndarray | None = field(default=None, compare=False)
    """[tokens, layers with experts x experts per token] int16: experts of the prompt's and response's tokens, if reported.

    The last token is missing, since the engine has not processed it.
    """


class Turn(NamedTuple):
    """A Completion as the scheduler gets it: numbers, text, and a reference to the tokens."""

    request_id: str
    length: int = 0
    """Number of tokens generated for this request; `versions` refers to them."""
    text: str = ""
    """The whole response, resumed tokens included. Empty if an abort came before the first token."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    tokens: TokenRow | None = None
    """All tokens so far: the request's context and prompt, then the response."""


class Author(StrEnum):
    """Author of a segment. Only the policy's tokens train."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one author. Tokens and log-probs stay in the token block."""

    author: Author
    length: int
    versions: tuple[VersionSpan, ...] = ()
    """Weight versions, counted from the segment's first token."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """Segments of a sample: the prompt, then the policy's responses and the environment's parts between them."""

    segments: tuple[Segment, ...] = ()
    text: str = ""
    """All responses of the policy, joined."""
    finish_reason: FinishReason | None = None
    """Finish reason of the last response."""
    tokens: TokenRow | None = None

    @property
    def prompt_length(self) -> int:
        return sum(segment.length for segment in self.segments if segment.author is Author.PROMPT)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt."""
        return sum(segment.length for segment in self.segments if segment.author is not Author.PROMPT)

    @property
    def policy_tokens(self) -> int:
        return sum(segment.length for segment in self.segments if segment.author is Author.POLICY)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Weight versions, counted from the first token after the prompt."""
        spans: list[VersionSpan] = []
        start = -self.prompt_length
        for segment in self.segments:
            spans += [VersionSpan(start + span.start, span.version) for span in segment.versions]
            start += segment.length
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class RewardInput(Packed):
    """Input of a reward function."""

    domain: str
    prompt: str
    """The model's input, template applied."""
    response: str
    """The response without special tokens."""
    answer: Any
    """The reference answer."""
    columns: dict[str, Any]
    """The whole row of the data, by column."""
    finish_reason: str
    question: Any = None
    """The prompt as the data has it, without the template: a text, or a list of chat messages."""

    @staticmethod
    def of(prompt: Prompt, response: str, finish_reason: str) -> RewardInput:
        return RewardInput(prompt.domain, prompt.text, response, prompt.answer, prompt.columns, finish_reason, prompt.question)


@dataclass(frozen=True, slots=True)
class Score(Packed):
    """Result of a reward function. A plain number or bool becomes Score(value)."""

    value: float
    correct: bool | None = None
    """Counts for accuracy. None: value >= 1 - 1e-6 is correct."""
    details: dict[str, float | str] = field(default_factory=dict)
    format_ok: bool | None = None
    """Whether the domain's format pattern matches the response; None without a pattern."""
    answer: str | None = None
    """The response's answer, for majority votes; empty: it has none. None: this reward extracts no answers."""
    terms: dict[str, float] = field(default_factory=dict)
    """Summands of the value where the reward has several terms, weights included."""

    @property
    def is_correct(self) -> bool:
        return self.correct if self.correct is not None else self.value >= 1 - 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished sample with its transcript, score and outcome."""

    id: SampleId
    prompt: Prompt
    transcript: Transcript
    outcome: SampleOutcome
    score: Score | None = None
    failure: str | None = None
    """Cause, for SampleOutcome.FAILED and FILTERED."""
    timed_out: bool = False
    """Whether generation timed out; the transcript then holds the part generated by then."""
    asked: float | None = field(default=None, compare=False)
    """Time at which generation was asked for, on the event loop's clock."""
    generated: float | None = field(default=None, compare=False)
    """Time of the last token."""
    scored: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one prompt, in index order."""

    group: int
    domain: str
    samples: tuple[Sample, ...]
    baseline: Sample | None = None
    """The greedy response to the prompt (ReMax): scored like the others, never trained on."""

    @property
    def timed_out(self) -> bool:
        """Whether a sample timed out: most likely a long response, so that the others are biased to short ones."""
        return any(sample.timed_out for sample in self.samples)
