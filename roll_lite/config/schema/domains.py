"""Sections of domains (data, template, sampling, reward) and of rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.problems import did_you_mean
from roll_lite.config.schema.base import (
    ASCENDING,
    DataPath,
    Mistakes,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    UserPath,
    rule,
)
from roll_lite.config.schema.environments import EnvironmentConfig, ToolsEnvironmentConfig
from roll_lite.config.text_templates import compile_format, placeholders


class DataFilterConfig(Section):
    """Selects rows of the data. At its start, a run prints how many rows are dropped."""

    prompt_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], PositiveInt], ASCENDING] | None = None
    """Keep prompts, also held-out ones, whose token count (with the template) lies in this range, ends included. null: all."""
    difficulty: str | None = None
    """Column with the number for difficulty_range, such as the share of correct samples of a model. Only `train` needs it."""
    difficulty_range: Annotated[tuple[float, float], ASCENDING] | None = None
    """Keep training prompts whose difficulty lies in this range, ends included; held-out prompts are all kept. null: all."""

    @rule
    def _column(self) -> Mistakes:
        if self.difficulty_range is not None and self.difficulty is None:
            yield "difficulty_range", "of which column? Name it with `difficulty`"


DataFiles = DataPath | Annotated[list[DataPath], Field(min_length=1)] | Annotated[dict[DataPath, PositiveFloat], Field(min_length=1)]


class DataConfig(Section):
    preset: str | None = None
    """Public data set whose rows train, and whose settings the domain has where it sets none itself: `roll-lite data list` (docs/data.md).
    Your own `train` and `validation` then have the data set's columns. null: rows are read as they are."""
    validation_preset: str | None = None
    """Preset of `validation`, if it is another one."""
    train: DataFiles | None = None
    """Training prompts, for every mode but evaluate: a .jsonl, .parquet, .csv or .json file, a folder of Hugging Face `datasets`, or a data
    set of the hub: hf://owner/name/configuration?split=train (docs/data.md). The files of a list are read in order. A mapping of paths to
    shares mixes the files: each supplies its share of the prompts, however few rows it has."""
    validation: DataFiles | None = None
    """Held-out prompts, in the same forms; all are used, shares have no effect. null: none."""
    tag: str | None = None
    """Column with each row's tag, if several domains share files; null: all rows belong to this domain."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the rows that belong to this domain. A tag that no domain lists is an error."""
    filter: DataFilterConfig = Field(default_factory=DataFilterConfig)
    """Selection of rows."""
    prompt: str = "prompt"
    """Column with the prompt (a string or chat messages)."""
    answer: str | None = "answer"
    """Column with the reference answer of every row; null: none."""
    weight: str | None = None
    """Column with the weight of a prompt's samples in the loss; null: all weights are 1."""
    epochs: PositiveInt | None = None
    """Maximum passes over `train`, each in a new order. After the last, other domains fill this domain's part of the batch; if none has
    prompts left, the run ends with an error. null: unlimited."""
    report_by: str | list[str] | None = None
    """Column of held-out prompts, or several. Validation is also reported for each of their values (at most 50 of each). null: those of
    level and subject that the prompts have; []: none."""

    @property
    def reported(self) -> list[str]:
        """Columns that `report_by` names."""
        return [self.report_by] if isinstance(self.report_by, str) else list(dict.fromkeys(self.report_by or ()))

    def preset_of(self, split: str) -> str | None:
        return self.preset if split == "train" else self.validation_preset or self.preset


def _shows_the_prompt(text: str) -> str:
    if not placeholders(text):
        raise ValueError("never shows the prompt; put {prompt} where it belongs")
    return text


class PlainTemplateConfig(Section):
    """Text with a placeholder for the prompt."""

    name: Literal["plain"] = "plain"
    text: Annotated[str, AfterValidator(_shows_the_prompt)] = "{prompt}"
    """Model input; {prompt} stands for the content of the prompt column."""


class ChatTemplateConfig(Section):
    name: Literal["chat"] = "chat"
    system: str | None = None
    """System message; null: none."""
    file: UserPath | None = None
    """Jinja file with the template; null: the tokenizer's template."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables of the template, such as `{enable_thinking: false}`."""


TemplateConfig = Annotated[PlainTemplateConfig | ChatTemplateConfig, Field(discriminator="name")]


LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.01, 2.0
"""Range of temperatures. vLLM raises lower ones to 0.01 and refuses higher ones."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=GREATEST_TEMPERATURE)] = 1.0
    """Sampling temperature; training log-probs use it too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k likeliest tokens; 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens whose probability is below this share of the likeliest token's; 0: off."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens, with the template. A longer one is an error; drop it by data.filter.prompt_tokens."""
    max_tokens: PositiveInt = 1024
    """Longest response in tokens; generation stops there (truncated)."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Shortest response in tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=32)
    """Texts that end a response and remain in it. A text completed within the first min_tokens tokens is ignored."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Token ids that end a response and remain in it, besides the model's end of sequence."""

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
    """Sampling of a domain's held-out prompts. A null field takes its value from validation.sampling."""

    temperature: _HeldOutTemperature | None = None
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample from the k likeliest tokens; 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens whose probability is below this share of the likeliest token's; 0: off."""
    max_tokens: PositiveInt | None = None
    """Longest response in tokens."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Shortest response in tokens."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=32)] | None = None
    """Texts that end a response and remain in it."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Token ids that end a response, besides the model's end of sequence."""


class ValidationSamplingConfig(HeldOutSamplingConfig):
    """Sampling of held-out prompts in all domains. A null field takes its value from the domain's `sampling`."""

    temperature: _HeldOutTemperature = 1.0
    """Sampling temperature; 0: greedy."""


class FormatConfig(Section):
    """Bonus or penalty for a response's format, whether or not its answer is right."""

    pattern: Annotated[str, AfterValidator(lambda pattern: compile_format(pattern).pattern)]
    """Regular expression searched in the response. `.` matches line breaks too; anchor with ^ and $ to match the whole response."""
    bonus: float = 0.1
    """Added to the score of matching responses."""
    penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of responses that do not match."""


class RewardTermConfig(Section):
    name: str
    """Reward type (docs/rewards.md) or dotted path, as for `reward.name`. `length`, `repetition` and `format` are meant for use as
    terms."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""
    weight: float = 1.0
    """Factor of this reward in the sum; negative: a penalty."""

    @rule
    def _weighs(self) -> Mistakes:
        if self.weight == 0:
            yield "weight", "the term is worth nothing; remove it, or give it a weight"


class RewardConfig(Section):
    """Scores samples by a built-in type or your function, plus further terms."""

    name: str
    """Built-in type (docs/rewards.md), or dotted path to your function `sample -> score`, sync or async; it may also take a list of
    samples."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""
    terms: list[RewardTermConfig] = Field(default_factory=list)
    """Further rewards, added to the score times their weights. Only the main reward (`name`) decides whether a sample is correct."""
    workers: PositiveInt = 1
    """Processes that score this domain's samples."""
    timeout_s: PositiveFloat = 30.0
    """Seconds to score a sample; then the attempt fails."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds to start a worker, which imports the function."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Retries of scoring before a sample counts as failed."""
    weight: PositiveFloat = 1.0
    """Factor of this domain's rewards, applied after algorithm.reward."""
    format: FormatConfig | None = None
    """Bonus for a response's format; null: none."""


ENVIRONMENT_REWARD = "environment"


class DomainConfig(Section):
    data: DataConfig
    """Source of prompts."""
    template: TemplateConfig = Field(default_factory=PlainTemplateConfig)
    """Template of the model's input."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling in training."""
    validation_sampling: HeldOutSamplingConfig = Field(default_factory=HeldOutSamplingConfig)
    """Sampling of held-out prompts. Null fields take their values from validation.sampling."""
    environment: EnvironmentConfig | None = Field(default=None, discriminator="name")
    """Environment of episodes with several turns; null: one response per prompt."""
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig(name=ENVIRONMENT_REWARD))
    """Scoring of responses. May be left out if the environment gives the rewards."""
    share: PositiveFloat = 1.0
    """Share of this domain in a batch's prompts, relative to the other domains; shares need not sum to 1."""
    min_prompts: Annotated[int, Field(ge=0)] = 0
    """Minimum prompts of this domain in a batch, even beyond its share; other domains then get fewer."""
    samples_per_prompt: PositiveInt | None = None
    """Responses per prompt (group size); null: rollout.samples_per_prompt."""

    @rule
    def _scored(self) -> Mistakes:
        if self.reward.name == ENVIRONMENT_REWARD and (self.environment is None or isinstance(self.environment, ToolsEnvironmentConfig)):
            why = "tools give no rewards" if self.environment is not None else "without `environment` nothing else scores the responses"
            yield "reward", f"is needed, since {why}: choose a type in docs/rewards.md"

    @rule
    def _calls(self) -> Mistakes:
        if isinstance(self.environment, ToolsEnvironmentConfig) and isinstance(self.template, PlainTemplateConfig):
            yield "template.name", "tools are described to the model by a chat template; use name: chat"


def rewards_turns(domain: DomainConfig) -> bool:
    """True if each response of an episode gets its own reward."""
    return domain.environment is not None and domain.environment.rewards == "per_turn"


# ---------------------------------------------------------------- rollouts


GROUP_MEASURES: dict[str, tuple[float | None, float | None]] = {"accuracy": (0.0, 1.0), "mean": (None, None), "std": (0.0, None)}
"""Built-in measures of a group -> default bounds (above, below) between which groups train. None: no bound."""


class GroupFilterConfig(Section):
    """Dynamic sampling (DAPO): groups without a learning signal are dropped, and other prompts are generated until the batch is full."""

    name: str = "accuracy"
    """Measure of a group: accuracy (share of correct samples), or mean or std of its scores. Or dotted path to your function `SampleGroup
    -> bool`: True if the group trains."""
    above: float | None = None
    """Train only groups whose measure is above this. null: 0 for accuracy and std, no bound for mean."""
    below: float | None = None
    """Train only groups whose measure is below this. null: 1 for accuracy, no bound for mean and std."""
    tries: PositiveInt = 10
    """Maximum prompts that a domain tries for a batch, as a multiple of the groups that it has in the batch."""
    when_short: Literal["fail", "continue"] = "fail"
    """Action when `tries` is reached. fail: end the run. continue: train on the groups that passed."""

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
        """Bounds (above, below) of the measure, with defaults in place of null."""
        above, below = GROUP_MEASURES[self.name]
        return above if self.above is None else self.above, below if self.below is None else self.below


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 32
    """Prompts (groups) per batch, over all domains."""
    samples_per_prompt: PositiveInt = 8
    """Responses per prompt (group size)."""
    request_timeout_s: PositiveFloat = 600.0
    """Time limit in seconds for generating a response. Time in the engine's queue and during weight updates does not count."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Retries of a failed generation before its sample counts as failed."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum restarts of the rollout service within an hour, after its process died or hung; then the run ends. Unfinished prompts start
    again; if updates were under way, the run goes back to the newest checkpoint."""
    supply: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: generation and training alternate. one_step_off: the next batch is generated while one is trained. async: engines generate all
    the time, at most max_staleness steps ahead."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Maximum steps between the weights that generate a sample and the weights that it trains. null: 0 for sync, else 1. Training waits for
    samples that would otherwise be too old for the next batch. Samples beyond the limit are dropped, and their prompts generated again."""
    on_sync: Literal["drain", "pause", "abort"] | None = None
    """What happens to running responses at a weight update. drain: the update waits until they end. pause: they continue in their engine,
    which recomputes the KV cache. abort: they are interrupted, and any engine continues them. null: abort if engines offload; otherwise
    drain for one_step_off, pause for sync and async."""
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Prompts started for a batch, as a multiple of its size. Above 1, slow or filtered groups delay the batch less. Only with `supply:
    sync`; one_step_off and async generate ahead anyway."""
    filter: GroupFilterConfig | None = None
    """Dynamic sampling; null: all groups train."""
    max_tokens_per_engine: PositiveInt | None = None
    """Maximum tokens in all requests of an engine: prompts, and responses at their expected length. An engine at the limit gets no further
    request. null: only max_running_requests counts."""
    stream_log_probs: bool = False
    """Compute log-probs and values of finished groups while others are still generated. The models that compute them must not share devices
    with engines."""
    dump: bool = False
    """Write every batch with tokens, log-probs and texts to the run's `dumps/` (docs/replay.md); `mode: rollout_only` always does."""
    keep_mask: bool = False
    """Record which tokens top-k, top-p and min-p allowed at each position, and normalise training log-probs over these tokens only, as the
    engine does."""
    on_mismatch: Literal["end", "pause"] = "end"
    """Action if engines' and trainer's log-probs differ too much (max_mismatch). end: end the run. pause: wait with everything loaded, and
    continue anyway once you delete the file paused.txt in the run's folder."""
    max_mismatch: PositiveFloat | Literal["auto"] | None = "auto"
    """Maximum mean difference, in nats, between engine's and trainer's log-probs of the same tokens. Checked in the first batch, and later
    in each engine's samples from the trainer's current weights. A larger difference means that engine and trainer hold different models; so
    does one several times that of earlier steps or of other engines. Both end or pause the run (on_mismatch). auto: 0.01 if both compute in
    float32, else 0.2; usual in bfloat16: 0.01 to 0.05. null: no check."""

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
