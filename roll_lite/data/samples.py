from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from roll_lite.data.stable_hash import stable_hash

if TYPE_CHECKING:  # not imported, to keep `roll-lite check` fast
    import numpy as np

TURN = "/turn"
"""Separator of sample id and turn number in request ids."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    MAX_TURNS = "max_turns"


class SampleOutcome(StrEnum):
    ACCEPTED = "accepted"
    FILTERED = "filtered"
    FAILED = "failed"


class Packed:
    """Base class of records often sent between processes: pickles only the fields' values, in a third of the usual time."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class Prompt:
    domain: str
    uid: int
    """Index in the domain's prompts; stable over restarts."""
    text: str
    """Model input, with the template applied."""
    token_ids: tuple[int, ...]
    answer: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    question: Any = None

    @property
    def digest(self) -> int:
        """Hash of what samples depend on."""
        return stable_hash(repr((self.token_ids, self.answer, self.columns)))


@dataclass(frozen=True, slots=True)
class SampleId:
    """Identity of a sample. Validation samples have epoch -1."""

    domain: str
    prompt_uid: int
    epoch: int
    group: int
    index: int
    """Index in a group of n samples, from 0. The greedy baseline has index n."""
    attempt: int = 0

    def request_id(self) -> str:
        return f"{self.domain}/{self.prompt_uid}/{self.epoch}/{self.group}/{self.index}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Sampling(Packed):
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
    """True if the engine also returns the token ids that survive top-p, top-k and min-p, per position."""

    @property
    def kernels(self) -> tuple[bool, ...]:
        """Features that select an engine's sampling kernels, which it may compile at first use."""
        return self.temperature == 0, self.top_p < 1, self.top_k > 0, self.min_p > 0, self.min_tokens > 0, self.keep_mask


class TokenRow(NamedTuple):
    """Reference to a sample's tokens: a row of a token block, a table of many samples' tokens (workers/token_blocks.py)."""

    block: Any
    """Ray object reference or, within one process, the token block."""
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class GenerationRequest(Packed):
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    context: TokenRow | None = None
    """Tokens of an earlier request, before prompt_ids. The worker prepends them: engines take whole prompts."""
    resumed_tokens: int = 0
    """Number of tokens at the context's end that belong to this response, from before an interruption. Stop strings may begin in them. The
    completion's text includes them; its other fields cover new tokens only."""
    wants_ids: bool = False
    masks_context: bool = False
    """Exclude the context from the loss: another row of the sample trains on it."""

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids) + (0 if self.context is None else self.context.length)

    @property
    def resumed_ids(self) -> tuple[int, ...]:
        """Last `resumed_tokens` tokens of the prompt. Valid only if `prompt_ids` includes the context."""
        return self.prompt_ids[len(self.prompt_ids) - self.resumed_tokens :]


class VersionSpan(NamedTuple):
    """Weight version of the tokens from index `start` up to the next span."""

    start: int
    version: int


def since_token(spans: Sequence[VersionSpan], first: int, end: int) -> tuple[VersionSpan, ...]:
    """Spans of the tokens from `first` to `end` (exclusive), with starts relative to `first`."""
    begun = [span for span in spans if span.start <= first][-1:] if first < end else []
    return tuple(VersionSpan(max(0, span.start - first), span.version) for span in [*begun, *(s for s in spans if first < s.start < end)])


def merged(*spans: VersionSpan) -> tuple[VersionSpan, ...]:
    """Join consecutive spans that have the same weight version."""
    return tuple(span for place, span in enumerate(spans) if not place or spans[place - 1].version != span.version)


@dataclass(frozen=True, slots=True)
class Completion:
    """Engine's response to a request. If `error` is set, ignore the other fields."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Log-probs under the distribution that was sampled from, after temperature and truncation."""
    text: str = ""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    """Token ids that truncated sampling kept at each position, if requested."""
    cached_tokens: int = 0
    drafted: int = 0
    """Tokens that speculative decoding drafted; 0 for aborted requests."""
    accepted: int = 0
    """Drafted tokens that became part of the response."""
    experts: np.ndarray | None = field(default=None, compare=False)
    """int16 [tokens, expert layers * experts per token]: experts of prompt and response tokens, without the unprocessed last token."""


class Turn(NamedTuple):
    """Completion whose tokens are in the object store; `tokens` refers to them."""

    request_id: str
    length: int = 0
    """Number of new tokens, without those from before an interruption. Index 0 in `versions` is the first new token."""
    text: str = ""
    """Whole response, with the tokens from before an interruption; empty if aborted before the first token."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    tokens: TokenRow | None = None
    engines: tuple[int, ...] = ()
    """Engines that sampled the response, in order; several after interruptions."""
    ids: bytes = b""
    """int32 token ids of the response, if requested."""
    drafted: int = 0
    accepted: int = 0


def joined(before: Turn | None, turn: Turn) -> Turn:
    """Join an interrupted response and its continuation."""
    if before is None:
        return turn
    shifted = tuple(VersionSpan(before.length + span.start, span.version) for span in turn.versions)
    return turn._replace(
        request_id=before.request_id,
        length=before.length + turn.length,
        versions=merged(*before.versions, *shifted),
        cached_tokens=before.cached_tokens,
        engines=(*before.engines, *(engine for engine in turn.engines if before.engines[-1:] != (engine,))),
        ids=before.ids + turn.ids,
    )


class Author(StrEnum):
    """Author of tokens. Only the policy's tokens are trained on."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Segment:
    author: Author
    length: int
    versions: tuple[VersionSpan, ...] = ()
    """Weight versions of the segment (consecutive tokens by one author); `start` 0: its first token."""
    engines: tuple[int, ...] = ()
    turn: int | None = None
    """Index among the sample's responses; None if the segment is not a response."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord(Packed):
    messages: tuple[dict[str, Any], ...] = ()
    """Whole conversation; if an agent had several, the one with the last response."""
    rewards: tuple[float, ...] = ()
    score: float = 0.0
    """Rewards combined as domains.NAME.environment.rewards says."""
    correct: bool | None = None
    """The environment's verdict; None: the score decides."""
    metrics: dict[str, float] = field(default_factory=dict)
    branches: tuple[tuple[dict[str, Any], ...], ...] = ()
    """Further conversations of the agent, in the order of their last response."""
    answer: str | None = None
    """Answer to score instead of the last response."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Training row of a sample: the prompt, then responses and environment messages."""

    segments: tuple[Segment, ...] = ()
    tokens: TokenRow | None = None
    cut: bool = field(default=False, kw_only=True)
    """True if a token limit cut the row's last response, or left no room for another one."""

    @property
    def prompt_length(self) -> int:
        return sum(segment.length for segment in self.segments if segment.author is Author.PROMPT)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt, of all authors."""
        return sum(segment.length for segment in self.segments if segment.author is not Author.PROMPT)

    @property
    def policy_tokens(self) -> int:
        return sum(segment.length for segment in self.segments if segment.author is Author.POLICY)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        start = -self.prompt_length
        for segment in self.segments:
            spans += [VersionSpan(start + span.start, span.version) for span in segment.versions]
            start += segment.length
        return tuple(spans)

    @property
    def engine(self) -> int | None:
        """Engine that sampled all responses of the row; None if several."""
        engines = {engine for segment in self.segments for engine in segment.engines}
        return engines.pop() if len(engines) == 1 else None


@dataclass(frozen=True, slots=True)
class Transcript(Branch):
    """Tokens of a sample: its first training row, and `branches`."""

    text: str = ""
    finish_reason: FinishReason | None = None
    episode: EpisodeRecord | None = None
    branches: tuple[Branch, ...] = ()
    """Further training rows. In them, responses that another row trains on count as prompt."""

    @property
    def rows(self) -> tuple[Branch, ...]:
        return self, *self.branches

    @property
    def last_text(self) -> str:
        """Text to score: an agent's answer, or the last response minus tool calls."""
        if self.episode is None:
            return self.text
        if self.episode.answer is not None:
            return self.episode.answer
        said = [message for message in self.episode.messages if message["role"] == "assistant"]
        return str(said[-1]["content"]) if said else ""


@dataclass(frozen=True, slots=True)
class RewardInput(Packed):
    domain: str
    prompt: str
    """Model input, with the template applied."""
    response: str
    """Response without special tokens; in an episode, the last response."""
    answer: Any
    columns: dict[str, Any]
    finish_reason: str
    question: Any = None
    """Prompt from the data, without template: a text or chat messages."""
    episode: EpisodeRecord | None = None

    @staticmethod
    def of(prompt: Prompt, response: str, finish_reason: str, episode: EpisodeRecord | None = None) -> RewardInput:
        return RewardInput(prompt.domain, prompt.text, response, prompt.answer, prompt.columns, finish_reason, prompt.question, episode)


@dataclass(frozen=True, slots=True)
class Score(Packed):
    """Result of a reward function; a number or bool becomes Score(value)."""

    value: float
    correct: bool | None = None
    """True if the response is correct. None: correct if value >= 1 - 1e-6."""
    details: dict[str, float | str] = field(default_factory=dict)
    format_ok: bool | None = None
    """True if the response matches the domain's format pattern; None without a pattern."""
    answer: str | None = None
    """Answer found in the response, for majority votes. Empty: none found. None: this reward extracts no answers."""
    terms: dict[str, float] = field(default_factory=dict)
    """{term: weighted part of the value}; empty without terms."""

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
    timed_out: bool = False
    """True if generation timed out; the transcript is then partial."""
    asked: float | None = field(default=None, compare=False)
    """Time of the first request, on the event loop's clock in seconds."""
    generated: float | None = field(default=None, compare=False)
    scored: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    group: int
    domain: str
    samples: tuple[Sample, ...]
    baseline: Sample | None = None
    """Greedy sample (for ReMax); scored but never trained on."""

    @property
    def timed_out(self) -> bool:
        """True if a sample timed out during generation. Without such samples, probably long ones, the group is biased towards short
        responses."""
        return any(sample.timed_out for sample in self.samples)
