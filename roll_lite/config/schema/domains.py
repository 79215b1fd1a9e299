"""Sections: domains with their data, templates, sampling and rewards; rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.config.schema.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section, UserPath


class DataFilterConfig(Section):
    """Rows that are left out; how many is said at the start."""

    prompt_tokens: tuple[Annotated[int, Field(ge=0)], PositiveInt] | None = None
    """Keep prompts (template applied) whose length lies in this range, ends included; held-out ones, too."""
    difficulty: str | None = None
    """Name of a column with a number, such as the share of samples that a model has solved. Only `train` needs it."""
    difficulty_range: tuple[float, float] | None = None
    """Keep rows of `train` whose difficulty lies in this range, ends included; of held-out prompts all are kept."""


DataFiles = UserPath | Annotated[list[UserPath], Field(min_length=1)] | Annotated[dict[UserPath, PositiveFloat], Field(min_length=1)]


class DataConfig(Section):
    train: DataFiles
    """Prompts to train on: a .jsonl or .parquet file, or a folder with a data set saved by Hugging Face `datasets`. Or several: a list is
    one after the other; a mapping of paths to shares gives each its share of the domain's prompts, whatever its length."""
    validation: DataFiles | None = None
    """Held-out prompts; all of them, whatever the shares."""
    tag: str | None = None
    """Name of a column that says which domain a row belongs to, for files that several domains share."""
    tags: list[str] = Field(default_factory=list)
    """The tags of this domain's rows. A row whose tag belongs to no domain that reads its file is an error."""
    filter: DataFilterConfig = Field(default_factory=DataFilterConfig)
    """Which rows to leave out."""
    prompt: str = "prompt"
    """Name of the column with the prompt (a string, or a list of chat messages)."""
    answer: str | None = "answer"
    """Name of the column with the reference answer."""
    weight: str | None = None
    """Name of a column with the weight of a prompt's samples in the loss; 1 for all where absent."""
    epochs: PositiveInt | None = None
    """Passes over the prompts of `train`, shuffled anew in each. After them the other domains take this one's share; when none has
    prompts left, the run ends with an error. Absent: as many as the run needs."""
    report_by: str | None = None
    """Name of a column of the held-out prompts, such as level or subject, by whose values validation is reported too (50 at most)."""


class PlainTemplateConfig(Section):
    """A text with the prompt filled in."""

    name: Literal["plain"] = "plain"
    text: str = "{prompt}"
    """The text that the model sees; {prompt} stands for the prompt's column."""


class ChatTemplateConfig(Section):
    """A chat template."""

    name: Literal["chat"] = "chat"
    system: str | None = None
    """A system message."""
    file: UserPath | None = None
    """A file with the chat template (Jinja); the tokenizer's own where absent."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`."""


TemplateConfig = Annotated[PlainTemplateConfig | ChatTemplateConfig, Field(discriminator="name")]


LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.01, 2.0
"""vLLM samples at its least one below that, and refuses more."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=GREATEST_TEMPERATURE)] = 1.0
    """Sampling temperature; training log-probs of the domain's samples are taken at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k most likely tokens; 0 is off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are an error."""
    max_tokens: PositiveInt = 1024
    """Longest response."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Shortest response."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=32)
    """Texts that end a response, as part of it. One that is complete within the first min_tokens tokens does not."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Tokens that end a response, beside the model's own end of sequence; the response ends with the token."""


class HeldOutSamplingConfig(Section):
    """How a domain's held-out prompts are answered, where not as validation.sampling says."""

    temperature: Annotated[float, Field(ge=0, le=GREATEST_TEMPERATURE)] | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample from the k most likely tokens; 0 is off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    max_tokens: PositiveInt | None = None
    """Longest response."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Shortest response."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=32)] | None = None
    """Texts that end a response, as part of it."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Tokens that end a response, beside the model's own end of sequence."""


class ValidationSamplingConfig(HeldOutSamplingConfig):
    """How held-out prompts are answered, where their domain's validation_sampling does not say otherwise. What neither gives is as in the
    domain's training, but for the temperature."""

    temperature: Annotated[float, Field(ge=0, le=GREATEST_TEMPERATURE)] = 1.0
    """Sampling temperature; 0 is greedy."""


class FormatConfig(Section):
    """A bonus for responses of a certain format, whatever their answer."""

    pattern: str
    """Regular expression that has to match somewhere in the response (`.` matches line breaks; anchor with ^ and $ where needed)."""
    bonus: float = 0.1
    """Added to the score of responses that match."""
    penalty: NonNegativeFloat = 0.0
    """Taken off the score of responses that do not."""


class RewardTermConfig(Section):
    """A further term of a domain's reward."""

    name: str
    """As for the reward itself; `length`, `repetition` and `format` are made for this."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    weight: float = 1.0
    """Factor of its value; negative for a penalty."""


class RewardConfig(Section):
    """How a sample is scored: by a function of a known type, or by one of the user's own, and by further terms."""

    name: str
    """A known type (docs/rewards.md), or a dotted path to a function `sample -> score`, sync or async, for one sample or for a list."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    terms: list[RewardTermConfig] = Field(default_factory=list)
    """Added to its value, each times its weight. Whether a sample is correct is the reward's own say."""
    workers: PositiveInt = 1
    """Processes that score this domain's samples."""
    timeout_s: PositiveFloat = 30.0
    """Time after which scoring one sample counts as failed."""
    start_timeout_s: PositiveFloat = 120.0
    """Time for a worker to start: to import the function and whatever it needs."""
    retries: Annotated[int, Field(ge=0)] = 1
    """How often a failed scoring is tried again before the sample is reported as failed."""
    weight: PositiveFloat = 1.0
    """Factor of this domain's rewards, after everything that algorithm.reward does to them."""
    format: FormatConfig | None = None
    """Bonus for the format of a response."""


class DomainConfig(Section):
    data: DataConfig
    """Where the prompts come from."""
    template: TemplateConfig = Field(default_factory=PlainTemplateConfig)
    """How a prompt becomes the model's input."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """How responses are sampled in training."""
    validation_sampling: HeldOutSamplingConfig = Field(default_factory=HeldOutSamplingConfig)
    """How responses to its held-out prompts are sampled; what is not given is as in validation.sampling."""
    reward: RewardConfig
    """How responses are scored."""
    share: PositiveFloat = 1.0
    """Weight of the domain in the mix; shares need not add up to one."""
    min_prompts: Annotated[int, Field(ge=0)] = 0
    """Prompts of this domain in each batch at least, whatever its share; the others give up theirs."""
    samples_per_prompt: PositiveInt | None = None
    """Group size of this domain; rollout.samples_per_prompt where absent."""


# ---------------------------------------------------------------- rollouts


GROUP_MEASURES: dict[str, tuple[float | None, float | None]] = {"accuracy": (0.0, 1.0), "mean": (None, None), "std": (0.0, None)}
"""What a filter may look at, and between which values groups train where nothing else is said."""


class GroupFilterConfig(Section):
    """Dynamic sampling: groups that teach nothing are left out, and other prompts take their places until the batch is full."""

    name: str = "accuracy"
    """What of a group is looked at: accuracy (share of right samples), mean or std (of its scores); or a dotted path to a function
    `SampleGroup -> bool`, which says whether the group trains."""
    above: float | None = None
    """Groups train whose value is above this; 0 for accuracy and std where absent."""
    below: float | None = None
    """And below this; 1 for accuracy where absent."""
    tries: PositiveInt = 10
    """Prompts that may be tried for each place of a batch, on average over the batch of a domain."""
    when_short: Literal["fail", "continue"] = "fail"
    """When that was not enough: end the run, or train on the groups that there are."""

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Of a type that is not the user's own."""
        above, below = GROUP_MEASURES[self.name]
        return above if self.above is None else self.above, below if self.below is None else self.below


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 32
    """Prompts (sample groups) in one training batch, over all domains."""
    samples_per_prompt: PositiveInt = 8
    """Responses sampled for each prompt."""
    request_timeout_s: PositiveFloat = 600.0
    """Time for an engine to generate one response, from when it has begun with it: waiting in the engine does not count, nor does standing
    still there for new weights."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a failed generation is tried again before the sample is reported as failed."""
    supply: Literal["sync", "one_step_off", "async"] = "sync"
    """How generation and training take turns. sync: one after the other. one_step_off: the next batch is generated while one is trained.
    async: engines generate all the time, at most max_staleness steps ahead."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Steps by which the weights that generated a sample may be older than those that it trains; 0 for sync and 1 for the others where
    absent. What would become older is waited for; what is older all the same is put back and generated anew."""
    on_sync: Literal["drain", "pause", "abort"] | None = None
    """What becomes of running responses when new weights come. drain: they end first. pause: they continue in their engines, which
    recompute keys and values. abort: they are interrupted and continue on any engine. Absent: drain for one_step_off, else pause; abort
    where engines offload."""
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """So many times the prompts of a batch are under way at first, where some are filtered or slow. supply: sync only: the others generate
    ahead already."""
    filter: GroupFilterConfig | None = None
    """Which groups train (dynamic sampling); absent: all."""
    max_tokens_per_engine: PositiveInt | None = None
    """Tokens under way in one engine, of prompts and of responses as long as they are expected to become: one that has so many gets no
    further request. Absent: only max_running_requests counts."""
    stream_log_probs: bool = False
    """Compute log-probs and values of finished groups while the rest of their batch is generated. The models need devices of their own."""
    dump: bool = False
    """Write every batch with its tokens, log-probs and texts to the run's `dumps/` (docs/replay.md); `mode: rollout_only` always does."""
    keep_mask: bool = False
    """Bring along which tokens survived top-k, top-p and min-p, and take training log-probs over the same tokens."""
    max_mismatch: PositiveFloat | None = 0.2
    """Nats by which the log-probs of engines and trainer may differ on average over the tokens of the first batch; beyond, they hold
    different models and the run ends. In bfloat16 0.01 to 0.05 is usual. null: any difference."""
