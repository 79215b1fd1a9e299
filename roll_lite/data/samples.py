"""What travels through the rollout half of the house: prompts, requests, completions, scored samples.

Plain, picklable records without tensors, Ray or engines: the scheduler, the rewards and every engine speak these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `roll-lite check` has no time for it
    import numpy as np

TURN = "/turn"
"""Stands in a request's id between its sample's and the number of the turn, after the first one."""


class FinishReason(StrEnum):
    """Why an engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SampleOutcome(StrEnum):
    """What became of a sample. Every sample of every prompt ends in exactly one of these."""

    ACCEPTED = "accepted"
    FILTERED = "filtered"
    FAILED = "failed"


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
    """The whole row, for rewards that need more of it."""
    weight: float = 1.0
    """Factor of its samples' weight in the loss."""
    question: Any = None
    """The prompt's column as the data has it: a text, or chat messages."""


@dataclass(frozen=True, slots=True)
class SampleId:
    """Identity of one sample. Validation uses epoch -1."""

    domain: str
    prompt_uid: int
    epoch: int
    group: int
    """Number of the sample group, unique in a run."""
    index: int
    """Place in the group, 0 to n-1; n for the greedy baseline."""
    attempt: int = 0
    """How often this sample was tried before."""

    def request_id(self) -> str:
        return f"{self.domain}/{self.prompt_uid}/{self.epoch}/{self.group}/{self.index}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """What an engine needs to know to sample. temperature 0 is greedy."""

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
    """Ask the engine which tokens survived truncation (Completion.kept_ids)."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Where the tokens of a sample lie, with response mask and log-probs: a row of a token block (workers/token_blocks.py)."""

    block: Any
    """A reference into the object store; within one process the block itself."""
    row: int
    length: int
    """Tokens of the row."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    context: TokenRow | None = None
    """What precedes prompt_ids, from an earlier request. The worker beside the engine fetches it: an engine gets whole prompts."""
    resumed: int = 0
    """So many of the last tokens before the response belong to it already: an earlier request was ended in the middle of it. The answer's
    text is that of the whole response, and a stop text may begin in one part and end in the other; all else counts the new tokens."""

    @property
    def resumed_ids(self) -> tuple[int, ...]:
        """Those tokens, of a request whose prompt is whole."""
        return self.prompt_ids[len(self.prompt_ids) - self.resumed :]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """From response token `start` on, the engine's weights had this version."""

    start: int
    version: int


def since_token(spans: Sequence[VersionSpan], first: int, end: int) -> tuple[VersionSpan, ...]:
    """Of the tokens from `first` on, counted from there, before `end`."""
    begun = [span for span in spans if span.start <= first][-1:] if first < end else []
    return tuple(VersionSpan(max(0, span.start - first), span.version) for span in [*begun, *(s for s in spans if first < s.start < end)])


def merged(*spans: VersionSpan) -> tuple[VersionSpan, ...]:
    """Without those that begin where the version stays the same."""
    return tuple(span for place, span in enumerate(spans) if not place or spans[place - 1].version != span.version)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one request. A failed request has `error` set and nothing else that counts."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Of the distribution that was sampled from (after temperature and truncation), one per token."""
    text: str = ""
    """The whole response without special tokens, also what was resumed."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    """For each response token the ids of the tokens that survived truncation, where the sampling asks for them."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values the engine had already, from another request."""
    experts: np.ndarray | None = field(default=None, compare=False)
    """[tokens, layers with experts x experts of a token] int16: where the tokens of prompt and response went, from the first on; the last
    one has not been run. Where the engine was asked for it (EngineSpec.experts)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of a Completion on its way to the scheduler: numbers, the text, and where the tokens are."""

    request_id: str
    length: int = 0
    """Tokens that were generated for the request, of which `versions` speaks as well."""
    text: str = ""
    """Of the whole response, also what was resumed. Empty where an abort came before the first token."""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    tokens: TokenRow | None = None
    """Of everything so far: what the request started from, then the response."""


class Author(StrEnum):
    """Who wrote a segment. Only what the policy wrote trains."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one author. Tokens and log-probs stay in the token block."""

    author: Author
    length: int
    versions: tuple[VersionSpan, ...] = ()
    """Of the weights that wrote it, counted from its own first token."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """All that was said in a sample: the prompt, then responses of the policy with what the environment said in between."""

    segments: tuple[Segment, ...] = ()
    text: str = ""
    """What the policy wrote, all its responses together."""
    finish_reason: FinishReason | None = None
    """Why the last response ended."""
    tokens: TokenRow | None = None

    @property
    def prompt_length(self) -> int:
        return sum(segment.length for segment in self.segments if segment.author is Author.PROMPT)

    @property
    def response_length(self) -> int:
        """Everything after the prompt."""
        return sum(segment.length for segment in self.segments if segment.author is not Author.PROMPT)

    @property
    def policy_tokens(self) -> int:
        return sum(segment.length for segment in self.segments if segment.author is Author.POLICY)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Counted from the first token after the prompt."""
        spans: list[VersionSpan] = []
        start = -self.prompt_length
        for segment in self.segments:
            spans += [VersionSpan(start + span.start, span.version) for span in segment.versions]
            start += segment.length
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward function sees of a sample."""

    domain: str
    prompt: str
    """The model's input, template applied."""
    response: str
    """Without special tokens."""
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
class Score:
    """What a reward function returns, normalised. A plain number or bool becomes Score(value)."""

    value: float
    correct: bool | None = None
    """For accuracy; value >= 1 - 1e-6 counts as correct where absent."""
    details: dict[str, float | str] = field(default_factory=dict)
    format_ok: bool | None = None
    """Whether the domain's format pattern matches the response; None without a pattern."""
    answer: str | None = None
    """What the response answers, for majority votes: equal texts are equal answers, an empty one is none. None: the reward reads none."""

    @property
    def is_correct(self) -> bool:
        return self.correct if self.correct is not None else self.value >= 1 - 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished sample: what was said, its score, its outcome."""

    id: SampleId
    prompt: Prompt
    transcript: Transcript
    outcome: SampleOutcome
    score: Score | None = None
    failure: str | None = None
    """Cause, for SampleOutcome.FAILED and FILTERED."""
    timed_out: bool = False
    """Failed because its generation took too long; the transcript is what there was by then."""


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
        """It lost a member to a time-out: a long response, most likely, so that those that are left are short for their prompt."""
        return any(sample.timed_out for sample in self.samples)
