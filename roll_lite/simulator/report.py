from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from roll_lite.config.arithmetic_tables import table
from roll_lite.simulator.scenario import Scenario
from roll_lite.simulator.simulation import SimulatedRun

COLUMNS = ("policy", "engines", "step s", "ideal s", "of ideal", "engines in use", "tokens/s", "waits s", "trains s", "staleness")
ABOUT_AS_FAST = 1.05
NOTES = """\
step s          seconds of a step, once the first ones are over
ideal s         what the engines' work takes at full batches, or the trainer's, whichever is more: no policy is faster
of ideal        ideal / step
engines in use  share of what the engines could have generated
waits, trains   seconds of a step in which the trainer waits for its batch, and trains
staleness       versions between a sample's oldest token and the batch: mean / most"""


def table_of_runs(outcomes: Sequence[SimulatedRun]) -> str:
    rows = [
        (
            outcome.scenario.policy,
            str(outcome.scenario.engines),
            seconds(outcome.step_s),
            seconds(outcome.ideal_s),
            f"{outcome.of_ideal:.0%}",
            f"{outcome.utilisation:.0%}",
            f"{outcome.tokens_per_s:,.0f}",
            seconds(fmean(step.waited_s for step in outcome.steady)),
            seconds(fmean(step.trained_s for step in outcome.steady)),
            f"{outcome.staleness:.2f} / {outcome.staleness_max}",
        )
        for outcome in outcomes
        if outcome.steps
    ]
    ends = [f"{outcome.scenario.policy}, {engines(outcome.scenario)}: {outcome.early_end}" for outcome in outcomes if outcome.early_end]
    return "\n\n".join([table(COLUMNS, rows, numbers=True), *(["\n".join(ends)] if ends else [])])


def advice(outcomes: Sequence[SimulatedRun]) -> str:
    """Name the run with the fewest engines, then the least staleness, among runs about as fast as the fastest."""
    outcomes = [outcome for outcome in outcomes if outcome.steps and not outcome.error]
    if not outcomes:
        return ""
    best = min(outcome.step_s for outcome in outcomes)
    chosen = min(
        (outcome for outcome in outcomes if outcome.step_s <= best * ABOUT_AS_FAST),
        key=lambda outcome: (outcome.scenario.engines, outcome.staleness_max, outcome.staleness, outcome.step_s),
    )
    share = f"{ABOUT_AS_FAST - 1:.0%}"
    return (
        f"fewest engines, then least staleness, within {share} of the fastest step ({seconds(best)} s): "
        f"{chosen.scenario.policy}, {engines(chosen.scenario)}, {seconds(chosen.step_s)} s"
    )


def engines(scenario: Scenario) -> str:
    return f"{scenario.engines} {'engine' if scenario.engines == 1 else 'engines'}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}"


def details(outcome: SimulatedRun) -> str:
    scenario = outcome.scenario
    total = sum(model.share for model in scenario.domains)
    slots = f"{scenario.limits.slots} requests ({scenario.mean_slots} on average, as far as the cache goes)"
    took = f"{len(outcome.steps)} steps in {outcome.steps[-1].end:,.0f} simulated seconds"
    lines = [f"{engines(scenario)} of {slots}, {scenario.rollout.prompts_per_step} prompts a step, {took}"]
    shares = outcome.shares
    for model in scenario.domains:
        least = f" and {model.least} in each batch at least" if model.least else ""
        lines.append(f"domain {model.name}: {shares[model.name]:.1%} of the groups, {model.share / total:.1%} wanted{least}")
    ends = {
        "groups filtered": outcome.filtered,
        "groups lost": outcome.lost,
        "samples failed": outcome.failed,
        "requests that lost their place in a full cache": outcome.put_back,
        "engines that died": len(outcome.deaths),
        "engines that hung before they died": len(outcome.hangs),
    }
    lines += [f"{what}: {count}" for what, count in ends.items() if count]
    if outcome.early:
        lines.append(f"samples whose log-probs were begun before their batch was complete: {outcome.early}")
    if outcome.behind_s:
        lines.append(f"seconds in which domains started nothing for later batches, their rewards being behind: {outcome.behind_s:,.0f}")
    return "\n".join(lines)
