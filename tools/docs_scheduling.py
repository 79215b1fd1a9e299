"""Pictures of docs/scheduling.md, equal lengths under every policy: `python tools/docs_scheduling.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_lite.config.schema.domains import GroupFilterConfig, RolloutConfig
from roll_lite.simulator.engine import EngineLimits, EngineRates
from roll_lite.simulator.picture import draw_engines
from roll_lite.simulator.report import table_of_runs
from roll_lite.simulator.scenario import Scenario, TrainerModel
from roll_lite.simulator.simulation import SimulatedRun, simulate
from roll_lite.simulator.workload import DomainModel, LogNormal

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SECONDS = 700.0
"""Time axis of every picture."""
STEPS = 24
RESPONSES = DomainModel("math", LogNormal(30, 250), max_tokens=200, prompt_tokens=20, samples_per_prompt=4)
HARD_AND_EASY = replace(RESPONSES, all_right=0.15, all_wrong=0.15)
DYNAMIC = GroupFilterConfig(name="accuracy")


@dataclass(frozen=True)
class Timeline:
    name: str
    title: str
    settings: dict[str, Any]
    responses: DomainModel = RESPONSES

    @property
    def file(self) -> str:
        return f"scheduling_{self.name}.png"

    @property
    def scenario(self) -> Scenario:
        """Two engines of four slots; two waves of responses in a batch."""
        return Scenario(
            domains=(self.responses,),
            engines=2,
            rates=EngineRates(pass_s=0.8, request_s=0.05, prefill_token_s=0.03),
            limits=EngineLimits(slots=4),
            rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=4, request_timeout_s=1e6, **self.settings),
            trainer=TrainerModel(overhead_s=45.0, sync_s=6.0),
            steps=STEPS,
            seed=3,
        )


TIMELINES = (
    Timeline("sync", "sync", {"supply": "sync"}),
    Timeline("one_step_off", "one_step_off, drain", {"supply": "one_step_off", "on_sync": "drain"}),
    Timeline("async_pause", "async, max_staleness 2, pause", {"supply": "async", "max_staleness": 2, "on_sync": "pause"}),
    Timeline("async_abort", "async, max_staleness 2, abort and continue", {"supply": "async", "max_staleness": 2, "on_sync": "abort"}),
    Timeline("async_drain", "async, max_staleness 2, drain", {"supply": "async", "max_staleness": 2, "on_sync": "drain"}),
    Timeline("sync_filter", "sync, with a filter", {"supply": "sync", "filter": DYNAMIC}, HARD_AND_EASY),
    Timeline(
        "sync_oversample",
        "sync, with a filter, oversample 2",
        {"supply": "sync", "filter": DYNAMIC, "oversample": 2.0, "max_staleness": 1},
        HARD_AND_EASY,
    ),
)


def draw(folder: Path, timelines: Sequence[Timeline] = TIMELINES) -> list[SimulatedRun]:
    outcomes = []
    for timeline in timelines:
        outcome = simulate(timeline.scenario, spans=True)
        draw_engines(folder / timeline.file, [outcome], [timeline.title], until=SECONDS)
        outcomes.append(outcome)
    return outcomes


if __name__ == "__main__":
    sys.stdout.write(f"{table_of_runs(draw(IMAGES))}\n")
