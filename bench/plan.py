"""Plans against what was measured: memory of a training step on this machine, and steps of asynchronous runs that verl published.

Memory: strategies train one mini-batch in processes of their own while torch's profiler records every allocation and release of the
CPU's allocator. What is left after the model is built, and the peak of the step beyond it, are compared with the trace that `roll-lite
plan` makes of the same layout without any data. The bound is 10%.

Steps: Qwen2.5-Math-7B on 128 H20 (verl, docs/advance/fully_async.md): 512 prompts of 16 samples, up to 28k tokens. The model of the
engines is fitted on the synchronous row (177.85 s of generation on 128 engines); training on 64 devices takes what the synchronous row for
64 devices says (133.41 s). Lengths are log-normal, the 99th percentile ten times the median, as `roll-lite simulate` assumes where nothing
is known.
An eighth of prompts and devices is simulated. The bound is 15%. verl's threshold bounds how many samples are generated ahead, ours
(`max_staleness`) how old they may get, in whole steps. So threshold 0 is compared with `sync`, and others with `async` and 4, where no
response is waited for because of its age; `max_staleness_1` has the strictest bound beside it, and does not count in `ratio`.

    .venv/bin/python bench/plan.py [--quick]

The last line is a JSON object; `ratio` is the share of figures within their bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.profiler import ProfilerActivity, profile
from train import make_model

from roll_lite.config.schema.domains import RolloutConfig
from roll_lite.config.schema.models import MegatronStrategyConfig, ModelConfig, OptimizerConfig
from roll_lite.data.microbatch import RowsAtATime
from roll_lite.distributed.strategy.base import ModelSpec
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy
from roll_lite.distributed.strategy.megatron.traced import trace
from roll_lite.models.hf_config import read_config
from roll_lite.planning.memory import rows
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


PUBLISHED = {0.0: 231.34, 0.1: 171.30, 0.3: 146.11, 0.5: 150.63}
"""Staleness threshold -> seconds of a step."""
GENERATION_S, TRAINING_S = 177.85, 133.41
H20 = EngineRates(pass_s=7.5e-3, request_s=190e-6, cached_token_s=22e-9, prefill_token_s=190e-6)
"""7B in bfloat16 by the roofline of planning/time.py: 148 TFLOPs, 4 TB/s. The fit changes all of them by one factor."""
MATH = DomainModel("math", LogNormal(1_500, 15_000), max_tokens=28_672, prompt_tokens=200, samples_per_prompt=16)


def step_s(engines: int, prompts: int, slower: float, training_s: float, supply: dict[str, Any], steps: int) -> float:
    rates = EngineRates(*(slower * one for one in (H20.pass_s, H20.request_s, H20.cached_token_s, H20.prefill_token_s)))
    rollout = RolloutConfig(prompts_per_step=prompts, samples_per_prompt=16, request_timeout_s=1e6, **supply)
    scenario = Scenario((MATH,), engines, rates, EngineLimits(256, 1_000_000), rollout, steps=steps)
    tokens = simulate(replace(scenario, steps=2)).steps[-1].tokens if training_s else 1
    return simulate(replace(scenario, trainer=TrainerModel(token_s=training_s / tokens))).step_s


def steps(part: int) -> dict[str, float]:
    """Predicted seconds of a step by supply; `part`: of the prompts and devices, one in so many is simulated."""
    prompts, engines = 512 // part, 128 // part
    slower = GENERATION_S / step_s(engines, prompts, 1.0, 0.0, {"supply": "sync"}, 4)
    print(f"engines take {slower:.2f} times as long as by their roofline", flush=True)
    found = {"sync": step_s(engines // 2, prompts, slower, TRAINING_S, {"supply": "sync"}, 5)}
    for bound in (1, 4):
        supply = {"supply": "async", "max_staleness": bound, "on_sync": "pause"}
        found[f"async {bound}"] = step_s(engines // 2, prompts, slower, TRAINING_S, supply, 6 + bound)
    return found


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
    found = steps(32 if chosen.quick else 8)
    for threshold, published in PUBLISHED.items():
        ours = found["async 4" if threshold else "sync"]
        compared[f"step at staleness {threshold}"] = ours, published, 0.15
        print(f"staleness {threshold}: {ours:.1f} s, published {published} s, {ours / published - 1:+.1%}", flush=True)
    within = {figure: abs(ours / peer - 1) <= bound for figure, (ours, peer, bound) in compared.items()}
    report = {
        "name": "plan",
        "ours": sum(within.values()),
        "peer": len(within),
        "unit": "figures within their bound",
        "ratio": round(sum(within.values()) / len(within), 3),
        "off_by": {figure: round(ours / peer - 1, 3) for figure, (ours, peer, _) in compared.items()},
        "max_staleness_1": {str(one): round(found["async 1"] / seconds - 1, 3) for one, seconds in PUBLISHED.items() if one},
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
