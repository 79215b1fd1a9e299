"""Assumptions of `roll-lite simulate`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roll_lite.config.schema.base import Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, rule

Share = Annotated[float, Field(ge=0, le=1)]


class SimulatedEngineConfig(Section):
    """Speed of one engine replica. Defaults: a 7B model in bfloat16 on an H100 (80 GB)."""

    pass_ms: PositiveFloat = 7.0
    """Fixed time of a forward pass in ms, mainly to read the weights. A pass gives each running request one token."""
    request_us: NonNegativeFloat = 25.0
    """Time that each running request adds to a pass, in µs."""
    cached_token_ns: NonNegativeFloat = 17.0
    """Time that each token in the KV cache adds to a pass, in ns."""
    prefill_tokens_per_s: PositiveFloat | None = 40_000.0
    """Prompt tokens computed per second; decoding stops meanwhile. null: prompts take no time."""
    cached_tokens: PositiveInt | None = 800_000
    """KV cache size in tokens; requests beyond it wait. null: unlimited."""
    failures_per_day: NonNegativeFloat = 0.0
    """Mean crashes per engine and day."""
    node_failures_per_day: NonNegativeFloat = 0.0
    """Mean crashes per node and day. A crash ends all engines of the node."""
    engines_per_node: PositiveInt = 1
    """Engine replicas per node, for node_failures_per_day and leave_s."""
    join_s: list[NonNegativeFloat] = Field(default_factory=list)
    """Times at which a further engine joins (actor_infer.most_replicas), in seconds after the start."""
    leave_s: list[NonNegativeFloat] = Field(default_factory=list)
    """Times at which nodes are drained, in seconds after the start. The node of engine 0 is first. Other engines continue its requests."""
    hangs_per_day: NonNegativeFloat = 0.0
    """Mean hangs per engine and day. A hung engine generates nothing."""
    hang_s: PositiveFloat = 7.0
    """Seconds from a hang until the engine counts as lost: `limits.engine_silence` in real runs, if its processes are stopped. Its requests
    may fail earlier (`rollout.request_timeout_s`)."""
    offload_s: NonNegativeFloat = 3.0
    """Seconds per step to load and offload engines (`actor_infer.offload`)."""
    start_s: PositiveFloat | None = 180.0
    """Seconds to replace a dead engine; null: never."""


class SimulatedTrainerConfig(Section):
    """Speed of the trainer. Defaults: a 7B model on H100s, log-probs and one epoch of updates."""

    overhead_s: NonNegativeFloat = 5.0
    """Fixed time per step in seconds."""
    tokens_per_device_s: PositiveFloat = 6_000.0
    """Prompt and response tokens per second and device of actor_train, for log-probs and training together."""
    log_probs: Share = 0.25
    """Share of the trainer's time per token for log-probs and values. `rollout.stream_log_probs` computes them before the batch is
    complete."""
    sync_s: NonNegativeFloat = 3.0
    """Seconds of a weight update; engines pause meanwhile."""


class SimulatedResponsesConfig(Section):
    """Prompts, responses and rewards of a domain."""

    prompts: PositiveInt = 10_000
    """Prompts in the data set."""
    prompt_tokens: PositiveInt = 256
    """Tokens per prompt, at most max_prompt_tokens."""
    median: PositiveFloat | None = None
    """Median response length in tokens, at most max_tokens; null: a tenth of max_tokens."""
    p99: PositiveFloat | None = None
    """99th percentile of response lengths (log-normal); null: ten times the median."""
    quantiles: list[PositiveFloat] | None = Field(default=None, min_length=2)
    """Response lengths at evenly spaced quantiles, in ascending order, instead of median and p99. `--from` measures them."""
    reward_s: NonNegativeFloat = 0.0
    """Median seconds to score a response."""
    reward_p99_s: PositiveFloat | None = None
    """99th percentile of scoring times; null: all take the median."""
    reward_workers: PositiveInt | None = None
    """Samples scored at a time. With `rollout.supply: async`, no batch starts while a whole batch waits for scores. null: unlimited; use it
    with times from `--from`, which include waiting."""
    turns: Annotated[float, Field(ge=1)] = 1.0
    """Median responses per episode, at most environment.max_turns; only in domains with an environment. Response lengths are per
    response."""
    turns_p99: Annotated[float, Field(ge=1)] | None = None
    """99th percentile of responses per episode; null: all have the median."""
    environment_s: NonNegativeFloat = 0.0
    """Median seconds until the environment answers a response."""
    environment_p99_s: PositiveFloat | None = None
    """99th percentile of answer times; null: all take the median."""
    environment_tokens: PositiveInt = 32
    """Tokens that the environment adds after a response."""
    all_right: Share = 0.1
    """Share of prompts that are always solved."""
    all_wrong: Share = 0.1
    """Share of prompts that are never solved. Success rates of all other prompts are spread evenly from 0 to 1."""

    @rule
    def _lengths(self) -> Mistakes:
        if self.median is not None and self.p99 is not None and self.p99 < self.median:
            yield "p99", f"is less than the median, {self.median:g}"
        if self.turns_p99 is not None and self.turns_p99 < self.turns:
            yield "turns_p99", f"is less than turns, {self.turns:g}"
        if self.environment_p99_s is not None and not 0 < self.environment_s <= self.environment_p99_s:
            yield "environment_p99_s", f"is no 99th percentile above environment_s, {self.environment_s:g}"
        if self.quantiles is not None and self.quantiles != sorted(self.quantiles):
            yield "quantiles", "go from the shortest to the longest"
        for key in ("median", "p99"):
            if self.quantiles is not None and getattr(self, key) is not None:
                yield key, "the quantiles say how long responses are"

    @rule
    def _scoring_times(self) -> Mistakes:
        if self.reward_p99_s is not None and self.reward_p99_s < self.reward_s:
            yield "reward_p99_s", f"is less than the median, {self.reward_s:g}"
        if self.reward_p99_s is not None and self.reward_s == 0:
            yield "reward_s", "a median of 0 leaves no room for longer times; use a positive one"

    @rule
    def _solved(self) -> Mistakes:
        if self.all_right + self.all_wrong > 1:
            yield "all_wrong", f"with all_right {self.all_right:g} that is more than all prompts"


class SimulationConfig(Section):
    """Settings of `roll-lite simulate`; `--from RUN_FOLDER` measures most of them."""

    steps: Annotated[PositiveInt, Field(ge=2)] = 16
    """Training steps to simulate."""
    engine: SimulatedEngineConfig = Field(default_factory=SimulatedEngineConfig)
    """Speed of engines."""
    trainer: SimulatedTrainerConfig = Field(default_factory=SimulatedTrainerConfig)
    """Speed of the trainer and of weight updates."""
    responses: SimulatedResponsesConfig = Field(default_factory=SimulatedResponsesConfig)
    """Responses of domains not listed in `domains`."""
    domains: dict[str, SimulatedResponsesConfig] = Field(default_factory=dict)
    """Responses by domain."""
