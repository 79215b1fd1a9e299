"""Records of rollouts: prompts, requests, completions, scored samples. They are plain and picklable, without tensors or Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # not imported, to keep `roll-lite check` fast
    import numpy as np

TURN = "/turn"
"""Separator between sample id and turn number in the request ids of later turns."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    MAX_TURNS = "max_turns"
    """The episode reached max_turns before the environment ended it."""


class SampleOutcome(StrEnum):
    ACCEPTED = "accepted"
    FILTERED = "filtered"
    FAILED = "failed"


class Packed:
    """Base class of records often sent between processes. Pickling only their values takes a third of the time of normal pickling."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class Prompt:
    domain: str
    uid: int
    """Index among the domain's prompts; stable over epochs and restarts."""
    text: str
    """Text that the model gets, with the template applied."""
    token_ids: tuple[int, ...]
    answer: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of the data row."""
    weight: float = 1.0
    """Loss weight of the prompt's samples."""
    question: Any = None
    """Prompt as in the data, without template: a text or chat messages."""


@dataclass(frozen=True, slots=True)
class SampleId:
    """Identity of a sample. Validation samples have epoch -1."""

    domain: str
    prompt_uid: int
    epoch: int
    group: int
    """Number of the sample's group, unique in the run."""
    index: int
    """Index in a group of n samples, 0 to n - 1; n for the greedy baseline."""
    attempt: int = 0
    """Number of earlier attempts at this sample."""

    def request_id(self) -> str:
        return f"{self.domain}/{self.prompt_uid}/{self.epoch}/{self.group}/{self.index}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Sampling(Packed):
    """Sampling parameters. Temperature 0 means greedy decoding."""

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
    """Ask for the token ids that top-p, top-k and min-p keep at each position (Completion.kept_ids)."""


class TokenRow(NamedTuple):
    """Tokens, mask and log-probs of a sample: a row of a token block (workers/token_blocks.py)."""

    block: Any
    """Reference to the token block in Ray's object store or, within one process, the block itself."""
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class GenerationRequest(Packed):
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    context: TokenRow | None = None
    """Tokens of an earlier request that come before prompt_ids. The engine's worker prepends them, since engines take whole prompts."""
    resumed: int = 0
    """Number of tokens at the end of the context that an earlier request generated for this response. The returned text includes them, and
    stop strings may begin in them. All other fields of the answer describe new tokens only."""
    wants_ids: bool = False
    """Return the response's token ids with the turn, for an environment."""
    masks_context: bool = False
    """Mask the context's tokens, since another row of the sample trains on them."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the response, with the context's."""
        return len(self.prompt_ids) + (0 if self.context is None else self.context.length)

    @property
    def resumed_ids(self) -> tuple[int, ...]:
        """Last `resumed` tokens of prompt_ids. Valid only after the context was prepended to prompt_ids."""
        return self.prompt_ids[len(self.prompt_ids) - self.resumed :]


class VersionSpan(NamedTuple):
    """Weight version that sampled the response tokens from index `start` on."""

    start: int
    version: int


def since_token(spans: Sequence[VersionSpan], first: int, end: int) -> tuple[VersionSpan, ...]:
    """Version spans of tokens `first` to `end` (exclusive), counted from `first`."""
    begun = [span for span in spans if span.start <= first][-1:] if first < end else []
    return tuple(VersionSpan(max(0, span.start - first), span.version) for span in [*begun, *(s for s in spans if first < s.start < end)])


def merged(*spans: VersionSpan) -> tuple[VersionSpan, ...]:
    """Drop spans with the same version as the one before."""
    return tuple(span for place, span in enumerate(spans) if not place or spans[place - 1].version != span.version)


@dataclass(frozen=True, slots=True)
class Completion:
    """Answer of an engine to a request. If `error` is set, the request failed and other fields are meaningless."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Log-prob of each token under the distribution it was sampled from (after temperature and truncation)."""
    text: str = ""
    """Text of the whole response, including resumed tokens, without special tokens."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    """Token ids that truncated sampling kept, for each response token; None unless requested."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    experts: np.ndarray | None = field(default=None, compare=False)
    """Experts chosen for prompt and response tokens, if reported: [tokens, expert layers * experts per token] int16. Without the last
    token, which the engine has not processed."""


class Turn(NamedTuple):
    """Completion as the scheduler sees it: counts, text, and a reference to the tokens, which stay in the object store."""

    request_id: str
    length: int = 0
    """Number of tokens generated for this request. The spans in `versions` count these tokens from 0."""
    text: str = ""
    """Text of the whole response, including resumed tokens; empty if aborted before the first token."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    tokens: TokenRow | None = None
    """Whole conversation up to the end of the response, as tokens."""
    engine: int | None = None
    """Number of the engine that sampled the response; None if several did."""
    ids: bytes = b""
    """Token ids of the response as int32, if the request wants them."""


def joined(before: Turn | None, turn: Turn) -> Turn:
    """Join the response of an interrupted request and that of its continuation."""
    if before is None:
        return turn
    shifted = tuple(VersionSpan(before.length + span.start, span.version) for span in turn.versions)
    return turn._replace(
        request_id=before.request_id,
        length=before.length + turn.length,
        versions=merged(*before.versions, *shifted),
        cached_tokens=before.cached_tokens,
        engine=turn.engine if turn.engine == before.engine else None,
        ids=before.ids + turn.ids,
    )


class Author(StrEnum):
    """Author of a segment of tokens. Only the policy's tokens are trained on."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one author, stored in a token block (workers/token_blocks.py)."""

    author: Author
    length: int
    versions: tuple[VersionSpan, ...] = ()
    """Version spans, counted from the segment's first token."""
    engine: int | None = None
    """Number of the engine that sampled the segment; None if several did, or none."""
    turn: int | None = None
    """Number of the response in its sample."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord(Packed):
    """Result of an episode, as its environment reports it."""

    messages: tuple[dict[str, Any], ...] = ()
    """Whole conversation, as chat messages. If the episode had several, the one with the last response."""
    rewards: tuple[float, ...] = ()
    """Reward of each response."""
    score: float = 0.0
    """Rewards combined into one number, as domains.NAME.environment.rewards says."""
    correct: bool | None = None
    """True if the environment says that the episode was solved; None: the score decides."""
    metrics: dict[str, float] = field(default_factory=dict)
    branches: tuple[tuple[dict[str, Any], ...], ...] = ()
    """Other conversations of the episode, in order of their first response."""
    answer: str | None = None
    """Answer to score in place of the last response."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Row of a sample: segments in order. The prompt comes first, then policy responses and environment messages."""

    segments: tuple[Segment, ...] = ()
    tokens: TokenRow | None = None

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
        """Version spans of all segments, counted from the first token after the prompt."""
        spans: list[VersionSpan] = []
        start = -self.prompt_length
        for segment in self.segments:
            spans += [VersionSpan(start + span.start, span.version) for span in segment.versions]
            start += segment.length
        return tuple(spans)

    @property
    def engine(self) -> int | None:
        """Number of the engine that sampled all responses; None if several did."""
        engines = {segment.engine for segment in self.segments if segment.author is Author.POLICY}
        return engines.pop() if len(engines) == 1 else None


@dataclass(frozen=True, slots=True)
class Transcript(Branch):
    """Tokens and texts of a sample: its first row and, if an agent's requests branched, further rows."""

    text: str = ""
    """Responses of the policy, joined."""
    finish_reason: FinishReason | None = None
    """Finish reason of the last response, or MAX_TURNS."""
    episode: EpisodeRecord | None = None
    """Result of the episode; None in domains without an environment."""
    branches: tuple[Branch, ...] = ()
    """Further rows. A row that continues another one's response repeats its tokens as the prompt, so each response trains once."""

    @property
    def rows(self) -> tuple[Branch, ...]:
        return self, *self.branches

    @property
    def last_text(self) -> str:
        """Text to score: an agent's answer, or the last response without tool calls."""
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
    """Text that the model gets, with the template applied."""
    response: str
    """Text of the response, without special tokens; in an episode of several turns, of the last one."""
    answer: Any
    """Reference answer."""
    columns: dict[str, Any]
    """Columns of the data row."""
    finish_reason: str
    question: Any = None
    """Prompt as in the data, without template: a text or a list of chat messages."""
    episode: EpisodeRecord | None = None
    """Conversation and rewards of an environment; `response` is then the last response. None in domains without one."""

    @staticmethod
    def of(prompt: Prompt, response: str, finish_reason: str, episode: EpisodeRecord | None = None) -> RewardInput:
        return RewardInput(prompt.domain, prompt.text, response, prompt.answer, prompt.columns, finish_reason, prompt.question, episode)


@dataclass(frozen=True, slots=True)
class Score(Packed):
    """Result of a reward function. A plain number or bool becomes Score(value)."""

    value: float
    correct: bool | None = None
    """True if the response is correct. None: it is if value >= 1 - 1e-6."""
    details: dict[str, float | str] = field(default_factory=dict)
    format_ok: bool | None = None
    """True if the response matches the domain's format pattern; None without a pattern."""
    answer: str | None = None
    """Answer extracted from the response, for majority votes. Empty: none found. None: this reward extracts no answers."""
    terms: dict[str, float] = field(default_factory=dict)
    """Weighted terms that add up to the value, for rewards of several terms."""

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
    """Why the outcome is FAILED or FILTERED."""
    timed_out: bool = False
    """True if generation timed out. The transcript has the tokens until then."""
    asked: float | None = field(default=None, compare=False)
    """Time of the first request. All times are on the event loop's clock, in seconds."""
    generated: float | None = field(default=None, compare=False)
    """Time of the last token."""
    scored: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples of one prompt, in order of their index."""

    group: int
    domain: str
    samples: tuple[Sample, ...]
    baseline: Sample | None = None
    """Sample with greedy decoding (for ReMax); it is scored but never trained on."""

    @property
    def timed_out(self) -> bool:
        """True if a sample timed out. It was probably long, so without it the group is biased towards short responses."""
        return any(sample.timed_out for sample in self.samples)
