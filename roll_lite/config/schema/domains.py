from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.presets import validation_preset
from roll_lite.config.problems import did_you_mean
from roll_lite.config.schema.base import (
    ASCENDING,
    DataPath,
    Mistakes,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    UserPath,
    ZeroToOne,
    rule,
)
from roll_lite.config.schema.environments import EnvironmentConfig, ToolsEnvironmentConfig
from roll_lite.config.text_templates import compile_format, placeholders
from roll_lite.config.user_function import check_function


class DataFilterConfig(Section):
    """Row selection."""

    prompt_tokens: Annotated[tuple[NonNegativeInt, PositiveInt], ASCENDING] | None = None
    """Keep prompts, also held-out ones, with a token count (template included) in this inclusive range."""
    difficulty: str | None = None
    """Data column with the difficulty that difficulty_range limits, such as a model's share of correct samples."""
    difficulty_range: Annotated[tuple[float, float], ASCENDING] | None = None
    """Keep only training prompts with a difficulty in this inclusive range. Held-out prompts are not filtered."""

    @rule
    def _column(self) -> Mistakes:
        if self.difficulty_range is not None and self.difficulty is None:
            yield "difficulty_range", "of which column? Name it with `difficulty`"


DataFiles = DataPath | NonEmpty[DataPath] | Annotated[dict[DataPath, PositiveFloat], Field(min_length=1)]


def _has_held_out_prompts(name: str) -> str:
    validation_preset(name)
    return name


class DataConfig(Section):
    preset: str | None = None
    """Public data set to train on (`roll-lite data list`, docs/data.md). Its settings are the domain's defaults. Your own `train` files
    need the preset's columns."""
    validation_preset: Annotated[str, AfterValidator(_has_held_out_prompts)] | None = None
    """Preset for the held-out prompts; null: the one in `preset`."""
    train: DataFiles | None = None
    """Training prompts; `mode: evaluate` needs none. A .jsonl, .parquet, .csv or .json file, a folder of Hugging Face `datasets`, or
    hf://owner/name/configuration?split=train (docs/data.md); or a list of these, read in order; or a mapping from each to its share of the
    prompts."""
    validation: DataFiles | None = None
    """Held-out prompts, in the same forms as `train`. All are used; shares in a mapping have no effect."""
    tag: str | None = None
    """Column that says which domain a row belongs to, if several domains read the same files. Each domain lists its values in `tags`."""
    tags: list[str] = []
    """Values of column `tag` in this domain's rows. A row with a value that no domain lists is an error."""
    filter: DataFilterConfig = DataFilterConfig()
    """Selection of rows."""
    prompt: str = "prompt"
    """Column with the prompt (string or chat messages)."""
    answer: str | None = "answer"
    """Column with the reference answer; null: none."""
    weight: str | None = None
    """Column with the loss weight of a prompt's samples."""
    epochs: PositiveInt | None = None
    """Maximum passes over each file of `train`, each in a new order; then the domain's other files, or else other domains, take its share;
    at last the run ends. null: unlimited."""
    report_by: str | list[str] | None = None
    """Column or columns of held-out prompts; validation is also reported for each value in them (at most 50 per column). null: the columns
    `level` and `subject`, if all prompts have them as texts or numbers; []: none."""

    @property
    def reported(self) -> list[str]:
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
    """Model input; {prompt} is replaced by the prompt column."""


class ChatTemplateConfig(Section):
    name: Literal["chat"] = "chat"
    system: str | None = None
    """System message; null: none."""
    file: UserPath | None = None
    """Jinja file with the template; null: the tokenizer's template."""
    arguments: dict[str, Any] = {}
    """Variables of the template, such as `{enable_thinking: false}`."""


TemplateConfig = PlainTemplateConfig | ChatTemplateConfig


# Range of vLLM, which raises lower temperatures to 0.01 and refuses higher ones.
LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.01, 2.0
StopTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=32)]


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=GREATEST_TEMPERATURE)] = 1.0
    """Sampling temperature, also used for training log-probs."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling; 1: off."""
    top_k: NonNegativeInt = 0
    """Sample from the k likeliest tokens; 0: off."""
    min_p: ZeroToOne = 0.0
    """Minimum probability relative to the likeliest token's; 0: off."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens, template included; longer ones are an error, unless data.filter.prompt_tokens drops them."""
    max_tokens: PositiveInt = 1024
    """Longest response in tokens; longer ones are truncated."""
    min_tokens: NonNegativeInt = 0
    """Shortest response in tokens."""
    stop: StopTexts = []
    """Texts that end a response and stay in it; ignored within the first min_tokens tokens."""
    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a response and stay in it, besides the end of sequence."""

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
    """Sampling of a domain's held-out prompts; null fields use validation.sampling."""

    temperature: _HeldOutTemperature | None = None
    """Sampling temperature; 0: greedy."""
    top_p: PositiveShare | None = None
    """Nucleus sampling; 1: off."""
    top_k: NonNegativeInt | None = None
    """Sample from the k likeliest tokens; 0: off."""
    min_p: ZeroToOne | None = None
    """Minimum probability relative to the likeliest token's; 0: off."""
    max_tokens: PositiveInt | None = None
    """Longest response in tokens."""
    min_tokens: NonNegativeInt | None = None
    """Shortest response in tokens."""
    stop: StopTexts | None = None
    """Texts that end a response and stay in it."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Token ids that end a response, besides the end of sequence."""


class ValidationSamplingConfig(HeldOutSamplingConfig):
    """Sampling of held-out prompts in all domains; null fields use the domain's `sampling`."""

    temperature: _HeldOutTemperature = 1.0
    """Sampling temperature; 0: greedy."""


Pattern = Annotated[str, AfterValidator(lambda pattern: compile_format(pattern).pattern)]


class FormatConfig(Section):
    """Bonus or penalty for a response's format, independent of its correctness."""

    pattern: Pattern
    """Regular expression searched in the response; `.` matches line breaks."""
    bonus: float = 0.1
    """Bonus for matching responses."""
    penalty: NonNegativeFloat = 0.0
    """Penalty for responses that do not match."""


class RewardTermConfig(Section):
    name: str
    """Reward type (docs/rewards.md) or dotted path."""
    args: dict[str, Any] = {}
    """Keyword arguments."""
    weight: float = 1.0
    """Factor of this reward; negative: a penalty; 0: only logged."""


class RewardConfig(Section):
    """Scoring by a built-in type or your function."""

    name: str
    """Built-in type (docs/rewards.md), or dotted path to your sync or async function `sample -> score`, which may also take a list of
    samples."""
    args: dict[str, Any] = {}
    """Keyword arguments."""
    terms: list[RewardTermConfig] = []
    """Further rewards, added with weights. Only the main reward decides whether a sample is correct."""
    workers: PositiveInt = 1
    """Processes that score this domain's samples."""
    timeout_s: PositiveFloat = 30.0
    """Seconds for one attempt to score a sample."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds for a worker to start and import the function."""
    retries: NonNegativeInt = 1
    """Scoring retries before a sample counts as failed."""
    weight: PositiveFloat = 1.0
    """Factor of this domain's rewards, applied after algorithm.reward."""
    format: FormatConfig | None = None
    """Bonus for a response's format; null: none."""


ENVIRONMENT_REWARD = "environment"
TOOLS_NEED_CHAT = "tools are described to the model by a chat template; use name: chat"


class DomainConfig(Section):
    data: DataConfig
    """Source of prompts."""
    template: TemplateConfig = PlainTemplateConfig()
    """Template of the model's input."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling in training."""
    validation_sampling: HeldOutSamplingConfig = HeldOutSamplingConfig()
    """Sampling of held-out prompts."""
    environment: EnvironmentConfig | None = None
    """Environment of multi-turn episodes; null: one response per prompt."""
    reward: RewardConfig = RewardConfig(name=ENVIRONMENT_REWARD)
    """Scoring of responses; optional if the environment gives rewards."""
    share: PositiveFloat = 1.0
    """Relative share of a batch's prompts; shares need not sum to 1."""
    min_prompts: NonNegativeInt = 0
    """Minimum prompts in a batch, even beyond the share."""
    samples_per_prompt: PositiveInt | None = None
    """Responses per prompt (group size); null: rollout.samples_per_prompt."""

    @rule
    def _scored(self) -> Mistakes:
        if self.reward.name == ENVIRONMENT_REWARD and (self.environment is None or isinstance(self.environment, ToolsEnvironmentConfig)):
            why = "tools give no rewards" if self.environment is not None else "without `environment` nothing else scores the responses"
            yield "reward", f"is needed, since {why}: choose a type (roll-lite docs rewards)"

    @rule
    def _calls(self) -> Mistakes:
        if isinstance(self.environment, ToolsEnvironmentConfig) and isinstance(self.template, PlainTemplateConfig):
            yield "template.name", TOOLS_NEED_CHAT


def rewards_turns(domain: DomainConfig) -> bool:
    """True if each response of an episode gets its own reward."""
    return domain.environment is not None and domain.environment.rewards == "per_turn"


# ---------------------------------------------------------------- rollouts


GROUP_MEASURES: dict[str, tuple[float | None, float | None]] = {"accuracy": (0.0, 1.0), "mean": (None, None), "std": (0.0, None)}
"""{measure of a group's scores: default bounds (above, below)}. A group trains only if above < measure < below. None: no bound."""


class GroupFilterConfig(Section):
    """Dynamic sampling (DAPO): replace groups without a learning signal by groups of other prompts until the batch is full."""

    name: str = "accuracy"
    """Group measure: accuracy (share of correct samples), mean or std of scores; or dotted path to your function `SampleGroup -> bool`,
    True to train."""
    above: float | None = None
    """Train only groups with a larger measure. null: 0 for accuracy and std, no limit for mean."""
    below: float | None = None
    """Train only groups with a smaller measure. null: 1 for accuracy, no limit for mean and std."""
    tries: PositiveInt = 10
    """Maximum prompts tried for a batch, as a multiple of the domain's groups in it."""
    when_short: Literal["fail", "continue"] = "fail"
    """Action if `tries` are used up before the batch is full. fail: end the run. continue: train on the groups that passed."""

    @rule
    def _known(self) -> Mistakes:
        if self.name in GROUP_MEASURES:
            above, below = self.bounds
            if above is not None and below is not None and above >= below:
                yield "above", f"no group is above it and below {below:g}"
            if above is None and below is None:
                yield "", "has no range, every group trains; set above or below, or remove it"
            return
        if "." in self.name:
            yield from check_function("name", self.name, {}, inputs=("the sample group",))
        else:
            known = did_you_mean(self.name, GROUP_MEASURES)
            yield "name", f"no such filter; {known}, or a dotted path to a function of your own"
        for key in ("above", "below"):
            if getattr(self, key) is not None:
                yield key, f"belongs to {', '.join(GROUP_MEASURES)}: {self.name!r} decides by itself"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        above, below = GROUP_MEASURES[self.name]
        return above if self.above is None else self.above, below if self.below is None else self.below


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 32
    """Prompts (groups) per batch, over all domains."""
    samples_per_prompt: PositiveInt = 8
    """Responses per prompt (group size)."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds to generate a response, without queueing and weight updates."""
    retries: NonNegativeInt = 2
    """Generation retries before a sample counts as failed."""
    restarts: NonNegativeInt = 3
    """Maximum restarts per hour of the rollout service after it died or hung; then the run ends. After a restart, unfinished prompts start
    again."""
    supply: Literal["sync", "one_step_off", "async"] = "sync"
    """Overlap of generation and training. sync: none. one_step_off: the next batch is generated while one trains. async: engines always
    generate, up to max_staleness steps ahead."""
    max_staleness: NonNegativeInt | None = None
    """Maximum steps between the weights that generate a sample and the weights that it trains. Older samples are dropped and generated
    again. null: 0 for sync, else 1."""
    on_sync: Literal["drain", "pause", "abort"] | None = None
    """Treatment of running responses at a weight update. drain: wait for them. pause: they stay in their engine, which recomputes the KV
    cache. abort: any engine continues them. null: abort if engines offload, else drain for one_step_off, pause for sync and async."""
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Prompts started for a batch, as a multiple of its prompts, so that slow or filtered groups delay it less. Only with `supply:
    sync`."""
    filter: GroupFilterConfig | None = None
    """Dynamic sampling; null: all groups train."""
    max_tokens_per_engine: PositiveInt | None = None
    """Limit on an engine's tokens: prompts plus expected responses of all its requests. null: only max_running_requests limits it."""
    stream_log_probs: bool = False
    """Compute log-probs and values of finished groups during generation. Needs training roles and engines on separate devices."""
    dump: bool = False
    """Write every batch (tokens, log-probs, texts) to the run's `dumps/` (docs/replay.md)."""
    keep_mask: bool = False
    """Record which tokens top-k, top-p and min-p allowed, and normalise training log-probs over them."""
    on_mismatch: Literal["end", "pause"] = "end"
    """Action if engine and trainer log-probs differ too much (max_mismatch). end: end the run. pause: wait until you delete the run's
    paused.txt."""
    max_mismatch: PositiveFloat | Literal["auto"] | None = "auto"
    """Maximum mean difference, in nats, between engine and trainer log-probs of the same tokens. More, or a jump, means that their
    models differ. auto: 0.01 if both compute in float32, else 0.2 (usual in bfloat16: 0.01 to 0.05). null: no check."""

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
