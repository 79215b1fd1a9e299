"""What `roll-lite simulate` assumes of engines, trainer and responses. A run reads nothing of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roll_lite.config.schema.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section

Share = Annotated[float, Field(ge=0, le=1)]


class SimulatedEngineConfig(Section):
    """Of one engine, on all devices of its replica together. The defaults are those of a 7B model in bfloat16 on an H100 with 80 GB."""

    pass_ms: PositiveFloat = 7.0
    """One pass of the model, which gives a token to each running request, however few they are: the weights are read."""
    request_us: NonNegativeFloat = 25.0
    """More for each request that runs."""
    cached_token_ns: NonNegativeFloat = 17.0
    """More for each token in the key/value cache, which is read in every pass."""
    prefill_tokens_per_s: PositiveFloat | None = 40_000.0
    """Tokens of prompts; nothing is decoded meanwhile. null: no time."""
    cached_tokens: PositiveInt | None = 800_000
    """Tokens that the key/value cache holds; requests that do not fit wait. null: as many as come."""
    failures_per_day: NonNegativeFloat = 0.0
    """How often an engine dies, on average."""
    hangs_per_day: NonNegativeFloat = 0.0
    """How often one stands still, on average: it generates nothing and answers nothing, until it is given up."""
    hang_s: PositiveFloat = 7.0
    """Until then. Where its processes stand still that is `limits.engine_silence`; requests may run out of `rollout.request_timeout_s`
    before."""
    offload_s: NonNegativeFloat = 3.0
    """What a step takes to load the engines and to offload them again, where `actor_infer.offload` is true."""
    start_s: PositiveFloat | None = 180.0
    """Until another engine has started in the place of a dead one. null: none starts."""


class SimulatedTrainerConfig(Section):
    """The defaults are those of a 7B model on H100s: log-probs and one epoch of updates."""

    overhead_s: NonNegativeFloat = 5.0
    """Of a step, whatever its size."""
    tokens_per_device_s: PositiveFloat = 6_000.0
    """Tokens of prompts and responses that a device of actor_train takes through log-probs and training in a second."""
    log_probs: Share = 0.25
    """Of that time, the part of the passes for log-probs and values, which `rollout.stream_log_probs` begins before a batch is complete."""
    sync_s: NonNegativeFloat = 3.0
    """New weights to all engines, which stand still meanwhile."""


class SimulatedResponsesConfig(Section):
    """What a domain's prompts, responses and rewards are like."""

    prompts: PositiveInt = 10_000
    """In its data, which is what `data.epochs` counts in."""
    prompt_tokens: PositiveInt = 256
    """Of every prompt, at most the domain's max_prompt_tokens."""
    median: PositiveFloat | None = None
    """Tokens of a response, at most the domain's max_tokens; a tenth of them where absent."""
    p99: PositiveFloat | None = None
    """99% of the responses are shorter (log-normal); ten times the median where absent."""
    quantiles: list[PositiveFloat] | None = Field(default=None, min_length=2)
    """In place of both: lengths at evenly spaced shares, from the shortest response to the longest, as `--from` writes them."""
    reward_s: NonNegativeFloat = 0.0
    """Seconds to score a response, median."""
    reward_p99_s: PositiveFloat | None = None
    """99% are scored in less; all take the same where absent."""
    reward_workers: PositiveInt | None = None
    """So many of the domain's samples are scored at a time, and the rest waits; with `rollout.supply: async` nothing is started for later
    batches while as many wait as a batch holds. null: all, as for times that `--from` has measured: what samples waited is in them."""
    all_right: Share = 0.1
    """Share of prompts that are always solved."""
    all_wrong: Share = 0.1
    """Share of prompts that are never solved. The chances of the others are spread evenly."""


class SimulationConfig(Section):
    """Read by `roll-lite simulate` only; `--from RUN_FOLDER` measures most of it in a run."""

    steps: Annotated[PositiveInt, Field(ge=2)] = 16
    """Training steps that are simulated."""
    engine: SimulatedEngineConfig = Field(default_factory=SimulatedEngineConfig)
    """The engines."""
    trainer: SimulatedTrainerConfig = Field(default_factory=SimulatedTrainerConfig)
    """The trainer, and weight updates."""
    responses: SimulatedResponsesConfig = Field(default_factory=SimulatedResponsesConfig)
    """Of the domains that have no entry of their own."""
    domains: dict[str, SimulatedResponsesConfig] = Field(default_factory=dict)
    """By domain."""
