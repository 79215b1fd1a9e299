"""Records of rollouts: prompts, requests, completions, scored samples; plain and picklable, without tensors or Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # keeps `roll-lite check` fast
    import numpy as np

TURN = "/turn"
"""Separator of sample id and turn number in request ids of later turns."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SampleOutcome(StrEnum):
    ACCEPTED = "accepted"
    FILTERED = "filtered"
    FAILED = "failed"


class Packed:
    """Base of records that often cross processes. Pickling only the values takes a third of the time."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class Prompt:
    domain: str
    uid: int
    """Index among the domain's prompts; stable over epochs and restarts."""
    text: str
    """Model input, with template."""
    token_ids: tuple[int, ...]
    answer: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    """Whole row of the data."""
    weight: float = 1.0
    """Weight of its samples in the loss."""
    question: Any = None
    """Prompt in the data, without template: a text, or chat messages."""


@dataclass(frozen=True, slots=True)
class SampleId:
    """Identity of a sample; validation uses epoch -1."""

    domain: str
    prompt_uid: int
    epoch: int
    group: int
    """Number of the group, unique in the run."""
    index: int
    """0 to n-1 in the group; n for the greedy baseline."""
    attempt: int = 0
    """Number of earlier attempts."""

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
    """Request the ids that survive truncation by top-p, top-k or min-p (Completion.kept_ids)."""


class TokenRow(NamedTuple):
    """Tokens, mask and log-probs of a sample: a row of a token block (workers/token_blocks.py)."""

    block: Any
    """Reference into the object store; within one process the block itself."""
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class GenerationRequest(Packed):
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    context: TokenRow | None = None
    """Tokens of an earlier request, before prompt_ids. The engine's worker prepends them, since engines take whole prompts."""
    resumed: int = 0
    """Number of tokens at the end of the context that an earlier request generated for this response.

    The returned text includes them, and stop strings may begin in them; all else counts new tokens."""

    @property
    def resumed_ids(self) -> tuple[int, ...]:
        """Resumed tokens: the last of prompt_ids, once these include the context."""
        return self.prompt_ids[len(self.prompt_ids) - self.resumed :]


class VersionSpan(NamedTuple):
    """Weight version of response tokens from `start` on."""

    start: int
    version: int


def since_token(spans: Sequence[VersionSpan], first: int, end: int) -> tuple[VersionSpan, ...]:
    """Spans of tokens `first` to `end` (exclusive), counted from `first`."""
    begun = [span for span in spans if span.start <= first][-1:] if first < end else []
    return tuple(VersionSpan(max(0, span.start - first), span.version) for span in [*begun, *(s for s in spans if first < s.start < end)])


def merged(*spans: VersionSpan) -> tuple[VersionSpan, ...]:
    """Drop spans that repeat the previous version."""
    return tuple(span for place, span in enumerate(spans) if not place or spans[place - 1].version != span.version)


@dataclass(frozen=True, slots=True)
class Completion:
    """Engine's answer to a request. If `error` is set, the request failed and the rest is meaningless."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Log-probs by token, under the sampling distribution (after temperature and truncation)."""
    text: str = ""
    """Whole response, resumed tokens included, without special tokens."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    """Ids that survived truncation, by response token, if requested."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    experts: np.ndarray | None = field(default=None, compare=False)
    """[tokens, layers with experts x experts per token] int16: experts of prompt and response tokens, if reported; without the last
    token, which the engine has not processed."""


class Turn(NamedTuple):
    """Completion as the scheduler sees it: counts, text and a reference to the tokens."""

    request_id: str
    length: int = 0
    """Tokens generated for this request; `versions` refers to them."""
    text: str = ""
    """Whole response, resumed tokens included; empty if aborted before the first token."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    tokens: TokenRow | None = None
    """Tokens of context, prompt and response."""
    engine: int | None = None
    """Engine that sampled it; None if several did."""


class Author(StrEnum):
    """Author of a segment; only the policy's tokens train."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one author, stored in the token block."""

    author: Author
    length: int
    versions: tuple[VersionSpan, ...] = ()
    """Spans, counted from the segment's first token."""
    engine: int | None = None
    """Engine that sampled the segment; None if several did, or none."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """Segments of a sample: prompt, then policy responses and environment messages."""

    segments: tuple[Segment, ...] = ()
    text: str = ""
    """Responses of the policy, joined."""
    finish_reason: FinishReason | None = None
    """Reason of the last response."""
    tokens: TokenRow | None = None

    @property
    def prompt_length(self) -> int:
        return sum(segment.length for segment in self.segments if segment.author is Author.PROMPT)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt."""
        return sum(segment.length for segment in self.segments if segment.author is not Author.PROMPT)

    @property
    def policy_tokens(self) -> int:
        return sum(segment.length for segment in self.segments if segment.author is Author.POLICY)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Spans of all segments, counted from the first token after the prompt."""
        spans: list[VersionSpan] = []
        start = -self.prompt_length
        for segment in self.segments:
            spans += [VersionSpan(start + span.start, span.version) for span in segment.versions]
            start += segment.length
        return tuple(spans)

    @property
    def engine(self) -> int | None:
        """Engine that sampled all responses; None if several did."""
        engines = {segment.engine for segment in self.segments if segment.author is Author.POLICY}
        return engines.pop() if len(engines) == 1 else None


@dataclass(frozen=True, slots=True)
class RewardInput(Packed):
    domain: str
    prompt: str
    """Model input, with template."""
    response: str
    """Response without special tokens."""
    answer: Any
    """Reference answer."""
    columns: dict[str, Any]
    """Whole row of the data."""
    finish_reason: str
    question: Any = None
    """Prompt in the data, without template: a text, or a list of chat messages."""

    @staticmethod
    def of(prompt: Prompt, response: str, finish_reason: str) -> RewardInput:
        return RewardInput(prompt.domain, prompt.text, response, prompt.answer, prompt.columns, finish_reason, prompt.question)


@dataclass(frozen=True, slots=True)
class Score(Packed):
    """Result of a reward function; a plain number or bool becomes Score(value)."""

    value: float
    correct: bool | None = None
    """True if the response counts as correct; None: if value >= 1 - 1e-6."""
    details: dict[str, float | str] = field(default_factory=dict)
    format_ok: bool | None = None
    """True if the domain's format pattern matches; None if it has none."""
    answer: str | None = None
    """The response's answer, for majority votes; empty: none found; None: this reward extracts no answers."""
    terms: dict[str, float] = field(default_factory=dict)
    """Weighted summands of the value, for rewards of several terms."""

    @property
    def is_correct(self) -> bool:
        return self.correct if self.correct is not None else self.value >= 1 - 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    id: SampleId
    prompt: Prompt
    transcript: Transcript
    outcome: SampleOutcome
    score: Score | None = None
    failure: str | None = None
    """Cause of FAILED or FILTERED."""
    timed_out: bool = False
    """Generation timed out; the transcript holds the tokens so far."""
    asked: float | None = field(default=None, compare=False)
    """Time of the request; all times on the event loop's clock."""
    generated: float | None = field(default=None, compare=False)
    """Time of the last token."""
    scored: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples of a prompt, in index order."""

    group: int
    domain: str
    samples: tuple[Sample, ...]
    baseline: Sample | None = None
    """Greedy response (ReMax): scored, never trained on."""

    @property
    def timed_out(self) -> bool:
        """True if a sample timed out: it was probably long, so the others are biased to short responses."""
        return any(sample.timed_out for sample in self.samples)
