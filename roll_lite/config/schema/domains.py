"""Sections of domains (data, templates, sampling, rewards) and of rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.problems import did_you_mean
from roll_lite.config.schema.base import ASCENDING, Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, UserPath, rule
from roll_lite.config.text_templates import compile_format, placeholders


class DataFilterConfig(Section):
    """Selects rows of the data; the number of dropped rows is printed at the start."""

    prompt_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], PositiveInt], ASCENDING] | None = None
    """Range of prompt lengths to keep, ends included. The template counts; held-out prompts are filtered too."""
    difficulty: str | None = None
    """Name of a column with a number, such as the share of samples that a model has solved. Only `train` needs it."""
    difficulty_range: Annotated[tuple[float, float], ASCENDING] | None = None
    """Range of difficulties to keep, ends included. Only for `train`: held-out prompts are all kept."""

    @rule
    def _column(self) -> Mistakes:
        if self.difficulty_range is not None and self.difficulty is None:
            yield "difficulty_range", "of which column? Name it with `difficulty`"


DataFiles = UserPath | Annotated[list[UserPath], Field(min_length=1)] | Annotated[dict[UserPath, PositiveFloat], Field(min_length=1)]


class DataConfig(Section):
    train: DataFiles
    """Prompts to train on: a .jsonl or .parquet file, or a folder with a data set saved by Hugging Face `datasets`. Or several: a list is
    read one after the other; a mapping of paths to shares gives each its share of the domain's prompts, independent of its length."""
    validation: DataFiles | None = None
    """Held-out prompts; all are used, even if shares are given."""
    tag: str | None = None
    """Name of a column with the domain of a row, for files that several domains share."""
    tags: list[str] = Field(default_factory=list)
    """Tags of this domain's rows. A tag that belongs to no domain of its file is an error."""
    filter: DataFilterConfig = Field(default_factory=DataFilterConfig)
    """Rows to drop."""
    prompt: str = "prompt"
    """Name of the column with the prompt (a string, or a list of chat messages)."""
    answer: str | None = "answer"
    """Name of the column with the reference answer."""
    weight: str | None = None
    """Name of a column with the weight of a prompt's samples in the loss; absent: 1 for all."""
    epochs: PositiveInt | None = None
    """Passes over the prompts of `train`, each in a new order. Afterwards the other domains share this one's part; if no domain has prompts
    left, the run ends with an error. Absent: unlimited."""
    report_by: str | None = None
    """Name of a column of the held-out prompts, such as level or subject: validation is also reported for each of its values (50 at most).
    """


def _shows_the_prompt(text: str) -> str:
    if not placeholders(text):
        raise ValueError("never shows the prompt; put {prompt} where it belongs")
    return text


class PlainTemplateConfig(Section):
    """A text that contains the prompt."""

    name: Literal["plain"] = "plain"
    text: Annotated[str, AfterValidator(_shows_the_prompt)] = "{prompt}"
    """Input of the model; {prompt} stands for the prompt's column."""


class ChatTemplateConfig(Section):
    """A chat template."""

    name: Literal["chat"] = "chat"
    system: str | None = None
    """System message."""
    file: UserPath | None = None
    """File with the chat template (Jinja); absent: the tokenizer's."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`."""


TemplateConfig = Annotated[PlainTemplateConfig | ChatTemplateConfig, Field(discriminator="name")]


LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.01, 2.0
"""Limits of vLLM: it raises lower temperatures to its least one, and refuses higher ones."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=GREATEST_TEMPERATURE)] = 1.0
    """Sampling temperature, also used for the training log-probs of the domain's samples."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k most likely tokens; 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the most likely one; 0: off."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens; longer ones are an error."""
    max_tokens: PositiveInt = 1024
    """Longest response in tokens."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Shortest response in tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=32)
    """Texts that end a response; the text is part of it. Ignored if complete within the first min_tokens tokens."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Tokens that end a response, in addition to the model's end of sequence; the token is part of it."""

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
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample from the k most likely tokens; 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this share of the most likely one; 0: off."""
    max_tokens: PositiveInt | None = None
    """Longest response in tokens."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Shortest response in tokens."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=32)] | None = None
    """Texts that end a response; the text is part of it."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Tokens that end a response, in addition to the model's end of sequence."""


class ValidationSamplingConfig(HeldOutSamplingConfig):
    """Sampling of held-out prompts; a domain's validation_sampling overrides it. All settings but the temperature default to those of the
    domain's training."""

    temperature: _HeldOutTemperature = 1.0
    """Sampling temperature; 0: greedy."""


class FormatConfig(Section):
    """Bonus or penalty for a response's format, independent of its answer."""

    pattern: Annotated[str, AfterValidator(lambda pattern: compile_format(pattern).pattern)]
    """Regular expression that must match somewhere in the response (`.` matches line breaks; anchor with ^ and $ if needed)."""
    bonus: float = 0.1
    """Added to the score of matching responses."""
    penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of other responses."""


class RewardTermConfig(Section):
    """Further term of a domain's reward."""

    name: str
    """Type or dotted path as for the reward itself; `length`, `repetition` and `format` are made for terms."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    weight: float = 1.0
    """Factor of its value; negative: a penalty."""

    @rule
    def _weighs(self) -> Mistakes:
        if self.weight == 0:
            yield "weight", "the term is worth nothing; remove it, or give it a weight"


class RewardConfig(Section):
    """Scores samples: by a known type or a function of the user, plus further terms."""

    name: str
    """Known type (docs/rewards.md), or a dotted path to a function `sample -> score`, sync or async, for one sample or for a list."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    terms: list[RewardTermConfig] = Field(default_factory=list)
    """Terms added to the score, each times its weight. Whether a sample is correct depends on the reward alone."""
    workers: PositiveInt = 1
    """Number of processes that score this domain's samples."""
    timeout_s: PositiveFloat = 30.0
    """Time limit for scoring one sample; then the attempt counts as failed."""
    start_timeout_s: PositiveFloat = 120.0
    """Time limit for the start of a worker, which imports the function."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Number of retries before a sample is reported as failed."""
    weight: PositiveFloat = 1.0
    """Factor of this domain's rewards, applied after all of algorithm.reward."""
    format: FormatConfig | None = None
    """Bonus for the format of a response."""


class DomainConfig(Section):
    data: DataConfig
    """Source of the prompts."""
    template: TemplateConfig = Field(default_factory=PlainTemplateConfig)
    """Template that turns a prompt into the model's input."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling in training."""
    validation_sampling: HeldOutSamplingConfig = Field(default_factory=HeldOutSamplingConfig)
    """Sampling of held-out prompts; absent settings are those of validation.sampling."""
    reward: RewardConfig
    """Scoring of responses."""
    share: PositiveFloat = 1.0
    """Weight of the domain in the mix; shares need not sum to one."""
    min_prompts: Annotated[int, Field(ge=0)] = 0
    """Minimum of this domain's prompts per batch, even beyond its share; the other domains get fewer."""
    samples_per_prompt: PositiveInt | None = None
    """Group size of this domain; absent: rollout.samples_per_prompt."""


# ---------------------------------------------------------------- rollouts


GROUP_MEASURES: dict[str, tuple[float | None, float | None]] = {"accuracy": (0.0, 1.0), "mean": (None, None), "std": (0.0, None)}
"""Built-in measures of a filter, with the default range in which groups train."""


class GroupFilterConfig(Section):
    """Dynamic sampling: drops groups that teach nothing and replaces them by other prompts until the batch is full."""

    name: str = "accuracy"
    """Measure of a group: accuracy (share of correct samples), mean or std (of its scores); or a dotted path to a function `SampleGroup ->
    bool`, true if the group trains."""
    above: float | None = None
    """Groups train if the measure is above this; absent: 0 for accuracy and std."""
    below: float | None = None
    """Groups train if the measure is below this; absent: 1 for accuracy."""
    tries: PositiveInt = 10
    """Maximal number of prompts tried per place in the batch, averaged over a domain's batch."""
    when_short: Literal["fail", "continue"] = "fail"
    """Action when that is not enough. fail: end the run; continue: train on the groups that passed."""

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
        """Range of a built-in measure."""
        above, below = GROUP_MEASURES[self.name]
        return above if self.above is None else self.above, below if self.below is None else self.below


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 32
    """Prompts (sample groups) per training batch, over all domains."""
    samples_per_prompt: PositiveInt = 8
    """Responses per prompt."""
    request_timeout_s: PositiveFloat = 600.0
    """Time limit for one response, from its start in the engine. Time in the engine's queue, or paused for new weights, does not count."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Number of retries of a generation before the sample is reported as failed."""
    supply: Literal["sync", "one_step_off", "async"] = "sync"
    """Schedule of generation and training. sync: one after the other. one_step_off: the next batch is generated while one is trained.
    async: engines generate all the time, at most max_staleness steps ahead."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Maximal age of a sample in steps, between the weights that generated it and those that it trains; absent: 0 for sync, 1 for the
    others. The batch waits for samples that would get too old; if one is too old nevertheless, its prompt is put back and generated again.
    """
    on_sync: Literal["drain", "pause", "abort"] | None = None
    """Handling of running responses when new weights arrive. drain: they finish first. pause: they continue in their engines, which
    recompute the KV cache. abort: they are interrupted and continue on any engine. Absent: abort if the engines offload, else drain for
    one_step_off and pause for the others.
    """
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Factor for the prompts started for a batch, if some are filtered or slow. Only with supply: sync; the others generate ahead anyway.
    """
    filter: GroupFilterConfig | None = None
    """Filter of groups (dynamic sampling); absent: all groups train."""
    max_tokens_per_engine: PositiveInt | None = None
    """Maximal tokens in flight in one engine: prompts, and responses at their expected length. An engine at the limit gets no further
    request. Absent: only max_running_requests counts."""
    stream_log_probs: bool = False
    """Compute log-probs and values of finished groups while the rest of their batch is generated. The models must not share devices with
    the engines."""
    dump: bool = False
    """Write every batch with its tokens, log-probs and texts to the run's `dumps/` (docs/replay.md); `mode: rollout_only` always does."""
    keep_mask: bool = False
    """Record the tokens that survived top-k, top-p and min-p, and compute training log-probs over the same tokens."""
    max_mismatch: PositiveFloat | None = 0.2
    """Maximal mean difference between the log-probs of engines and trainer over the first batch's tokens, in nats; beyond it they hold
    different models, and the run ends. In bfloat16 0.01 to 0.05 is usual. null: unlimited."""

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
