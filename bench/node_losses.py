"""Throughput lost against engines lost: 256 simulated engines on nodes of 8, with the production schedulers and router.

Engines, lengths and policy are those of scheduler_sim.py (asynchronous, at most 4 versions old, responses go on with new weights). The
trainer takes 10% of the synchronous step, so that generation limits the run. A lost node takes its 8 engines along; they are back after 5
minutes. Their requests go on elsewhere without the tokens of their last 5 s.

Losses are scaled up: a node is lost every half hour, where real ones last for months, so that a few simulated minutes have enough of
them. Rarer losses leave more spare engines at a time, so they should cost no larger share of the engine time lost; `--hours` tries them.

`engine time lost` is the share of engine time in which engines were away, `throughput lost` how many tokens a second less than a run of
the same seed without losses: both after the warm-up. Last line: JSON with `ratio` = engine time lost / throughput lost over all seeds (1: a
lost engine costs its own work and nothing else) and `error`, the ratio's standard error.

    .venv/bin/python bench/node_losses.py [--engines 256] [--steps 14] [--hours 0.5] [--seeds 3] [--quick]

Eight minutes on one core (1,024 engines: fourteen for each seed); with --quick one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from math import sqrt
from statistics import fmean

from scheduler_sim import HEADLINE, MATH, SAMPLES_PER_ENGINE, scenario

from roll_lite.simulator.scenario import Failures, TrainerModel
from roll_lite.simulator.simulation import simulate

ENGINES_PER_NODE = 8
AWAY_S = 300.0
SHARE = 0.1
"""Share of the trainer in the synchronous step."""


def measure(engines: int, steps: int, seed: int, trainer: TrainerModel, hours: float | None) -> tuple[float, float]:
    """Return tokens a second, and the share of engine time in which engines were away. `hours`: mean time between losses of a node."""
    started = time.process_time()
    one = scenario(engines * SAMPLES_PER_ENGINE, engines, trainer, HEADLINE)
    failures = Failures(mean_node_s=hours and hours * 3600, engines_per_node=ENGINES_PER_NODE, start_s=AWAY_S)
    outcome = simulate(replace(one, steps=steps, seed=seed, failures=failures))
    start, end = outcome.steps[outcome.warm_up - 1].end, outcome.steps[-1].end
    speed = sum(step.tokens for step in outcome.steady) / (end - start)
    away = sum(max(0.0, min(at + AWAY_S, end) - max(at, start)) for at, _ in outcome.deaths) / (engines * (end - start))
    print(
        f"seed {seed}, {f'a node is lost every {hours:g} h' if hours else 'no losses'}: {len(outcome.deaths)} engines lost, {speed:,.0f} "
        f"tokens/s in {(end - start) / 3600:.2f} h, engine time lost {away:.2%} ({time.process_time() - started:.0f} s of CPU)",
        file=sys.stderr,
        flush=True,
    )
    return speed, away


def ratio_of(away: list[float], lost: list[float]) -> tuple[float, float]:
    """Return the ratio of the sums, and its standard error."""
    ratio = sum(away) / sum(lost)
    spread = sum((one - ratio * other) ** 2 for one, other in zip(away, lost, strict=True))
    return ratio, sqrt(spread / (len(away) * (len(away) - 1))) / abs(fmean(lost))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--hours", type=float, default=0.5, help="mean time between losses of a node")
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--quick", action="store_true", help="64 engines, 2 seeds, fewer steps")
    parsed = parser.parse_args()
    engines, seeds, steps = (64, 2, 10) if parsed.quick else (parsed.engines, parsed.seeds, parsed.steps)
    small = simulate(scenario(64 * SAMPLES_PER_ENGINE, 64, TrainerModel(), {"supply": "sync"}))  # its step time is that of any size
    trainer = TrainerModel(overhead_s=small.step_s * SHARE / (1 - SHARE), sync_s=2.0)
    away, lost, fastest = [], [], []
    for seed in range(1, seeds + 1):
        quiet, _ = measure(engines, steps, seed, trainer, None)
        speed, absent = measure(engines, steps, seed, trainer, parsed.hours)
        fastest.append(quiet)
        away.append(absent)
        lost.append(1 - speed / quiet)
    ratio, error = ratio_of(away, lost)
    report = {"name": "node_losses", "ours": round(fmean(fastest)), "unit": "tokens/s without losses", "engines": engines, "seeds": seeds}
    report |= {"domain": MATH.name, "hours": parsed.hours, "ratio": round(ratio, 2), "error": round(error, 2)}
    print(json.dumps({**report, "engine time lost": round(fmean(away), 4), "throughput lost": round(fmean(lost), 4)}))


if __name__ == "__main__":
    main()
