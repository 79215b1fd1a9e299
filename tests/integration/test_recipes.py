"""Every recipe of docs/algorithms.md that ships as a configuration: a few real steps of each."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from roll_lite.examples.run_recipes import main as run_recipes

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "examples/configs").glob("tiny_*.yaml") if path.stem != "tiny_base")
Runs = dict[str, Future[list[dict[str, Any]]]]
SMALL = ["rollout.prompts_per_step=12", "validation.enabled=false", "checkpoint.export_model=false", "steps=3"]


def test_the_documentation_names_every_recipe() -> None:
    pages = (ROOT / "docs/algorithms.md").read_text() + (ROOT / "docs/environments.md").read_text()
    named = set(re.findall(r"^\| `(tiny_\w+)`", pages, re.MULTILINE))
    assert named == set(RECIPES)


def run(recipe: str, run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """What each step reported."""
    command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", recipe, f"run_dir={run_dir}", *SMALL, *overrides]
    functions = [str(ROOT / "tests/workers"), str(ROOT / "tests/algorithms"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(functions)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (run_dir / "latest/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "time/step" in record]
    assert len(steps) == 3
    return steps


@pytest.fixture(scope="module")
def recipe_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The recipes asked for, two at a time: a run of three steps mostly waits for its processes to start."""
    chosen = [item for item in request.session.items if getattr(item, "originalname", None) == "test_a_recipe_runs"]
    asked = [item.callspec.params["recipe"] for item in chosen]
    with ThreadPoolExecutor(2) as pool:
        overrides = {"tiny_ppo": ["algorithm.critic_warmup_steps=0"]}
        yield {name: pool.submit(run, name, tmp_path_factory.mktemp(name), *overrides.get(name, [])) for name in asked}
        pool.shutdown(cancel_futures=True)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(recipe: str, recipe_runs: Runs) -> None:
    steps = recipe_runs[recipe].result()
    for record in steps:
        for name in ("actor/loss", "actor/grad_norm", "credit/advantage_std", "actor/ratio", "actor/ess", "masks/samples", "solved/all"):
            assert math.isfinite(record[name]), name
        assert record["actor/grad_norm"] > 0
        if recipe == "tiny_raft":  # which trains on what scored 1, and on nothing else
            assert record["credit/advantage_min"] == record["credit/advantage_max"] == 1
        else:
            assert record["credit/advantage_std"] > 0
            assert record["credit/advantage_min"] < record["credit/advantage_max"]
        assert record["mismatch/max"] < 1e-3 or record["rollout/staleness"] > 0
    if recipe == "tiny_dapo":
        assert all(record["solved/all"] == record["solved/none"] == 0 for record in steps)
    if recipe != "tiny_raft":  # in PPO's first step a fresh value head says 0 of everything, and nothing falls short of that
        assert steps[-1]["credit/advantage_min"] < 0 < steps[-1]["credit/advantage_max"]
    assert steps[-1]["sync/version"] == 2, "every step has moved the policy"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", ["tiny_agent", "tiny_calculator", "tiny_guess"])
def test_a_model_learns_from_episodes(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run, 10 to 15 minutes. Of the 100 held-out prompts, one sample each would be too few to tell learning from noise."""
    monkeypatch.chdir(ROOT)
    assert run_recipes([recipe, f"run_dir={tmp_path}", "validation.samples_per_prompt=3"]) == 0, "its held-out accuracy has not risen"


@pytest.mark.nightly
@pytest.mark.slow
def test_whole_distributions_kept_tokens_and_corrections_go_through_a_run(tmp_path: Path) -> None:
    """Exact KL in reward and loss, truncated sampling with its keep mask, a mismatch correction, adaptive coefficients, two ranks."""
    adaptive = "controller: {name: adaptive, target: 0.05, horizon: 200}"
    truncated = [f"domains.{domain}.sampling.top_k=20" for domain in ("add", "make", "repeat")]
    steps = run(
        "tiny_ppo",
        tmp_path,
        *truncated,
        "rollout.keep_mask=true",
        f"algorithm.kl_in_reward={{coef: 0.01, estimator: full, {adaptive}}}",
        f"algorithm.kl_in_loss={{coef: 0.01, estimator: full, {adaptive}}}",
        "algorithm.mismatch_correction={weight: {level: sequence, mode: mask, low: 0.5, high: 2.0}}",
        "algorithm.advantage={name: gae, lam_critic: 1.0, length_adaptive: 0.5, bootstrap_truncated: true}",
        "algorithm.masks={truncated: mask}",
        "algorithm.critic_warmup_steps=0",
        "actor_train.devices=2",
    )
    for record in steps:
        assert record["mismatch/max"] < 1e-4, "engine and trainer speak of the same truncated distribution"
        assert record["correction/weight"] == pytest.approx(1.0, abs=1e-3) and record["correction/limited"] == 0
        assert math.isfinite(record["critic/explained_variance"]) and "domain/add/critic/explained_variance" in record
    assert abs(steps[0]["credit/kl_in_reward"]) < 1e-6 < steps[-1]["credit/kl_in_reward"]
    assert steps[-1]["credit/kl_coef"] < steps[0]["credit/kl_coef"], "far below its target, the coefficient falls"


@pytest.mark.nightly
@pytest.mark.slow
def test_functions_of_ones_own_go_through_a_run(tmp_path: Path) -> None:
    steps = run(
        "tiny_raft",
        tmp_path,
        "algorithm.advantage={name: custom, function: credit_functions.above_best_of_batch, args: {scale: 0.5}}",
        "~algorithm.policy_loss",
        "+algorithm.policy_loss={name: custom, function: user_losses.asks}",
        "+reference={}",
        "algorithm.masks.function=null",
        "algorithm.masks.response_tokens=[1, 11]",
    )
    assert all(record["credit/advantage_max"] == 0 and record["credit/advantage_min"] == -0.5 for record in steps)
