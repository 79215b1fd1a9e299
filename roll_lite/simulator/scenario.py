from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roll_lite.config.arithmetic import derive, device_numbers, group_size
from roll_lite.config.schema.domains import DomainConfig, RolloutConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.simulator.engine import EngineLimits, EngineRates
from roll_lite.simulator.workload import Distribution, DomainModel, LogNormal, Quantiles

DAY_S = 86_400.0


@dataclass(frozen=True)
class TrainerModel:
    overhead_s: float = 0.0
    token_s: float = 0.0
    """Time per prompt or response token, for log-prob passes and updates."""
    sync_s: float = 0.0
    """Seconds per weight update, during which all engines pause."""
    log_probs: float = 0.0
    """Fraction of `token_s` spent on log-probs."""

    def seconds(self, tokens: int, early: int = 0) -> float:
        """Time of a training step. `early`: tokens whose log-probs were computed during generation."""
        return self.overhead_s + tokens * self.token_s - self.pass_seconds(early)

    def pass_seconds(self, tokens: int) -> float:
        return tokens * self.token_s * self.log_probs


@dataclass(frozen=True)
class Failures:
    given: tuple[tuple[float, int], ...] = ()
    """Planned engine deaths: (second, engine number)."""
    mean_s: float | None = None
    """Mean time between an engine's random deaths (exponential)."""
    mean_node_s: float | None = None
    engines_per_node: int = 1
    hangs: tuple[tuple[float, int], ...] = ()
    mean_hang_s: float | None = None
    hang_s: float = 7.0
    start_s: float | None = None
    """Time until a replacement engine serves; None: no replacement."""


@dataclass(frozen=True)
class Scenario:
    domains: tuple[DomainModel, ...]
    engines: int
    rates: EngineRates
    limits: EngineLimits
    rollout: RolloutConfig
    trainer: TrainerModel = TrainerModel()
    failures: Failures = Failures()
    joining: tuple[float, ...] = ()
    """Seconds at which engines join."""
    leaving: tuple[tuple[float, int], ...] = ()
    """Node drains: (time in seconds, node number). Requests continue on other engines; the last engine stays."""
    steps: int = 16
    seed: int = 1
    offload_s: float | None = None
    """Time to offload and load engines between batches; None: they stay loaded."""
    deterministic: bool = False

    @property
    def takes_turns(self) -> bool:
        """True if generation and training cannot overlap."""
        return self.offload_s is not None or self.deterministic

    @property
    def mean_slots(self) -> int:
        """Mean number of requests that fit an engine's slots and KV cache: half-done responses, long ones weighted more, as they run
        longer."""
        most = self.limits.cached_tokens
        if most is None:
            return self.limits.slots
        time = cached = 0.0
        for model in self.domains:
            for place in range(1000):
                tokens = min(model.max_tokens, model.lengths.draw((place + 0.5) / 1000))
                weight = model.share * model.samples_per_prompt * tokens
                time += weight
                cached += weight * (model.prompt_tokens + tokens / 2)
        return max(1, min(self.limits.slots, int(most / (cached / time))))

    def under(self, supply: Mapping[str, object]) -> Scenario:
        """Return the scenario with another supply of rollouts. `oversample` is kept only with `supply: sync`."""
        oversample = self.rollout.oversample if supply["supply"] == "sync" else 1.0
        other = {"max_staleness": None, "on_sync": None, "oversample": oversample, **supply}
        return replace(self, rollout=self.rollout.model_copy(update=other))

    @property
    def policy(self) -> str:
        rollout = self.rollout
        staleness = f" {rollout.max_staleness}" if rollout.max_staleness is not None and rollout.supply == "async" else ""
        on_sync = f", {rollout.on_sync}" if rollout.on_sync is not None and rollout.supply != "sync" else ""
        oversample = f", {rollout.oversample:g}x prompts" if rollout.oversample > 1 else ""
        return f"{rollout.supply}{staleness}{on_sync}{oversample}".replace("_", " ")


def scenario_of(config: RunConfig) -> Scenario:
    simulation = config.simulation
    engine = simulation.engine
    rates = EngineRates(
        pass_s=engine.pass_ms / 1e3,
        request_s=engine.request_us / 1e6,
        cached_token_s=engine.cached_token_ns / 1e9,
        prefill_token_s=1 / engine.prefill_tokens_per_s if engine.prefill_tokens_per_s else 0.0,
    )
    trainer = simulation.trainer
    arithmetic = derive(config)
    trained_on = len(device_numbers(config.actor_train.devices))
    strategy = config.actor_infer.strategy
    return Scenario(
        domains=tuple(_domain(config, name, domain) for name, domain in config.domains.items()),
        engines=arithmetic.engine_replicas,
        rates=rates,
        limits=EngineLimits(strategy.max_running_requests, engine.cached_tokens),
        rollout=config.rollout,
        trainer=TrainerModel(trainer.overhead_s, 1 / (trainer.tokens_per_device_s * trained_on), trainer.sync_s, trainer.log_probs),
        failures=Failures(
            mean_s=DAY_S / engine.failures_per_day if engine.failures_per_day else None,
            mean_node_s=DAY_S / engine.node_failures_per_day if engine.node_failures_per_day else None,
            engines_per_node=engine.engines_per_node,
            mean_hang_s=DAY_S / engine.hangs_per_day if engine.hangs_per_day else None,
            hang_s=engine.hang_s,
            start_s=engine.start_s,
        ),
        joining=tuple(engine.join_s),
        leaving=tuple((at, node) for node, at in enumerate(engine.leave_s)),
        steps=simulation.steps,
        seed=config.seed,
        offload_s=engine.offload_s if config.actor_infer.offload else None,
        deterministic=config.deterministic,
    )


def _domain(config: RunConfig, name: str, domain: DomainConfig) -> DomainModel:
    responses, environment = config.simulation.domains.get(name, config.simulation.responses), domain.environment
    lengths: Distribution
    if responses.quantiles is not None:
        lengths = Quantiles(responses.quantiles)
    else:
        median = responses.median or math.ceil(domain.sampling.max_tokens / 10)
        lengths = LogNormal(median, responses.p99 or 10 * median)
    return DomainModel(
        name=name,
        lengths=lengths,
        max_tokens=domain.sampling.max_tokens,
        prompt_tokens=min(responses.prompt_tokens, domain.sampling.max_prompt_tokens),
        samples_per_prompt=group_size(config, domain),
        share=domain.share,
        reward_s=LogNormal(responses.reward_s, responses.reward_p99_s or responses.reward_s) if responses.reward_s else None,
        turns=LogNormal(responses.turns, responses.turns_p99 or responses.turns) if environment is not None else None,
        max_turns=environment.max_turns if environment is not None else 1,
        environment_s=LogNormal(waits, responses.environment_p99_s or waits) if (waits := responses.environment_s) else None,
        environment_tokens=responses.environment_tokens,
        reward_most_s=domain.reward.timeout_s,
        reward_workers=responses.reward_workers,
        all_right=responses.all_right,
        all_wrong=responses.all_wrong,
        greedy_baseline=config.algorithm.advantage.name == "remax",
        prompts=responses.prompts,
        epochs=domain.data.epochs,
        least=domain.min_prompts,
    )
