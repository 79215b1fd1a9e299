"""Estimate phase times by roofline (arithmetic, memory and network speed), and step times for each `rollout.supply` with the simulator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from roll_lite.config.arithmetic import (
    actor_gives_log_probs,
    adapters_of_engines,
    derive,
    device_numbers,
    engine_offload,
    held_out_sampling,
    model_parallel_size,
    roles,
    training_passes,
    trains,
)
from roll_lite.config.device_phases import PHASES, kind
from roll_lite.config.placement_picture import phases_of_step, works
from roll_lite.config.schema.models import ForwardRoleConfig, InferRoleConfig, RewardModelConfig, TrainRoleConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.planning.architecture import Architecture, of_scorer
from roll_lite.planning.memory import GIB, engine_memory, number_bytes, optimizer_bytes, scorer_memory
from roll_lite.simulator.engine import EngineLimits, EngineRates
from roll_lite.simulator.scenario import Scenario, TrainerModel, scenario_of
from roll_lite.simulator.simulation import SimulatedRun, simulate
from roll_lite.workers.phases import PEAK_TFLOPS


@dataclass(frozen=True)
class Device:
    memory_gib: float
    tflops: float
    """Peak for dense bfloat16 matrix products."""
    memory_gb_s: float
    link_gb_s: float
    """Bandwidth to other devices of the node, one way."""
    network_gb_s: float
    """Bandwidth of one device to other nodes; each device has a network adapter."""
    host_gb_s: float
    """Bandwidth to host memory, one way."""

    @property
    def bytes(self) -> float:
        return self.memory_gib * GIB


_TABLE = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
DEVICES = {name: Device(tflops=PEAK_TFLOPS[name], **one) for name, one in _TABLE.items()}
TRAINING, FORWARD, READING, MOVING = 0.45, 0.5, 0.65, 0.7
"""Fractions of the peak speed reached in practice: training; forward passes, prefill; reading device memory; links, network, host."""
LAYER_S = 12e-6
"""Seconds per layer of an engine's forward pass, besides reading weights. Doubled with tensor parallelism."""
STEPS = 8


@dataclass(frozen=True)
class PhaseTime:
    flops: float
    moved_bytes: float
    """Bytes that a device sends over links and network, or exchanges with host memory."""
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class StepTime:
    phases: Mapping[str, PhaseTime]
    scenario: Scenario
    engine_share: float
    """Fraction of the devices that engines need so that engines and trainers take equally long."""

    @property
    def estimate_s(self) -> float:
        """Seconds of a step, estimated without simulation. Training that waits for a whole batch also waits for one response of maximum
        length."""
        generate = self.phases["generate"].seconds
        others = sum(one.seconds for one in self.phases.values()) - generate
        ahead = self.scenario.rollout.supply != "sync" and not self.scenario.takes_turns
        return max(generate, others) if ahead else generate + self.longest_s + others

    @property
    def longest_s(self) -> float:
        return max(one.max_tokens for one in self.scenario.domains) * self.scenario.rates.pass_s


def step_time(config: RunConfig, model: Architecture, device: Device, cached_tokens: int) -> StepTime:
    """Estimate a step or, for `mode: evaluate`, the whole evaluation."""
    if not trains(config):
        config = _one_batch(config)
    scenario, arithmetic, rates = scenario_of(config), derive(config), engine_rates(config, model, device)
    limits = EngineLimits(scenario.limits.slots, max(cached_tokens, 1))
    scenario = replace(scenario, rates=rates, limits=limits, steps=STEPS if trains(config) else 1)
    slots, total, weighted, engine_s = scenario.mean_slots, 0.0, 0.0, 0.0
    for domain, one in zip(arithmetic.domains, scenario.domains, strict=True):
        for place in range(1000):
            length, samples = min(one.max_tokens, one.lengths.draw((place + 0.5) / 1000)), float(domain.samples_per_step) / 1000
            total += samples * (one.prompt_tokens + length)
            weighted += samples * (one.prompt_tokens + length) ** 2
            engine_s += samples * rates.work(one.prompt_tokens, round(length), slots, one.prompt_tokens)
    row = weighted / total  # length of the row that a token is in, on average
    phases: dict[str, PhaseTime] = {}
    for name, role in roles(config).items():
        if isinstance(role, ForwardRoleConfig):
            if name != "actor_train" or actor_gives_log_probs(config):
                phases[f"log_probs {name}"] = _passes(config, model, device, name, role, total, row, backward=False)
            if isinstance(role, TrainRoleConfig):
                phases[f"train {name}"] = _passes(config, model, device, name, role, total, row, backward=True)
    trainer_s = sum(one.seconds for one in phases.values())
    trainer = TrainerModel()
    if trains(config):
        log_probs = 1 - sum(one.seconds for name, one in phases.items() if name.startswith("train")) / trainer_s
        lora = adapters_of_engines(config)
        numbers = model.parameters() if lora is None else model.adapter_parameters(lora)
        sent = numbers * number_bytes(config) / config.actor_infer.strategy.tensor_parallel
        phases["sync_weights"] = PhaseTime(0, sent, {"sending weights": sent / _speed(config, device, arithmetic.device_count)})
        trainer = TrainerModel(token_s=trainer_s / total, sync_s=phases["sync_weights"].seconds, log_probs=log_probs)
    if moved := _moved_bytes(config, model):
        parts = {f"host memory: {name}": one / (device.host_gb_s * 1e9 * MOVING) for name, one in moved.items()}
        phases["load and offload"] = PhaseTime(0, sum(moved.values()), parts)
        # All of it is in the trainer's time: none of these roles works meanwhile.
        trainer = replace(trainer, overhead_s=phases["load and offload"].seconds)
    scenario = replace(scenario, trainer=trainer, offload_s=None if scenario.offload_s is None else 0.0)
    costs = {"weights": rates.pass_s / slots, "arithmetic": rates.request_s, "cache": rates.cached_token_s * row / 2}
    busy = engine_s / scenario.engines / sum(costs.values())
    phases["generate"] = PhaseTime(total * model.flops(row), 0, {f"engines: {name}": one * busy for name, one in costs.items()})
    of_engines = engine_s * model_parallel_size(config.actor_infer) / config.actor_infer.replicas_per_device
    of_trainer = trainer_s * len(device_numbers(config.actor_train.devices))
    return StepTime(phases, scenario, of_engines / (of_engines + of_trainer))


def _one_batch(config: RunConfig) -> RunConfig:
    """Turn an evaluation into one step on all held-out prompts, with held-out sampling. Section `simulation` gives their number."""
    prompts = {name: config.simulation.domains.get(name, config.simulation.responses).prompts for name in config.domains}
    domains = {
        name: one.model_copy(
            update={
                "sampling": held_out_sampling(config, one),
                "share": prompts[name],
                "samples_per_prompt": config.validation.samples_per_prompt,
            }
        )
        for name, one in config.domains.items()
    }
    rollout = config.rollout.model_copy(update={"prompts_per_step": sum(prompts.values())})
    return config.model_copy(update={"domains": domains, "rollout": rollout})


def _moved_bytes(config: RunConfig, model: Architecture) -> dict[str, float]:
    """Return {role: bytes between host and device in a step} of the device that moves the most.

    Gradients and KV caches are not copied, nor weights that the trainer sends anyway or whose copy in host memory is current.
    """
    moved: dict[int, dict[str, float]] = {}
    for name, role in roles(config).items():
        if not getattr(role, "offload", False):
            continue
        loads = sum(kind(name) in PHASES[phase].parts and works(config, phase, name) for phase in phases_of_step(config))
        own = 0.0
        if isinstance(role, ForwardRoleConfig):
            strategy, size = role.strategy, 4 if config.model.dtype == "float32" else 2
            own = loads * model.rank_parameters(strategy) * size
            if isinstance(role, TrainRoleConfig):
                ranks = len(device_numbers(role.devices)) // model_parallel_size(role) * strategy.context_parallel
                trained = model.rank_parameters(strategy, getattr(role, "lora", None))
                own += trained * (size + 2 * optimizer_bytes(role, size) / ranks)
        elif isinstance(role, InferRoleConfig):
            if engine_offload(config) == "with_copy":
                own = 2 * engine_memory(config, model, 0).weights * role.replicas_per_device
        elif isinstance(role, RewardModelConfig) and (scorer := of_scorer(role.path)) is not None:
            own = scorer_memory(role, scorer, 0).weights
        for device in device_numbers(role.devices):
            moved.setdefault(device, {})[name] = own
    return max(moved.values(), key=lambda one: sum(one.values()), default={})


def _speed(config: RunConfig, device: Device, devices: int) -> float:
    return (device.network_gb_s if devices > config.placement.devices_per_node else device.link_gb_s) * 1e9 * MOVING


def _passes(
    config: RunConfig, model: Architecture, device: Device, name: str, role: ForwardRoleConfig, tokens: float, row: float, backward: bool
) -> PhaseTime:
    strategy, devices, hf, algorithm = role.strategy, len(device_numbers(role.devices)), model.hf, config.algorithm
    copies, epochs = devices // model_parallel_size(role), algorithm.ppo_epochs if backward else 1
    updates = epochs * algorithm.mini_batches if backward else 0
    lora = getattr(role, "lora", None)
    flops = epochs * tokens * model.flops(row, training_passes(lora) if backward else 1, strategy.recompute)
    compute = flops / (devices * device.tflops * 1e12 * (TRAINING if backward else FORWARD))
    budget = role.in_training[0] if isinstance(role, TrainRoleConfig) and backward else role.micro_batch_tokens
    micro_batches = max(1.0, epochs * tokens / copies / budget / max(updates, 1))
    # A layer gathers and scatters its tokens twice: forward, backward, and in a recomputed forward pass. Context ranks gather keys and
    # values.
    exchanges = (4 + 2 * (strategy.recompute == "full") if backward else 2) * 2 * (strategy.tensor_parallel - 1) / strategy.tensor_parallel
    if hf.experts and strategy.expert_parallel > 1:
        exchanges += (6 if backward else 2) * hf.experts.per_token
    exchanges += (3 if backward else 1) * (strategy.context_parallel - 1) * 2 * hf.key_value_heads * hf.head_dim / hf.hidden
    own = epochs * tokens / copies / strategy.context_parallel
    activations = exchanges * own * 2 * hf.hidden * hf.layers / strategy.pipeline_parallel
    # Gradients are summed in float32, new weights are gathered in bfloat16.
    gradients = updates * 6 * model.rank_parameters(strategy, lora) * (copies - 1) / copies
    parts = {
        "matrix products": compute,
        "pipeline bubbles": compute * (strategy.pipeline_parallel - 1) / (micro_batches * strategy.virtual_pipeline_parallel),
        "exchange of activations": activations / _speed(config, device, 1),
        "exchange of gradients": gradients / _speed(config, device, devices),
    }
    return PhaseTime(flops, activations + gradients, parts)


def engine_rates(config: RunConfig, model: Architecture, device: Device) -> EngineRates:
    """Estimate an engine replica's speed. A forward pass reads weights and cache, and computes one token per request."""
    strategy, copies, size = config.actor_infer.strategy, config.actor_infer.replicas_per_device, number_bytes(config)
    parallel = strategy.tensor_parallel
    weights = model.engine_weight_bytes(strategy, size)
    bandwidth = device.memory_gb_s * 1e9 * READING / copies
    token_s = model.flops(0) * copies / (parallel * device.tflops * 1e12 * FORWARD)
    pass_s = weights / bandwidth + model.hf.layers * LAYER_S * min(parallel, 2)
    return EngineRates(pass_s, token_s, model.cache_bytes(size) / min(parallel, model.hf.key_value_heads) / bandwidth, token_s)


SUPPLIES: tuple[dict[str, object], ...] = (
    {"supply": "sync"},
    {"supply": "one_step_off"},
    {"supply": "async", "max_staleness": 1, "on_sync": "pause"},
    {"supply": "async", "max_staleness": 4, "on_sync": "pause"},
)


def under_each_supply(scenario: Scenario) -> list[SimulatedRun]:
    """Simulate the configured `rollout.supply` and, if engines and trainers have their own devices, others."""
    alone = scenario.takes_turns or not scenario.trainer.token_s
    others = [] if alone else [one for one in map(scenario.under, SUPPLIES) if one.policy != scenario.policy]
    return [simulate(one) for one in [scenario, *others]]
