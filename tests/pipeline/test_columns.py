"""What credit and losses read is there when they read it: nothing is read that nobody writes, and nothing is computed for nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_models import make_tiny_model

from roll_lite.config.arithmetic import actor_is_reference
from roll_lite.config.loading import load_config
from roll_lite.data.keys import KEYS, Columns
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.workers.actor import ActorWorker, AdaptedActorWorker
from roll_lite.workers.model import CriticWorker, ReferenceWorker

ROOT = Path(__file__).resolve().parents[2]
FULL = "algorithm.kl_in_reward={coef: 0.1, estimator: full}"
RECOMPUTE = "algorithm.old_log_probs=recompute"
REFERENCE = "reference={devices: 1}"


def wanted(monkeypatch: pytest.MonkeyPatch, recipe: str, *overrides: str) -> tuple[RLVRPipeline, dict[str, list[str]]]:
    """What each model of the recipe computes in a step."""
    monkeypatch.chdir(ROOT)
    config = load_config(recipe, ROOT / "examples/configs", list(overrides))
    pipeline = RLVRPipeline(config, None, None, SimpleNamespace(timers=None), None, None)  # type: ignore[arg-type]
    workers: dict[str, Any] = {"actor": AdaptedActorWorker if actor_is_reference(config) else ActorWorker}
    workers |= {"reference": ReferenceWorker} if config.reference else {}
    workers |= {"critic": CriticWorker} if config.critic else {}
    return pipeline, {role: pipeline.wanted_of(SimpleNamespace(worker=worker)) for role, worker in workers.items()}  # type: ignore[arg-type]


CASES: list[tuple[str, list[str], dict[str, list[str]]]] = [
    ("tiny_grpo", [], {"actor": []}),
    ("tiny_grpo", [RECOMPUTE], {"actor": ["old_log_probs", "old_entropy"]}),
    ("tiny_grpo", ["algorithm.old_log_probs=rollout"], {"actor": []}),
    ("tiny_grpo", [REFERENCE, "algorithm.kl_in_loss.coef=0.1"], {"actor": [], "reference": ["ref_log_probs"]}),
    (
        "tiny_grpo",
        [RECOMPUTE, REFERENCE, FULL],
        {"actor": ["old_log_probs", "old_entropy", "old_distribution"], "reference": ["ref_log_probs", "ref_distribution"]},
    ),
    (
        "tiny_grpo",
        [REFERENCE, "algorithm.kl_in_loss={coef: 0.1, estimator: full}"],
        {"actor": [], "reference": ["ref_log_probs", "ref_distribution"]},
    ),
    ("tiny_ppo", [], {"actor": ["old_log_probs", "old_entropy"], "reference": ["ref_log_probs"], "critic": ["values"]}),
    ("tiny_lora", [], {"actor": ["ref_log_probs", "old_log_probs", "old_entropy"]}),
    ("tiny_lora", ["algorithm.kl_in_loss.coef=0"], {"actor": ["old_log_probs", "old_entropy"]}),
    ("tiny_lora", [REFERENCE], {"actor": ["old_log_probs", "old_entropy"], "reference": ["ref_log_probs"]}),
    (
        "tiny_ppo",
        ["algorithm.advantage.bootstrap_truncated=true"],
        {"actor": ["old_log_probs", "old_entropy"], "reference": ["ref_log_probs"], "critic": ["values", "final_value"]},
    ),
]


@pytest.mark.parametrize(("recipe", "overrides", "expected"), CASES)
def test_a_model_computes_what_somebody_reads(
    monkeypatch: pytest.MonkeyPatch, recipe: str, overrides: list[str], expected: dict[str, list[str]]
) -> None:
    assert wanted(monkeypatch, recipe, *overrides)[1] == expected


def test_experts_are_recorded_where_they_are_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "experts", "qwen3_moe", vocab_size=258)
    given = [RECOMPUTE, f"model.path={model}", "actor_infer.strategy.name=sglang"]
    for word, column in (("none", None), ("train", "old_experts")):
        pipeline, computed = wanted(monkeypatch, "tiny_grpo", *given, f"algorithm.routing_replay={word}")
        assert computed == {"actor": ["old_log_probs", "old_entropy", *([column] if column else [])]}
        assert column is None or column in pipeline.actor_columns.reads


RECIPES = [path.stem for path in sorted((ROOT / "examples/configs").glob("tiny_*.yaml")) if path.stem != "tiny_base"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_everything_that_is_read_has_been_written(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    pipeline, computed = wanted(monkeypatch, recipe)
    there = {name for name, key in KEYS.items() if key.writer in ("rollout service", "engine worker", "driver")}
    there |= {column for columns in computed.values() for column in columns}
    assert there >= {*pipeline.credit_columns.reads}
    there |= {*pipeline.credit_columns.writes}
    assert there >= {*pipeline.actor_columns.reads}
    assert "critic" not in computed or there >= {*pipeline.critic_columns.reads}


def test_columns_are_those_of_the_table_and_optional_ones_are_taken_where_they_are() -> None:
    columns = Columns(reads=("input_ids", "advantages"), if_there=("kept_ids", "ref_log_probs"))
    assert columns.of(["input_ids", "ref_log_probs", "score"]) == ["input_ids", "advantages", "ref_log_probs"]
    with pytest.raises(AssertionError, match="advantage"):
        Columns(reads=("advantage",))
