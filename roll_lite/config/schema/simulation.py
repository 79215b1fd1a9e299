from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roll_lite.config.schema.base import Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, ZeroToOne, rule


class SimulatedEngineConfig(Section):
    """Speed of an engine replica. Defaults: 7B model, bfloat16, H100 (80 GB)."""

    pass_ms: PositiveFloat = 7.0
    """Fixed ms of a forward pass, which gives each running request one token."""
    request_us: NonNegativeFloat = 25.0
    """µs that each running request adds to a pass."""
    cached_token_ns: NonNegativeFloat = 17.0
    """ns that each token in the KV cache adds to a pass."""
    prefill_tokens_per_s: PositiveFloat | None = 40_000.0
    """Prompt tokens computed per second, while decoding stops. null: unlimited."""
    cached_tokens: PositiveInt | None = 800_000
    """KV cache size in tokens; further requests wait. null: unlimited."""
    failures_per_day: NonNegativeFloat = 0.0
    """Mean crashes per engine and day."""
    node_failures_per_day: NonNegativeFloat = 0.0
    """Mean crashes per node and day; all its engines are lost."""
    engines_per_node: PositiveInt = 1
    """Engines on each node, which are lost together (`node_failures_per_day`) or drained together (`leave_s`)."""
    join_s: list[NonNegativeFloat] = []
    """Seconds after the start at which further engines join, `engines_per_node` of them on each further node."""
    leave_s: list[NonNegativeFloat] = []
    """Seconds after the start at which nodes are drained, one number per node, beginning with the node of engine 0."""
    hangs_per_day: NonNegativeFloat = 0.0
    """Mean hangs per engine and day."""
    hang_s: PositiveFloat = 7.0
    """Seconds from a hang until the engine counts as lost (`limits.engine_silence` in real runs)."""
    offload_s: NonNegativeFloat = 3.0
    """Seconds per step to load and offload engines."""
    start_s: PositiveFloat | None = 180.0
    """Seconds to replace a dead engine; null: never."""


class SimulatedTrainerConfig(Section):
    """Speed of the trainer. Defaults: 7B model on H100s, one pass for log-probs, one epoch."""

    overhead_s: NonNegativeFloat = 5.0
    """Fixed seconds per step."""
    tokens_per_device_s: PositiveFloat = 6_000.0
    """Prompt and response tokens per second and device, for log-probs and training together."""
    log_probs: ZeroToOne = 0.25
    """Share of the trainer's time for log-probs and values, which `rollout.stream_log_probs` overlaps with generation."""
    sync_s: NonNegativeFloat = 3.0
    """Seconds of a weight update; engines pause meanwhile."""


class SimulatedResponsesConfig(Section):
    prompts: PositiveInt = 10_000
    """Prompts in the data set."""
    prompt_tokens: PositiveInt = 256
    """Tokens per prompt."""
    median: PositiveFloat | None = None
    """Median response length in tokens; null: max_tokens / 10."""
    p99: PositiveFloat | None = None
    """99th percentile of response lengths (log-normal); null: 10 * median."""
    quantiles: list[PositiveFloat] | None = Field(default=None, min_length=2)
    """Response lengths at evenly spaced quantiles, ascending, instead of median and p99."""
    reward_s: NonNegativeFloat = 0.0
    """Median seconds to score a response."""
    reward_p99_s: PositiveFloat | None = None
    """99th percentile of scoring times; null: all take the median."""
    reward_workers: PositiveInt | None = None
    """Samples scored at once; null: unlimited. Keep null with `--from`: scoring times of a recorded run already include waiting."""
    turns: Annotated[float, Field(ge=1)] = 1.0
    """Median responses per episode. Response lengths are per response."""
    turns_p99: Annotated[float, Field(ge=1)] | None = None
    """99th percentile of `turns`; null: all have the median."""
    environment_s: NonNegativeFloat = 0.0
    """Median seconds of the environment's answer to a response."""
    environment_p99_s: PositiveFloat | None = None
    """99th percentile of answer times; null: all take the median."""
    environment_tokens: PositiveInt = 32
    """Tokens that the environment adds after a response."""
    all_right: ZeroToOne = 0.1
    """Share of prompts that are always solved."""
    all_wrong: ZeroToOne = 0.1
    """Share of prompts that are never solved. Success rates of the remaining prompts are spread evenly from 0 to 1."""

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
    engine: SimulatedEngineConfig = SimulatedEngineConfig()
    """Speed of engines."""
    trainer: SimulatedTrainerConfig = SimulatedTrainerConfig()
    """Speed of the trainer and of weight updates."""
    responses: SimulatedResponsesConfig = SimulatedResponsesConfig()
    """Responses of domains not listed in `domains`."""
    domains: dict[str, SimulatedResponsesConfig] = {}
    """Responses by domain."""
