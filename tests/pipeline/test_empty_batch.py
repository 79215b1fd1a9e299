"""A batch of which the filter has left nothing (rollout.filter.when_short: continue): the step trains nothing, and says so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from roll_lite.config.loading import load_config
from roll_lite.distributed.dataflow import Batch
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.shaping import RewardShaping
from roll_lite.scheduler.filters import HIGH, LOW
from roll_lite.scheduler.stats import DomainStats, RolloutStats
from roll_lite.workers.rollout_output import rows_of, tokens_of

ROOT = Path(__file__).resolve().parents[2]
OTHER_DOMAINS = ("tiny_base", "tiny_guess", "tiny_calculator", "tiny_agent")
RECIPES = sorted(path.stem for path in (ROOT / "examples/configs").glob("tiny_*.yaml") if path.stem not in OTHER_DOMAINS)


def mixed() -> DomainStats:
    """Every number another one."""
    counts = {"requested": 2, "admitted": 3, "scored": 5, "response_tokens": 11, "batch_tokens": 13}
    before = {"requested_share": 0.1, "generated_share": 0.4}
    after = {"realised_share": 0.5, "token_share": 0.7}
    return DomainStats(stale_by_cause=Counter(unfinished=17, surplus=19), **counts, **before, **after)


MIXED = (
    {"requested": 2, "admitted": 3, "scored_samples": 5, "response_tokens": 11, "batch_tokens": 13}
    | {"stale_groups": 36, "stale_unfinished": 17, "stale_surplus": 19}
    | {"share_requested": 0.1, "share_generated": 0.4, "share_realised": 0.5, "share_tokens": 0.7}
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_batch_goes_through_the_step_up_to_the_training(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    further = [] if recipe == "tiny_remax" else ["algorithm.reward.normalize={over: batch}"]
    config = load_config(recipe, ROOT / "examples/configs", ["trackers=[{name: jsonl}]", *further])
    journal = Journal(config, tmp_path)
    journal.connect()
    stats = RolloutStats({name: DomainStats() for name in config.domains}, wall_s=1.0)
    stats.domains["add"] = mixed()
    stats.domains["add"].filtered[LOW] += 7
    stats.domains["make"].filtered[HIGH] += 2
    batch = Batch(rows_of([], {}), [tokens_of([])])
    with journal.step(1):
        journal.rollouts(batch.rows, stats, 0, {})
        shaped = RewardShaping(config)(batch)
        journal.shaped(shaped.rows, shaped.masked)
    assert len(shaped.batch) == 0
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert record["rollout/filtered_groups"] == 9 and record["rollout/samples"] == 0
    words = {name: value for name, value in record.items() if name.startswith("rollout/filtered_") and name != "rollout/filtered_groups"}
    filters = config.rollout.filter is not None
    assert words == ({"rollout/filtered_low": 7, "rollout/filtered_high": 2, "rollout/filtered_function": 0} if filters else {})
    assert record.get("domain/add/rollout/filtered_low") == (7 if filters else None)
    assert {name: record[f"domain/add/rollout/{name}"] for name in MIXED} == MIXED
