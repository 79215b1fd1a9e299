"""Sections of domains and rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.problems import did_you_mean
from roll_lite.config.schema.base import ASCENDING, Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, UserPath, rule
from roll_lite.config.text_templates import compile_format, placeholders


class DataFilterConfig(Section):
    """Selects rows; the number of dropped ones is printed at the start."""

    prompt_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], PositiveInt], ASCENDING] | None = None
    """Range of prompt lengths to keep, ends included, with the template; also for held-out prompts."""
    difficulty: str | None = None
    """Column with a number, such as the share of samples solved by a model; only `train` needs it."""
    difficulty_range: Annotated[tuple[float, float], ASCENDING] | None = None
    """Range of difficulties to keep, ends included; held-out prompts are all kept."""

    @rule
    def _column(self) -> Mistakes:
        if self.difficulty_range is not None and self.difficulty is None:
            yield "difficulty_range", "of which column? Name it with `difficulty`"


DataFiles = UserPath | Annotated[list[UserPath], Field(min_length=1)] | Annotated[dict[UserPath, PositiveFloat], Field(min_length=1)]


class DataConfig(Section):
    train: DataFiles
    """Training prompts: a .jsonl or .parquet file, or a folder of Hugging Face `datasets`. A list is read in order. A mapping of paths
    to shares draws prompts from each by its share, not by its length."""
    validation: DataFiles | None = None
    """Held-out prompts. All are used; shares have no effect."""
    tag: str | None = None
    """Column with a row's domain, for shared files."""
    tags: list[str] = Field(default_factory=list)
    """Tags of this domain's rows. A tag in the file that no domain lists is an error."""
    filter: DataFilterConfig = Field(default_factory=DataFilterConfig)
    """Rows to drop."""
    prompt: str = "prompt"
    """Column with the prompt (a string or chat messages)."""
    answer: str | None = "answer"
    """Column with the reference answer of every row; null: none."""
    weight: str | None = None
    """Column with the weight of a prompt's samples in the loss; absent: 1."""
    epochs: PositiveInt | None = None
    """Passes over `train`, each in a new order. Then the other domains share its part; if none has prompts left, the run ends with an
    error. Absent: unlimited."""
    report_by: str | None = None
    """Column of held-out prompts, such as level or subject, by whose values (50 at most) validation is reported too."""


def _shows_the_prompt(text: str) -> str:
    if not placeholders(text):
        raise ValueError("never shows the prompt; put {prompt} where it belongs")
    return text


class PlainTemplateConfig(Section):
    """A text that contains the prompt."""

    name: Literal["plain"] = "plain"
    text: Annotated[str, AfterValidator(_shows_the_prompt)] = "{prompt}"
    """Model input; {prompt} is the prompt column."""


class ChatTemplateConfig(Section):
    name: Literal["chat"] = "chat"
    system: str | None = None
    """System message."""
    file: UserPath | None = None
    """Jinja file; absent: the tokenizer's template."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the template, such as `{enable_thinking: false}`."""


TemplateConfig = Annotated[PlainTemplateConfig | ChatTemplateConfig, Field(discriminator="name")]


LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower temperatures to the first, and refuses those above the second."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=GREATEST_TEMPERATURE)] = 1.0
    """Temperature, also of the training log-probs."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k likeliest tokens; 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest; 0: off."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens; longer ones are an error."""
    max_tokens: PositiveInt = 1024
    """Longest response in tokens."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Shortest response in tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=32)
    """Texts that end a response and belong to it; ignored if complete within the first min_tokens tokens."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Tokens that end a response and belong to it, besides the model's end of sequence."""

    @rule
    def _limits(self) -> Mistakes:
        if self.min_tokens > self.max_tokens:
            yield "min_tokens", f"is more than max_tokens ({self.max_tokens})"


def _engines_sample(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"engines sample at {LEAST_TEMPERATURE:g} and above, and greedily at 0; use {LEAST_TEMPERATURE:g} or 0")
    return temperature


_HeldOutTemperature = Annotated[float, Field(ge=0, le=GREATEST_TEMPERATURE), AfterValidator(_engines_sample)]


class HeldOutSamplingConfig(Section):
    """Sampling of a domain's held-out prompts; overrides validation.sampling."""

    temperature: _HeldOutTemperature | None = None
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample from the k likeliest tokens; 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this share of the likeliest; 0: off."""
    max_tokens: PositiveInt | None = None
    """Longest response in tokens."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Shortest response in tokens."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=32)] | None = None
    """Texts that end a response and belong to it."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Tokens that end a response, besides the model's end of sequence."""


class ValidationSamplingConfig(HeldOutSamplingConfig):
    """Sampling of held-out prompts; settings that are absent, except temperature, are those of the domain's training."""

    temperature: _HeldOutTemperature = 1.0
    """0: greedy."""


class FormatConfig(Section):
    """Bonus or penalty for a response's format. Its answer does not matter."""

    pattern: Annotated[str, AfterValidator(lambda pattern: compile_format(pattern).pattern)]
    """Regular expression to find in the response; `.` matches line breaks, ^ and $ anchor."""
    bonus: float = 0.1
    """Added to the score of matching responses."""
    penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of others."""


class RewardTermConfig(Section):
    name: str
    """Type or dotted path as of a reward; `length`, `repetition` and `format` are made for terms."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""
    weight: float = 1.0
    """Factor; negative: a penalty."""

    @rule
    def _weighs(self) -> Mistakes:
        if self.weight == 0:
            yield "weight", "the term is worth nothing; remove it, or give it a weight"


class RewardConfig(Section):
    """Scores samples by a known type or a user's function, plus terms."""

    name: str
    """Known type (docs/rewards.md), or dotted path to a function `sample -> score`, sync or async, for a sample or a list."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""
    terms: list[RewardTermConfig] = Field(default_factory=list)
    """Terms added to the score, times their weights. Correctness depends on the reward alone."""
    workers: PositiveInt = 1
    """Processes that score this domain's samples."""
    timeout_s: PositiveFloat = 30.0
    """Time limit for scoring a sample; then the attempt fails."""
    start_timeout_s: PositiveFloat = 120.0
    """Time limit for starting a worker, which imports the function."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Retries before a sample counts as failed."""
    weight: PositiveFloat = 1.0
    """Factor of this domain's rewards, after all of algorithm.reward."""
    format: FormatConfig | None = None
    """Bonus for a response's format."""


class DomainConfig(Section):
    data: DataConfig
    """Source of prompts."""
    template: TemplateConfig = Field(default_factory=PlainTemplateConfig)
    """Template of the model's input."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling in training."""
    validation_sampling: HeldOutSamplingConfig = Field(default_factory=HeldOutSamplingConfig)
    """Sampling of held-out prompts; absent settings are those of validation.sampling."""
    reward: RewardConfig
    """Scoring of responses."""
    share: PositiveFloat = 1.0
    """Weight of the domain in the mix; shares need not sum to 1."""
    min_prompts: Annotated[int, Field(ge=0)] = 0
    """Fewest prompts of this domain in a batch, even beyond its share; others get fewer."""
    samples_per_prompt: PositiveInt | None = None
    """Group size; absent: rollout.samples_per_prompt."""


# ---------------------------------------------------------------- rollouts


GROUP_MEASURES: dict[str, tuple[float | None, float | None]] = {"accuracy": (0.0, 1.0), "mean": (None, None), "std": (0.0, None)}
"""Built-in measures, with the default range that trains."""


class GroupFilterConfig(Section):
    """Dynamic sampling: replaces groups that teach nothing by other prompts until the batch is full."""

    name: str = "accuracy"
    """accuracy (share of correct samples), mean or std (of scores), or dotted path to a function `SampleGroup -> bool`, true if the
    group trains."""
    above: float | None = None
    """Groups train if their measure is above this; absent: 0 for accuracy and std, no bound for mean."""
    below: float | None = None
    """Groups train if their measure is below this; absent: 1 for accuracy, no bound for mean and std."""
    tries: PositiveInt = 10
    """Maximum number of prompts tried per place in the batch, averaged over a domain's batch."""
    when_short: Literal["fail", "continue"] = "fail"
    """When `tries` are used up, fail: end the run; continue: train on the groups that passed."""

    @rule
    def _known(self) -> Mistakes:
        if self.name in GROUP_MEASURES:
            above, below = self.bounds
            if above is not None and below is not None and above >= below:
                yield "above", f"no group is above it and below {below:g}"
            return
        if "." not in self.name:
            known = did_you_mean(self.name, GROUP_MEASURES)
            yield "name", f"no such filter; {known}, or a dotted path to a function of your own"
        for key in ("above", "below"):
            if getattr(self, key) is not None:
                yield key, f"belongs to {', '.join(GROUP_MEASURES)}: {self.name!r} decides by itself"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """(above, below), with the measure's defaults."""
        above, below = GROUP_MEASURES[self.name]
        return above if self.above is None else self.above, below if self.below is None else self.below


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 32
    """Prompts (groups) per batch, over all domains."""
    samples_per_prompt: PositiveInt = 8
    """Responses per prompt."""
    request_timeout_s: PositiveFloat = 600.0
    """Time limit of a response, without time in the engine's queue or paused for new weights."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Retries of a generation before its sample counts as failed."""
    supply: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: generation and training alternate. one_step_off: the next batch is generated while one is trained. async: engines always
    generate, at most max_staleness steps ahead."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Largest number of steps between the weights that generate a sample and those that it trains. Absent: 0 for sync, else 1. A batch
    waits for samples near the limit. Older samples are dropped, and their prompts start again."""
    on_sync: Literal["drain", "pause", "abort"] | None = None
    """Treatment of running responses at a weight update. drain: the update waits until they end. pause: each continues in its engine, which
    recomputes the KV cache. abort: each continues in any engine. Absent: abort if engines offload, else drain for one_step_off and pause
    for others."""
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Prompts started for a batch, as a multiple of its size, if some are filtered or slow. Only with `supply: sync`; others generate ahead
    anyway."""
    filter: GroupFilterConfig | None = None
    """Filter of groups; absent: all train."""
    max_tokens_per_engine: PositiveInt | None = None
    """Limit of tokens in flight in an engine (prompts, and responses at their expected length), above which it gets no further request.
    Absent: only max_running_requests counts."""
    stream_log_probs: bool = False
    """Compute log-probs and values of finished groups while the batch is generated. Models must not share devices with engines."""
    dump: bool = False
    """Write every batch with tokens, log-probs and texts to the run's `dumps/` (docs/replay.md); `mode: rollout_only` always does."""
    keep_mask: bool = False
    """Record the tokens that survived top-k, top-p and min-p, and compute training log-probs over them."""
    max_mismatch: PositiveFloat | None = 0.2
    """Largest mean difference, in nats, between the log-probs that engines and trainer give the same tokens: in the first batch, and later
    in each engine's samples of the trainer's current weights. A larger one ends the run, since they hold different models. So does an
    engine that differs several times as much as usual, or as the others. Usual in bfloat16: 0.01 to 0.05. null: unlimited."""

    @rule
    def _ahead(self) -> Mistakes:
        given, surplus = self.max_staleness, self.oversample > 1
        if self.supply != "sync" and surplus:
            message = f"rollout.supply {self.supply} generates ahead as far as its staleness allows; what is more would become too old"
            yield "oversample", f"{message}; use 1, or rollout.supply: sync"
        if given == 0 and self.supply == "one_step_off":
            yield "max_staleness", "a batch is generated one step before it is trained; use 1 or more, or supply: sync"
        if given and self.supply == "sync" and self.oversample > given + 1:
            message = f"surplus is kept for max_staleness: {given} further batches, and what is more would be generated again and again"
            yield "oversample", f"{message}; use at most {given + 1}, or a higher max_staleness"
        if given and self.supply == "sync" and not surplus:
            yield "max_staleness", "nothing is generated ahead by supply: sync without oversample; use 0, or supply: async"
