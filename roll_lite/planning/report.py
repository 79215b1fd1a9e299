"""`roll-lite plan`: memory and speed of a configuration on given devices, and layouts that fit."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from roll_lite.config.arithmetic import (
    derive,
    device_numbers,
    longest_sequence,
    max_model_len,
    model_parallel_size,
    pipeline_problem,
    roles,
    tensor_parallel_fits,
    trains,
)
from roll_lite.config.arithmetic_tables import render, table
from roll_lite.config.checks.across import check
from roll_lite.config.placement import ranges
from roll_lite.config.placement_picture import draw
from roll_lite.config.schema.models import (
    EngineStrategyConfig,
    ForwardRoleConfig,
    JudgeServerConfig,
    MegatronStrategyConfig,
    RewardModelConfig,
    TrainRoleConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.strategy.megatron.traced import RankMemory
from roll_lite.planning.architecture import Architecture, find, of_scorer
from roll_lite.planning.memory import GIB, PhaseMemory, by_phase, cached_tokens, memory_of_roles, optimizer_bytes
from roll_lite.planning.time import DEVICES, Device, StepTime, step_time, under_each_supply
from roll_lite.simulator.report import table_of_runs
from roll_lite.simulator.simulation import SimulatedRun

LISTED, TRIED = 5, 80
UNDIVIDED = {
    name: field.default
    for name, field in MegatronStrategyConfig.model_fields.items()
    if name.endswith("_parallel") or name == "pipeline_layers"
}  # before a layout is tried: the configuration's own may need more devices


@dataclass(frozen=True)
class Plan:
    config: RunConfig
    memory: dict[str, RankMemory]
    phases: list[PhaseMemory]
    time: StepTime
    cached_tokens: int
    problems: list[str]


def planned(config: RunConfig, model: Architecture, device: Device) -> Plan:
    memory, cached = memory_of_roles(config, model, device.bytes), cached_tokens(config, model, device.bytes)
    phases = by_phase(config, memory)
    return Plan(config, memory, phases, step_time(config, model, device, cached), cached, list(_problems(config, phases, cached, device)))


def _problems(config: RunConfig, phases: list[PhaseMemory], cached: int, device: Device) -> Iterator[str]:
    longest = max_model_len(config)
    if cached < longest:
        room = f"the KV cache has room for {cached:,} tokens, one sample takes {longest:,}"
        yield f"actor_infer.strategy: {room}; raise tensor_parallel or gpu_memory_utilization"
    for one in phases:
        if (missing := one.total / GIB - device.memory_gib) > 0:
            most = max(one.roles, key=lambda name: one.roles[name])
            where = f"{one.phase}, devices {ranges(one.devices)}: {one.total / GIB:.1f} of {device.memory_gib} GiB"
            yield f"{where}, {missing:.1f} too much, most of it {most} ({one.roles[most] / GIB:.1f})"


def remedies(config: RunConfig, model: Architecture, device: Device, phases: list[PhaseMemory]) -> Iterator[str]:
    """Yield, per role, the first change of a single setting that makes everything fit, and memory saved."""
    before = max(one.total for one in phases)
    for name, role in roles(config).items():
        for setting, value in _changes(config, role, before, device):
            other = _changed(config, f"{name}.{setting}", value)
            if setting == "strategy.tensor_parallel" and value > 1:
                other = _changed(other, f"{name}.strategy.sequence_parallel", True) if isinstance(role, ForwardRoleConfig) else other
            if check(other, files=False) or layout_problem(other, model):
                continue
            found = by_phase(other, memory_of_roles(other, model, device.bytes))
            if not list(_problems(other, found, cached_tokens(other, model, device.bytes), device)):
                saved = (before - max(one.total for one in found)) / GIB
                yield f"{name}.{setting}={value} saves {saved:.1f} GiB, and everything fits"
                break


def _changes(config: RunConfig, role: Any, total: int, device: Device) -> Iterator[tuple[str, Any]]:
    strategy = role.strategy
    if isinstance(role, ForwardRoleConfig):
        budget = role.in_training[0] if isinstance(role, TrainRoleConfig) else 0
        while (budget := budget // 2) >= longest_sequence(config):
            yield "train_micro_batch_tokens", budget
        yield from (("strategy.recompute", one) for one in ("selective", "full") if strategy.recompute != one)
    elif isinstance(strategy, EngineStrategyConfig):
        given = strategy.gpu_memory_utilization
        lower = int(100 * (given - (total / GIB / device.memory_gib - 1))) / 100
        yield from [("strategy.gpu_memory_utilization", lower)] if 0 < lower < given else []
    else:
        return
    yield from (("strategy.tensor_parallel", strategy.tensor_parallel * factor) for factor in (2, 4, 8))


def _changed(section: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    if isinstance(section, Mapping):
        return {**section, name: _changed(section[name], rest, value)}
    return section.model_copy(update={name: _changed(getattr(section, name), rest, value) if rest else value})


def layout_problem(config: RunConfig, model: Architecture) -> str | None:
    """Return a message if a parallel size does not divide the model's sizes."""
    for name, role in roles(config).items():
        strategy, trains = role.strategy, isinstance(role, ForwardRoleConfig)
        own = of_scorer(role.path) if isinstance(role, RewardModelConfig | JudgeServerConfig) else model
        if own is None:
            continue
        parallel, hf = getattr(strategy, "tensor_parallel", 1), own.hf
        if not tensor_parallel_fits(parallel, hf.heads, hf.key_value_heads, hf.head_dim if trains else None) or hf.feed_forward % parallel:
            heads = f"{hf.heads} attention heads and {hf.key_value_heads} key/value heads"
            return f"{name}.strategy.tensor_parallel = {parallel}: does not divide {own.name}'s {heads}; use a smaller power of two"
        if isinstance(strategy, MegatronStrategyConfig):
            if found := pipeline_problem(strategy, hf.layers):
                return f"{name}.strategy.{found[0]}: {found[1]}"
            if strategy.expert_parallel > 1 and (not hf.experts or hf.experts.count % strategy.expert_parallel):
                return f"{name}.strategy.expert_parallel = {strategy.expert_parallel}: does not divide the experts of {own.name}; use 1"
    return None


def search(config: RunConfig, model: Architecture, device: Device, devices: int) -> list[Plan]:
    """Try up to TRIED layouts on `devices` devices, fastest estimates first, until LISTED fit; return their plans."""
    candidates: list[tuple[float, int, int, RunConfig]] = []
    for trainers in sorted({devices, devices // 2, devices // 4, 3 * devices // 4}):
        placed = list(_with_engines(_placed(config, trainers, devices), model, device)) if trainers else []
        for other, layout in product(placed, _layouts(model, trainers)):
            for name, role in roles(other).items():
                if isinstance(role, ForwardRoleConfig):
                    other = _changed(other, f"{name}.strategy", role.strategy.model_copy(update=layout))
            if _state_bytes(other, model, trainers) > device.bytes:
                continue  # weights, gradients and optimizer alone are too large
            cached = cached_tokens(other, model, device.bytes)
            for budget in sorted({longest_sequence(config), config.actor_train.in_training[0], 2 * config.actor_train.in_training[0]}):
                one = _changed(other, "actor_train.train_micro_batch_tokens", budget)
                if not check(one, files=False) and layout_problem(one, model) is None:
                    candidates.append((step_time(one, model, device, cached).estimate_s, -budget, len(candidates), one))
    found: dict[float, Plan] = {}
    for seconds, _, _, one in sorted(candidates)[:TRIED]:
        if len(found) < LISTED and seconds not in found and not (plan := planned(one, model, device)).problems:
            found[seconds] = plan  # of layouts that are equally fast, the one with the largest micro-batches
    return list(found.values())


def _state_bytes(config: RunConfig, model: Architecture, trainers: int) -> float:
    role, size = config.actor_train, 4 if config.model.dtype == "float32" else 2
    ranks = trainers // model_parallel_size(role) * role.strategy.context_parallel
    trained = model.rank_parameters(role.strategy, role.lora) * (4 + optimizer_bytes(role, size) / ranks)
    return model.rank_parameters(role.strategy) * size + trained


def _layouts(model: Architecture, trainers: int) -> Iterator[dict[str, Any]]:
    experts = [one for one in (1, 2, 4, 8, 16) if one == 1 or (model.hf.experts and one <= trainers and model.hf.experts.count % one == 0)]
    for tensor, pipeline, context, expert, recompute in product((1, 2, 4, 8), (1, 2, 4), (1, 2), experts, ("none", "selective", "full")):
        sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "context_parallel": context, "expert_parallel": expert}
        if trainers % (tensor * pipeline * context) == 0:
            yield {**sizes, "sequence_parallel": tensor > 1, "recompute": recompute}


def _placed(config: RunConfig, trainers: int, devices: int) -> RunConfig:
    """Place training roles and the reference model on the first `trainers` devices, other roles on the rest. Without further devices, all
    roles take turns on all devices."""
    first = 0 if trainers == devices else trainers
    for name, role in roles(config).items():
        own = list(range(trainers)) if isinstance(role, ForwardRoleConfig) else list(range(first, devices))
        config = _changed(config, f"{name}.devices", own)
        config = _changed(config, f"{name}.offload", first == 0) if hasattr(role, "offload") else config
        if isinstance(role, ForwardRoleConfig):
            config = _changed(config, f"{name}.strategy", role.strategy.model_copy(update=UNDIVIDED))
    supply = {"supply": "sync"} if first == 0 else {"supply": "async", "max_staleness": 1, "on_sync": "pause"}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=supply)})


def _with_engines(config: RunConfig, model: Architecture, device: Device) -> Iterator[RunConfig]:
    """Yield two values of the engines' tensor_parallel (given, fastest) whose KV cache can hold the longest sample."""
    seconds: dict[int, float] = {}
    given, engines = config.actor_infer.strategy.tensor_parallel, len(device_numbers(config.actor_infer.devices))
    for parallel in {1, 2, 4, 8, given}:
        one = _changed(config, "actor_infer.strategy.tensor_parallel", parallel)
        cached = cached_tokens(one, model, device.bytes)
        if engines % parallel == 0 and cached >= max_model_len(one):
            time = step_time(one, model, device, cached)
            seconds[parallel] = time.phases["generate"].seconds + time.longest_s
    for parallel in sorted(seconds, key=lambda one: (one != given, seconds[one]))[:2]:
        yield _changed(config, "actor_infer.strategy.tensor_parallel", parallel)


def answer(config: RunConfig, configuration: str, parsed: Any) -> int:
    """Print the plan or, with --search, the layouts that fit. Exit code: 0 if all fits, 1 if not, 2 for an unusable argument."""
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # warns of experts in every traced layer
    try:
        model, device = find(config.model.path, configuration, parsed.model), DEVICES[parsed.device]
        if problem := layout_problem(config, model):
            raise ValueError(problem)
        if parsed.search and not trains(config):
            raise ValueError(f"--search: tries layouts of trainers, and mode: {config.mode} has none; leave it out")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if parsed.search:
        return _print(search(config, model, device, parsed.search), model, parsed)
    plan = planned(config, model, device)
    runs = under_each_supply(plan.time.scenario)
    advice = list(remedies(config, model, device, plan.phases)) if plan.problems else []
    if parsed.json:
        times = {name: {"seconds": one.seconds, **asdict(one)} for name, one in plan.time.phases.items()}
        memory, phases = {name: asdict(one) for name, one in plan.memory.items()}, [asdict(one) for one in plan.phases]
        numbers = {"problems": plan.problems, "memory_bytes": memory, "phases": phases, "times": times, "cached_tokens": plan.cached_tokens}
        numbers |= {"engine_share": plan.time.engine_share, "estimate_s": plan.time.estimate_s}
        sys.stdout.write(json.dumps({**numbers, "model": model.name, "supplies": _supplies(runs), "advice": advice}) + "\n")
        return bool(plan.problems)
    share = f"engines and trainer take equally long with {plan.time.engine_share:.0%} of the devices for engines"
    if not trains(config):
        prompts, samples = plan.time.scenario.rollout.prompts_per_step, config.validation.samples_per_prompt
        share = f"a step is the whole evaluation: {prompts:,} prompts (simulation.responses.prompts) x {samples}"
    verdict = "fits" if not plan.problems else "\n".join(f"will not fit: {one}" for one in plan.problems)
    remedy = [f"change: {one}" for one in advice] or (["no single change makes it fit; try --search"] if plan.problems else [])
    billions = model.parameters() / 1e9
    size = f"{billions:.2f} billion" if billions >= 0.1 else f"{1e3 * billions:.2f} million"
    title = f"{model.name}, {size} parameters, on {parsed.device} ({device.memory_gib} GiB)"
    left_out = [f"not counted, its model being unknown: {name}" for name in roles(config) if name not in plan.memory]
    cache = f"KV cache of an engine: {plan.cached_tokens:,} tokens"
    of_roles, of_phases, of_times = _tables(plan)
    batch = [render(derive(config))] if trains(config) else []
    shown = [title, draw(config), *batch, of_roles, of_phases, cache, of_times, table_of_runs(runs), share]
    sys.stdout.write("\n\n".join([*shown, "\n".join([*left_out, verdict, *remedy])]) + "\n")
    return bool(plan.problems)


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def _tables(plan: Plan) -> tuple[str, str, str]:
    parts = ("weights", "gradients", "optimizer", "training", "forward", "kv_cache", "send_buffers")
    by_role = [[name, *(_gib(getattr(one, part)) for part in parts)] for name, one in plan.memory.items()]
    memory = [
        [
            one.phase.replace("_", " "),
            ranges(one.devices),
            _gib(one.total),
            ", ".join(f"{name} {_gib(own)}" for name, own in one.roles.items()),
        ]
        for one in plan.phases
    ]
    times = [
        [name.replace("_", " "), f"{one.seconds:.2f}", one.bottleneck, f"{one.flops:.2e}", _gib(one.moved_bytes)]
        for name, one in plan.time.phases.items()
    ]
    return (
        table(["GiB on a device", *(part.replace("_", " ") for part in parts)], by_role),
        table(["phase", "devices", "GiB", "of which"], memory),
        table(["phase", "seconds", "bottleneck", "FLOPs", "GiB moved by a device"], times),
    )


def _supplies(runs: Sequence[SimulatedRun]) -> dict[str, Any]:
    return {
        one.scenario.policy: {"step_s": one.step_s, "staleness": one.staleness} if one.steps else {"error": one.early_end} for one in runs
    }


def _print(plans: list[Plan], model: Architecture, parsed: Any) -> int:
    rows = []
    for one in plans:
        actor, engines = one.config.actor_train, one.config.actor_infer
        devices = f"{ranges(device_numbers(actor.devices))} | {ranges(device_numbers(engines.devices))}"
        fullest = _gib(max(phase.total for phase in one.phases))
        clusters = derive(one.config).clusters
        layout = [clusters["actor_train"].layout, clusters["actor_infer"].layout, actor.strategy.recompute, str(actor.in_training[0])]
        rows.append([devices, *layout, one.config.rollout.supply, fullest, f"{one.time.estimate_s:.1f}"])
    header = ["trainer | engines", "layout", "engines", "recompute", "micro-batch tokens", "supply", "fullest GiB", "step s"]
    runs = under_each_supply(plans[0].time.scenario) if plans else []
    if parsed.json:
        found: list[dict[str, Any]] = [dict(zip(header, row, strict=True)) for row in rows]
        found[:1] = [{**one, "supplies": _supplies(runs)} for one in found[:1]]
        sys.stdout.write(json.dumps(found) + "\n")
    elif rows:
        sys.stdout.write(f"{table(header, rows)}\n\nthe first of them, simulated:\n{table_of_runs(runs)}\n")
    else:
        sys.stdout.write(f"{model.name}: no layout tried fits on {parsed.search} {parsed.device}\n")
    return not rows
