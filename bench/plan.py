"""Plans against what was measured: memory of a training step on this machine, and steps of asynchronous runs that verl published.

Memory: strategies train one mini-batch in processes of their own while torch's profiler records every allocation and release of the
CPU's allocator. What is left after the model is built, and the peak of the step beyond it, are compared with the trace that `roll-lite
plan` makes of the same layout without any data. The bound is 10%.

Steps of verl (docs/advance/fully_async.md, of October 2025 and later): 512 prompts of 16 samples. The model of the engines is fitted on
the synchronous row's generation; training takes what the synchronous row for as many devices says. Lengths are log-normal, the 99th
percentile ten times the median, as `roll-lite simulate` assumes where nothing is known. An eighth of prompts and devices is simulated. The
bound is 15%. verl's threshold bounds how many samples are generated ahead, ours (`max_staleness`) how old they may get, in whole steps. So
threshold 0 is compared with `sync`, and others with `async` and 4, where no response is waited for because of its age.

Steps of NeMo-RL (docs/about/performance-summary.md, v0.4): all of a plan's seconds are scaled by one factor, so that the on-policy row
comes out; from it follows the row that is one step off (`max_staleness: 1`). Layouts are the table's; recomputation, the reference's pass
and the share of engines are those of examples/configs/recipes/llm/performance; prompts are taken to have 128 tokens. DeepSeek-V3 is left
out: plans do not know its attention. The bound is 15%.

Staleness in a steady state: Applied Compute, "Predicting and Controlling Staleness in Fully Asynchronous RL Training" (July 2026), has
running x tail / batch + utilisation where training waits for generation. Its formula for the opposite is for a queue that drops what is
oldest; our schedulers stop starting prompts instead, so it is not compared. The bound is 5%.

`beside` does not count in `ratio`: steps if training takes what the asynchronous row says, which no synchronous row tells;
`max_staleness_1`, the strictest bound; and the staleness that Applied Compute measured.

    .venv/bin/python bench/plan.py [--quick]

The last line is a JSON object; `ratio` is the share of figures within their bound.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.profiler import ProfilerActivity, profile
from train import make_model

from roll_lite.config.loading import load_config
from roll_lite.config.schema.domains import RolloutConfig
from roll_lite.config.schema.models import MegatronStrategyConfig, ModelConfig, OptimizerConfig
from roll_lite.data.microbatch import RowsAtATime
from roll_lite.distributed.strategy.base import ModelSpec
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy
from roll_lite.distributed.strategy.megatron.traced import trace
from roll_lite.files import CONFIGS
from roll_lite.models.hf_config import read_config
from roll_lite.planning.architecture import Architecture, find, of_config
from roll_lite.planning.memory import cached_tokens, rows
from roll_lite.planning.time import DEVICES, Device, engine_rates, step_time
from roll_lite.simulator.engine import EngineLimits, EngineRates
from roll_lite.simulator.scenario import Scenario, TrainerModel
from roll_lite.simulator.simulation import simulate
from roll_lite.simulator.workload import DomainModel, LogNormal
from roll_lite.workers.objectives import ActorLoss

TINY = Path(__file__).resolve().parents[1] / "roll_lite/examples/models/tiny"
MIB = 2**20


@dataclass(frozen=True)
class Case:
    name: str
    large: bool
    """The model with 25 million parameters; else the shipped one."""
    ranks: int
    layout: dict[str, Any]
    rows: int
    length: int
    dtype: str = "float32"
    micro_batches: int = 1
    in_flight: int = 1


CASES = (
    Case("tiny", False, 1, {}, 64, 24),
    Case("tiny, two tensor ranks", False, 2, {"tensor_parallel": 2, "sequence_parallel": True}, 64, 24),
    Case("25M", True, 1, {}, 16, 128),
    Case("25M, bfloat16, recomputed", True, 1, {"recompute": "full"}, 4, 64, "bfloat16"),
    Case("25M, two copies", True, 2, {}, 4, 64, "bfloat16"),
    Case("25M, two stages", True, 2, {"pipeline_parallel": 2}, 8, 128, "float32", 4, 2),
)


def spec_of(case: Case, folder: Path) -> ModelSpec:
    model = ModelConfig(path=folder if case.large else TINY, dtype=case.dtype)  # type: ignore[arg-type]
    return ModelSpec(model, MegatronStrategyConfig(**case.layout), "model.path", OptimizerConfig(lr=1e-5), total_updates=10)


def measure(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.ranks), LOCAL_RANK="0")
    store = dist.FileStore(f"{folder}/store {case.name}", case.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks)
    strategy, loss = MegatronStrategy(spec_of(case, Path(folder) / "model")), ActorLoss()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as built:
        strategy.initialize()
    batch = rows(case.rows * case.micro_batches, case.length // 4, case.length, loss.columns)
    plan = strategy.plan(batch.lengths, RowsAtATime(case.rows))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trained:
        strategy.train_step(batch, loss, loss.outputs, plan)
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps([curve(built)[-1], max(curve(trained))]))
    dist.destroy_process_group()


def curve(recorded: Any) -> list[int]:
    """Bytes allocated and not yet released, after every event of the allocator."""
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    total, found = 0, [0]
    for event in sorted(events, key=lambda one: one.start_ns()):
        total += event.nbytes()
        found.append(total)
    return found


def memory(case: Case, folder: Path) -> tuple[float, float]:
    """MiB at the peak of a training step on the first rank: planned, measured."""
    spec, loss = spec_of(case, folder / "model"), ActorLoss()
    batch = rows(case.rows, case.length // 4, case.length, loss.columns)
    found = trace(spec, read_config(spec.model.path), case.ranks, 0, batch, loss, loss.outputs, on_gpu=False)
    training = found.training + (case.in_flight - 1) * found.kept + case.micro_batches * found.inputs
    planned = found.weights + found.gradients + found.optimizer + max(training, found.update)
    processes.spawn(measure, args=(case, str(folder)), nprocs=case.ranks)
    return planned / MIB, sum(json.loads((folder / "measured.json").read_text())) / MIB


H20 = Device(memory_gib=95.6, tflops=148, memory_gb_s=4000, link_gb_s=450, network_gb_s=50, host_gb_s=64)


@dataclass(frozen=True)
class Verl:
    """A row of docs/advance/fully_async.md: the synchronous row it is predicted from, and seconds of the asynchronous step."""

    generation_s: float
    """Synchronous, on `devices`."""
    training_s: float
    """Synchronous: with log-probs of the reference if there is one, on as many devices as train asynchronously, or scaled to them."""
    published_s: float
    own_training_s: float
    """The same of the asynchronous row; not used to predict `published_s`."""
    devices: int
    engines: int
    """Devices of engines in the asynchronous row."""
    length: int
    model: str = "Qwen2.5-7B"
    tensor_parallel: int = 1


VERL = {
    "7B, 128 H20": Verl(177.85, 133.41, 150.63, 113.16, 128, 64, 28_672),
    "7B, 64 H20": Verl(150.72, 313.81, 189.26, 156.98, 64, 32, 28_672),
    "7B, 32 H20": Verl(357.41, 2 * 313.81, 294.77, 269.80, 32, 16, 28_672),
    "7B, 16 H20, training binds": Verl(52.939, 2 * 430.263, 489.953, 435.874, 16, 8, 10_240),
    "30B-A3B, 128 H20": Verl(348.05, 4 * (20.86 + 86.27), 282.75, 50.05 + 206.63, 128, 96, 8_192, "Qwen3-30B-A3B", 4),
}
"""Later versions of the page exchange 313.81 and 269.80; only so do the parts of both rows add up to their steps. No row says how long 16
or 8 devices train at these lengths: twice as long as 32 or 16."""
THRESHOLDS = {0.0: 231.34, 0.1: 171.30, 0.3: 146.11}
"""Staleness threshold -> seconds of a step of the 7B on 128 H20; 0.5 is the row above."""


@dataclass(frozen=True)
class Nemo:
    """A pair of rows of NeMo-RL's docs/about/performance-summary.md, v0.4: GRPO on H100, 32 samples a prompt, 512 samples a mini-batch."""

    on_policy_s: float
    one_off_s: float
    lengths: tuple[int, int]
    """Mean tokens of a sample with its prompt: on-policy, one step off."""
    devices: tuple[int, int]
    """Half of the second trains."""
    tensor_parallel: tuple[int, int]
    """Engines'."""
    layouts: tuple[dict[str, int], dict[str, int]]
    model: str
    recompute: str = "none"
    raw: dict[str, Any] | None = None
    prompts: int = 64
    longest: int = 4096


QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
QWEN3_235B = {
    **QWEN3_32B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
STAGES = {"pipeline_parallel": 2}
FOURS = {"tensor_parallel": 4, "pipeline_parallel": 4}
MANY_EXPERTS = {"pipeline_parallel": 8, "expert_parallel": 16}
LARGE = ({"tensor_parallel": 2, "context_parallel": 2, **MANY_EXPERTS}, {"tensor_parallel": 4, **MANY_EXPERTS})
EXPERTS = ({"tensor_parallel": 2, "expert_parallel": 8}, {"pipeline_parallel": 2, "expert_parallel": 8})
NEMO = {
    "Llama-3.1-8B": Nemo(97.7, 74.6, (1060, 1129), (16, 16), (1, 1), (STAGES, STAGES), "Llama-3.1-8B", recompute="full"),
    "Qwen3-30B-A3B": Nemo(225, 244, (3154, 3158), (32, 32), (4, 2), EXPERTS, "Qwen3-30B-A3B"),
    "Qwen3-32B": Nemo(393, 215, (3206, 3207), (32, 64), (4, 4), (FOURS, FOURS), "Qwen3-32B", raw=QWEN3_32B),
    "Qwen3-235B-A22B": Nemo(506, 241, (5671, 5691), (128, 256), (16, 8), LARGE, "Qwen3-235B-A22B", "full", QWEN3_235B, 16, 8192),
}


@dataclass(frozen=True)
class Steady:
    """A row of Applied Compute's table: samples running at a time, samples of a batch, generation's throughput over training's, and the
    longest sample of a group over the mean."""

    running: int
    batch: int
    utilisation: float
    tail: float
    measured: float
    """Mean staleness in their runs of Qwen3-8B."""

    @property
    def closed_form(self) -> float:
        return self.running * self.tail / self.batch + self.utilisation


STEADY = (
    Steady(120, 240, 0.63, 1.42, 1.26),
    Steady(240, 120, 0.92, 1.43, 3.59),
    Steady(240, 120, 0.86, 1.42, 3.40),
    Steady(120, 120, 0.67, 1.42, 1.92),
)
GROUP, SLOTS, UNBOUND = 8, 8, 30
"""Samples of a group and requests of an engine, which the table does not give; a `max_staleness` that no sample reaches."""


def slower(rates: EngineRates, factor: float) -> EngineRates:
    return EngineRates(*(factor * one for one in (rates.pass_s, rates.request_s, rates.cached_token_s, rates.prefill_token_s)))


def step_s(scenario: Scenario, supply: dict[str, Any], training_s: float) -> float:
    scenario = replace(scenario, rollout=scenario.rollout.model_copy(update=supply))
    tokens = simulate(replace(scenario, steps=2)).steps[-1].tokens if training_s else 1
    return simulate(replace(scenario, trainer=TrainerModel(token_s=training_s / tokens))).step_s


def of_verl(row: Verl, part: int) -> Scenario:
    """Scenario of the asynchronous row, its engines fitted on the synchronous one. One in `part` prompts and devices is simulated."""
    lengths = LogNormal(1_500, 15_000) if row.length == 28_672 else LogNormal(row.length / 10, row.length)
    domain = DomainModel("math", lengths, max_tokens=row.length, prompt_tokens=200, samples_per_prompt=16)
    config = load_config("qwen2.5_7b_grpo", CONFIGS, [f"actor_infer.strategy.tensor_parallel={row.tensor_parallel}"], files=False)
    rates, limits = engine_rates(config, find(Path(), "", row.model), H20), EngineLimits(256, 1_000_000 * row.tensor_parallel)
    rollout = RolloutConfig(prompts_per_step=512 // part, samples_per_prompt=16, request_timeout_s=1e6, supply="sync")
    sync = Scenario((domain,), row.devices // row.tensor_parallel // part, rates, limits, rollout, steps=4)
    factor = row.generation_s / step_s(sync, {}, 0.0)
    print(f"verl, {row.model}, {row.devices} devices: engines take {factor:.2f} times as long as by their roofline", flush=True)
    return replace(sync, engines=row.engines // row.tensor_parallel // part, rates=slower(rates, factor))


def asynchronous(bound: int) -> dict[str, Any]:
    return {"supply": "async", "max_staleness": bound, "on_sync": "pause"}


def of_nemo(row: Nemo) -> float:
    """Predicted seconds of the one-off step."""
    model = of_config(row.model, row.raw) if row.raw else find(Path(), "", row.model)
    found = [scenario_of_nemo(row, place, model) for place in (0, 1)]
    on_policy = replace(found[0], rollout=found[0].rollout.model_copy(update={"supply": "sync"}), steps=4)
    factor, off = row.on_policy_s / simulate(on_policy).step_s, found[1]
    print(f"NeMo-RL, {row.model}: everything takes {factor:.2f} times as long as by the roofline", flush=True)
    trainer = replace(off.trainer, token_s=factor * off.trainer.token_s, sync_s=factor * off.trainer.sync_s)
    rollout = off.rollout.model_copy(update=asynchronous(1))
    return simulate(replace(off, rates=slower(off.rates, factor), trainer=trainer, rollout=rollout)).step_s


def scenario_of_nemo(row: Nemo, place: int, model: Architecture) -> Scenario:
    """The plan's own scenario of the on-policy row (`place` 0) or the one-off row: trainers and reference by roofline, and engines."""
    devices, prompt, longest = row.devices[place], 128, row.longest
    trainers = list(range(devices // (1 + place)))
    engines = trainers if not place else list(range(len(trainers), devices))
    layout = {"tensor_parallel": 1, "sequence_parallel": False, **row.layouts[place]}
    layout["sequence_parallel"] = layout["tensor_parallel"] > 1
    settings: dict[str, Any] = {
        "placement.nodes": devices // 8,
        "actor_train.devices": trainers,
        "actor_infer.devices": engines,
        "actor_infer.strategy.tensor_parallel": row.tensor_parallel[place],
        "actor_train.strategy.recompute": row.recompute,
        "algorithm.mini_batches": row.prompts // 16,
        "algorithm.kl_in_loss.coef": 0.01,
        "reference.devices": trainers,
        "rollout.prompts_per_step": row.prompts,
        "rollout.samples_per_prompt": 32,
        "domains.math.sampling.max_prompt_tokens": prompt,
        "domains.math.sampling.max_tokens": longest - prompt,
        "simulation.responses.prompt_tokens": prompt,
        "simulation.responses.median": median_of(row.lengths[place] - prompt, longest - prompt),
        **{f"{role}.strategy.{name}": value for role in ("actor_train", "reference") for name, value in layout.items()},
        **({f"{role}.offload": False for role in ("actor_train", "actor_infer", "reference")} if place else {}),
    }
    config = load_config("qwen2.5_7b_grpo", CONFIGS, [f"{key}={json.dumps(value)}" for key, value in settings.items()], files=False)
    cached = cached_tokens(config, model, DEVICES["H100"].bytes)
    return step_time(config, model, DEVICES["H100"], cached).scenario


def median_of(mean: float, longest: int) -> float:
    """Median of the log-normal distribution, 99th percentile ten times the median, that has this mean once it is cut at `longest`."""
    low, high = 1.0, 1e7
    for _ in range(60):
        middle = math.sqrt(low * high)
        cut = fmean(min(longest, LogNormal(middle, 10 * middle).draw((place + 0.5) / 1000)) for place in range(1000))
        low, high = (middle, high) if cut < mean else (low, middle)
    return round(middle)


def staleness(row: Steady, steps: int) -> float:
    """Mean staleness in the simulator, if lengths have this tail and engines are always full."""
    low, high = 1.0, 100.0
    for _ in range(40):  # of the 99th percentile over the median
        middle = math.sqrt(low * high)
        low, high = (middle, high) if tail_of(LogNormal(400, 400 * middle))[0] < row.tail else (low, middle)
    lengths = LogNormal(400, 400 * middle)
    training_s = row.utilisation * row.batch * tail_of(lengths)[1] / row.running
    rollout = RolloutConfig(prompts_per_step=row.batch // GROUP, samples_per_prompt=GROUP, request_timeout_s=1e9, **asynchronous(UNBOUND))
    domain = DomainModel("math", lengths, max_tokens=10**6, prompt_tokens=2, samples_per_prompt=GROUP)
    engines, trainer = row.running // SLOTS, TrainerModel(overhead_s=training_s)
    return simulate(Scenario((domain,), engines, EngineRates(1.0), EngineLimits(SLOTS), rollout, trainer, steps=steps)).staleness


def tail_of(lengths: LogNormal) -> tuple[float, float]:
    """Mean of a group's longest over the mean, and the mean."""
    shares = [(place + 0.5) / 20_000 for place in range(20_000)]
    mean = fmean(map(lengths.draw, shares))
    return fmean(lengths.draw(share ** (1 / GROUP)) for share in shares) / mean, mean


def verl_rows(quick: bool, compared: dict[str, tuple[float, float, float]], beside: dict[str, float]) -> None:
    for name, row in list(VERL.items())[: 1 if quick else None]:
        free = of_verl(row, min(32 if quick else 8, row.engines // row.tensor_parallel // 2))
        found = step_s(replace(free, steps=10), asynchronous(4), row.training_s)
        compared[f"verl, {name}"] = found, row.published_s, 0.15
        own = step_s(replace(free, steps=10), asynchronous(4), row.own_training_s)
        beside[f"verl, {name}, its own training time"] = own / row.published_s - 1
        if row == VERL["7B, 128 H20"]:
            sync = step_s(replace(free, steps=5), {}, row.training_s)
            strict = step_s(replace(free, steps=7), asynchronous(1), row.training_s)
            for threshold, seconds in THRESHOLDS.items():
                compared[f"verl, {name}, threshold {threshold}"] = found if threshold else sync, seconds, 0.15
            for threshold, seconds in {0.1: THRESHOLDS[0.1], 0.3: THRESHOLDS[0.3], 0.5: row.published_s}.items():
                beside[f"max_staleness 1, threshold {threshold}"] = strict / seconds - 1


def nemo_rows(quick: bool, compared: dict[str, tuple[float, float, float]], _: dict[str, float]) -> None:
    for name, row in list(NEMO.items())[: 1 if quick else None]:
        compared[f"NeMo-RL, {name}, one step off"] = of_nemo(row), row.one_off_s, 0.15


def steady_rows(quick: bool, compared: dict[str, tuple[float, float, float]], beside: dict[str, float]) -> None:
    for row in STEADY[: 1 if quick else None]:
        name = f"staleness, {row.running} running, batch {row.batch}, utilisation {row.utilisation}"
        found = staleness(row, 40 if quick else 150)
        compared[name] = found, row.closed_form, 0.05
        beside[f"{name}, measured"] = found / row.measured - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, fewer prompts")
    chosen = parser.parse_args()
    compared: dict[str, tuple[float, float, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", hidden=512, layers=6)
        for case in CASES[:1] if chosen.quick else CASES:
            planned, measured = memory(case, folder)
            compared[f"memory, {case.name}"] = planned, measured, 0.10
            print(f"{case.name}: planned {planned:.2f} MiB, measured {measured:.2f} MiB, {planned / measured - 1:+.1%}", flush=True)
    beside: dict[str, float] = {}
    for rows_of in (verl_rows, nemo_rows, steady_rows):
        rows_of(chosen.quick, compared, beside)
    for name, (ours, peer, bound) in compared.items():
        note = "" if abs(ours / peer - 1) <= bound else f", more than {bound:.0%}"
        print(f"{name}: {ours:.2f}, compared with {peer:.2f}: {ours / peer - 1:+.1%}{note}", flush=True)
    within = {figure: abs(ours / peer - 1) <= bound for figure, (ours, peer, bound) in compared.items()}
    report = {
        "name": "plan",
        "ours": sum(within.values()),
        "peer": len(within),
        "unit": "figures within their bound",
        "ratio": round(sum(within.values()) / len(within), 3),
        "off_by": {figure: round(ours / peer - 1, 3) for figure, (ours, peer, _) in compared.items()},
        "beside": {figure: round(off, 3) for figure, off in beside.items()},
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
