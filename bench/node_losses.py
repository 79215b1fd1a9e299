"""Throughput lost against engines lost: 1,024 simulated engines on nodes of 8, with the production schedulers and router.

Engines, lengths and policy are those of scheduler_sim.py (asynchronous, at most 4 versions old, responses go on with new weights). The
trainer takes 10% of the synchronous step, so that generation limits the run. A lost node takes its 8 engines along; they are back after 5
minutes. Their requests go on elsewhere without the tokens of their last 5 s.

`engine time lost` is the share of engine time in which engines were away, `throughput lost` how many tokens a second less than without
losses. Last line: JSON with `ratio` = engine time lost / throughput lost at one loss per node and 12 hours (1: a lost engine costs its own
work and nothing else).

    .venv/bin/python bench/node_losses.py [--engines 1024] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace

from scheduler_sim import HEADLINE, MATH, SAMPLES_PER_ENGINE, scenario

from roll_lite.simulator.scenario import Failures, TrainerModel
from roll_lite.simulator.simulation import SimulatedRun, simulate

ENGINES_PER_NODE = 8
AWAY_S = 300.0
SHARE = 0.1
"""Share of the trainer in the synchronous step."""
HOURS = (None, 12.0, 3.0)
"""Mean hours between losses of a node."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--quick", action="store_true", help="64 engines")
    parsed = parser.parse_args()
    engines = 64 if parsed.quick else parsed.engines
    small = simulate(scenario(64 * SAMPLES_PER_ENGINE, 64, TrainerModel(), {"supply": "sync"}))  # its step time is that of any size
    trainer = TrainerModel(overhead_s=small.step_s * SHARE / (1 - SHARE), sync_s=2.0)
    quiet: SimulatedRun | None = None
    result = {}
    for hours in HOURS:
        started = time.process_time()
        one = scenario(engines * SAMPLES_PER_ENGINE, engines, trainer, HEADLINE)
        failures = Failures(mean_node_s=hours and hours * 3600, engines_per_node=ENGINES_PER_NODE, start_s=AWAY_S)
        outcome = simulate(replace(one, steps=parsed.steps, failures=failures))
        seconds = outcome.steps[-1].end - outcome.steps[0].end
        speed = sum(step.tokens for step in outcome.steps[1:]) / seconds
        if quiet is None:
            quiet, fastest = outcome, speed
        away = sum(min(AWAY_S, outcome.steps[-1].end - at) for at, _ in outcome.deaths) / (engines * outcome.steps[-1].end)
        lost = 1 - speed / fastest
        result[f"{hours:g} h" if hours else "none"] = {"engines lost": len(outcome.deaths), "engine time": away, "throughput": lost}
        often = f"a node is lost every {hours:g} h" if hours else "no losses"
        print(
            f"{often}: {len(outcome.deaths)} engines in {outcome.steps[-1].end / 3600:.2f} h, engine time lost {away:.2%}, "
            f"throughput lost {lost:.2%} ({speed:,.0f} tokens/s, {time.process_time() - started:.0f} s of CPU)",
            file=sys.stderr,
            flush=True,
        )
    first = result[f"{HOURS[1]:g} h"]
    ratio = round(first["engine time"] / first["throughput"], 3) if first["throughput"] > 0 else None
    report = {"name": "node_losses", "ours": round(fastest), "unit": "tokens/s without losses", "engines": engines, "domain": MATH.name}
    print(json.dumps({**report, "losses": result, "ratio": ratio}))


if __name__ == "__main__":
    main()
