"""A step under every policy, with the production schedulers and router on a virtual clock, against the synchronous run and the ideal.

Engines are modelled (continuous batching of a 7B model on an H100: a pass takes 7 ms, 25 us more per request and 17 ns more per cached
token; 800,000 cached tokens and 160 requests at most, which is what they hold; prompts of 512 tokens at 40,000 tokens/s). Response lengths
are log-normal with a median of 1,600 and a 99th percentile of 16,000 tokens, cut at 16,384. A batch has 64 samples per engine in groups of
16: 4,096 on 64 engines, the 256 x 16 of ROLL Flash (arXiv 2510.11345). Weights take 2 s to get to the engines.

How long training takes decides what overlapping it can save, so it is given as its share of the synchronous step, 30% first: generation is
"over 70%" of it in practice, says the same paper. The ideal is the engines' work at full batches over their capacity, or the trainer's time
where that is longer. Two comparisons, at 8, 64 and 1,024:

- beside: so many engines, and a trainer on devices of its own, which idles while the synchronous run generates. `ratio` is the worst size's
  at a share of 30%, `max_staleness` 4, with responses that go on with new weights (`pause`).
- same devices: so many devices in all. The synchronous run generates on all of them, then trains on all of them, and changes over for
  nothing; the asynchronous one divides them where that is best. This is how ROLL Flash (2.24) and AReaL (2.77) report theirs.

    .venv/bin/python bench/scheduler_sim.py [--engines 8 64 1024] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from roll_lite.config.schema.domains import RolloutConfig
from roll_lite.simulator.engine import EngineLimits, EngineRates
from roll_lite.simulator.report import table_of_runs
from roll_lite.simulator.scenario import Scenario, TrainerModel
from roll_lite.simulator.simulation import SimulatedRun, simulate
from roll_lite.simulator.workload import DomainModel, LogNormal

H100 = EngineRates(pass_s=7e-3, request_s=25e-6, cached_token_s=17e-9, prefill_token_s=1 / 40_000)
LIMITS = EngineLimits(slots=160, cached_tokens=800_000)
MATH = DomainModel("math", LogNormal(1_600, 16_000), max_tokens=16_384, prompt_tokens=512, samples_per_prompt=16)
SAMPLES_PER_ENGINE = 64
SYNC_S = 2.0
SHARE = 0.3
SHARES = (0.15, 0.3, 0.45)
FEW = 16
"""Up to so many engines training takes several shares, and more steps are measured."""
HEADLINE: dict[str, Any] = {"supply": "async", "max_staleness": 4, "on_sync": "pause"}
POLICIES: tuple[dict[str, Any], ...] = (
    {"supply": "sync"},
    {"supply": "one_step_off"},
    {"supply": "async", "max_staleness": 1, "on_sync": "pause"},
    {"supply": "async", "max_staleness": 2, "on_sync": "pause"},
    HEADLINE,
    {"supply": "async", "max_staleness": 4, "on_sync": "abort"},
    {"supply": "async", "max_staleness": 8, "on_sync": "pause"},
)
MANY = 256
"""From so many engines on, only what the headline needs is simulated."""


def scenario(batch: int, engines: int, trainer: TrainerModel, policy: dict[str, Any]) -> Scenario:
    """`batch`: samples of a step."""
    prompts = batch // MATH.samples_per_prompt
    rollout = RolloutConfig(prompts_per_step=prompts, samples_per_prompt=MATH.samples_per_prompt, request_timeout_s=1e6, **policy)
    steps = 2 + policy.get("max_staleness", 0) + (10 if batch <= FEW * SAMPLES_PER_ENGINE else 3)
    return Scenario((MATH,), engines, H100, LIMITS, rollout, trainer, steps=steps)


def run(one: Scenario) -> SimulatedRun:
    started = time.process_time()
    outcome = simulate(one)
    print(f"  {one.engines} engines, {one.policy}: {time.process_time() - started:.0f} s of CPU", file=sys.stderr, flush=True)
    return outcome


def beside(engines: int, shares: Sequence[float]) -> tuple[dict[str, float], float, float, float]:
    """What the headline comes to; and seconds, work (of an engine) and tokens of the synchronous generation."""
    batch = SAMPLES_PER_ENGINE * engines
    alone = run(scenario(batch, engines, TrainerModel(), {"supply": "sync"}))
    generation_s, tokens = alone.step_s, fmean(step.tokens for step in alone.steady)
    found: dict[str, float] = {}
    for share in shares:
        trainer = TrainerModel(token_s=generation_s * share / (1 - share) / tokens, sync_s=SYNC_S)
        policies = POLICIES if engines < MANY else (POLICIES[0], HEADLINE)
        outcomes = [run(scenario(batch, engines, trainer, policy)) for policy in policies]
        sync, best = outcomes[0], outcomes[policies.index(HEADLINE)]
        print(
            f"\n{engines} engines, a trainer beside them that takes {share:.0%} of the synchronous step\n{table_of_runs(outcomes)}\n",
            flush=True,
        )
        if share == SHARE:
            found = {
                "ratio": sync.step_s / best.step_s,
                "of_ideal": best.of_ideal,
                "in_use": best.utilisation,
                "staleness": best.staleness,
                "step_s": best.step_s,
                "sync_step_s": sync.step_s,
            }
    return found, generation_s, alone.work_s * engines, tokens


def same_devices(devices: int, generation_s: float, work_s: float, tokens: float) -> float:
    """Return the speed-up over the synchronous run, by the best division of the devices. `generation_s`: of the synchronous run on all
    devices, which then train for their share of its step."""
    training_s = generation_s * SHARE / (1 - SHARE)
    synchronous = generation_s + training_s + SYNC_S
    # This estimate leaves out what updates cost the engines, the prefill of everything that runs: try more engines too.
    most = min(range(1, devices), key=lambda count: max(training_s * devices / count, work_s / (devices - count)))
    outcomes = {}
    for train_on in range(most, max(0, most - 3 * max(1, devices // 16)), -max(1, devices // 16)):
        trainer = TrainerModel(token_s=training_s * devices / train_on / tokens, sync_s=SYNC_S)
        outcomes[train_on] = run(scenario(SAMPLES_PER_ENGINE * devices, devices - train_on, trainer, HEADLINE))
    train_on, best = min(outcomes.items(), key=lambda one: one[1].step_s)
    print(f"{devices} devices in all, {train_on} of which train: {synchronous:.1f} s synchronous,\n{table_of_runs([best])}\n", flush=True)
    return synchronous / best.step_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--quick", action="store_true", help="8 engines, one share of training")
    chosen = parser.parse_args()
    sizes = [8] if chosen.quick else chosen.engines
    results, divided = {}, {}
    for engines in sizes:
        shares = SHARES if not chosen.quick and engines <= FEW else (SHARE,)
        results[engines], *generation = beside(engines, shares)
        divided[engines] = same_devices(engines, *generation)
    worst = min(results.values(), key=lambda one: one["ratio"])
    report = {
        "name": "scheduler_sim",
        "ours": round(worst["step_s"], 2),
        "peer": round(worst["sync_step_s"], 2),
        "unit": "s a step",
        "ratio": round(worst["ratio"], 3),
        "of_ideal": round(min(one["of_ideal"] for one in results.values()), 3),
        "same_devices_ratio": round(min(divided.values()), 3),
        "sizes": {size: {name: round(value, 3) for name, value in one.items()} for size, one in results.items()},
        "same_devices": {size: round(ratio, 3) for size, ratio in divided.items()},
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
