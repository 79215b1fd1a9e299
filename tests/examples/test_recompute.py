"""Finished runs, computed once more by a script that shares nothing with them but the formulas."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from support_models import make_tiny_model
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from roll_lite.config.checks.notes import RECOMPUTED_LOSSES, without_formula
from roll_lite.config.loading import load_config
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.losses import PolicyLossConfig
from roll_lite.pipeline.batch_files import batches_are_written
from roll_lite.workers.credit import assign_credit
from tests.workers.test_credit import ESTIMATORS, algorithm, alone, many_rows

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "validation.enabled=false"]
TEMPERATURES = ["domains.add.sampling.temperature=0.6", "domains.repeat.sampling.temperature=1.5"]
SCHEDULE = "{warmup_steps: 2, decay: cosine, min_lr: 1.0e-6, weight_decay: 0.1, clip_grad: 0.5, lr: 2.0e-4}"
OF_CRITIC = "{warmup_steps: 3, decay: wsd, decay_steps: 9, decay_shape: minus_sqrt, min_lr: 1.0e-5, weight_decay: 0.2, lr: 5.0e-4}"
PPO = [
    "steps=4",
    "actor_train.devices=2",
    f"actor_train.optimizer={SCHEDULE}",
    f"critic.optimizer={OF_CRITIC}",
    "algorithm.critic_warmup_steps=1",
    "algorithm.advantage.bootstrap_truncated=true",
    "algorithm.kl_in_reward={coef: 0.05, estimator: k1, controller: {name: adaptive, target: 0.01, horizon: 50}}",
    "algorithm.kl_in_loss={coef: 0.1, estimator: k3}",
    "algorithm.entropy_coef=0.001",
    "algorithm.aggregation=sequence_mean_token_mean",
]
GRPO = ["steps=3", "algorithm.whiten_advantages=true", "actor_train.optimizer.decay=linear"]
STOPPED = [
    *("steps=3", "actor_train.optimizer.decay=linear", "algorithm.old_log_probs=recompute"),
    *("algorithm.ppo_epochs=2", "algorithm.mini_batches=2", "algorithm.early_stop_kl=1.0e-9"),
]
TRUNCATED = [
    *("steps=3", "algorithm.old_log_probs=recompute", "actor_train.optimizer.lr=5.0e-5"),
    *("domains.add.sampling.top_k=5", "domains.make.sampling.top_p=0.9", "domains.repeat.sampling.min_p=0.05"),
]
SUPERVISED = "algorithm.ptx={data: {train: examples/data/add_train.jsonl, answer: answer}, coef: 0.1, samples: 4, max_tokens: 64}"
LORA = ["steps=3", SUPERVISED, "algorithm.kl_in_loss={coef: 0.1, estimator: k3}", "algorithm.entropy_coef=0.001"]
CORRECTED = [
    *(
        "steps=3",
        "actor_train.optimizer.lr=1.0e-4",
        "rollout.supply=async",
        "rollout.max_staleness=1",
        "algorithm.mini_batches=4",
        "algorithm.old_log_probs=recompute",
    ),
    "algorithm.mismatch_correction={weight: {level: geometric, mode: mask, low: 0.9, high: 1.1}, filters: [{estimator: k3, high: 0.1}, "
    "{level: sequence_min, low: 0.5}, {estimator: difference, high: 0.2}, {level: sequence_sum, estimator: k1, low: -1, high: 1}]}",
]
EXPERTS = [
    *("steps=5", "rollout.keep_mask=true", "domains.add.sampling.top_k=6", "algorithm.old_log_probs=recompute"),
    *("actor_train.balance_coef=0.1", "actor_train.ema={decay: 0.5}", "reference={refresh: {every: 2, weights: ema}}"),
    "algorithm.kl_in_loss={coef: 0.1, estimator: k3}",
]
BOTH = {"rollout_log_probs", "advantages", "loss_weight", "learning rate", "actor loss", "actor gradient norm", "actor weights"}
OF_KL = {"old_log_probs", "ref_log_probs"}
OF_PPO = OF_KL | {"values", "returns", "critic loss", "critic gradient norm", "critic weights"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=environment)


def differences(output: str) -> dict[str, float]:
    """The table that the script prints."""
    lines = re.findall(r"^(\w[\w ]*?) {2,}(\d+) +(\d\.\d\de[+-]\d\d)  ", output, re.MULTILINE)
    return {name: float(largest) for name, count, largest in lines if int(count)}


@pytest.mark.parametrize(
    ("recipe", "settings", "compared"),
    [
        pytest.param("tiny_grpo", GRPO, BOTH, marks=pytest.mark.nightly),
        pytest.param("tiny_grpo", STOPPED, BOTH | {"old_log_probs"}, marks=pytest.mark.nightly),
        pytest.param("tiny_ppo", PPO, BOTH | OF_PPO, marks=pytest.mark.slow),
        pytest.param("tiny_lora", LORA, BOTH | OF_KL, marks=pytest.mark.nightly),
        pytest.param("tiny_grpo", CORRECTED, BOTH - {"rollout_log_probs"} | {"old_log_probs"}, marks=pytest.mark.slow),
        pytest.param("tiny_grpo", EXPERTS, BOTH | OF_KL | {"average weights"}, marks=pytest.mark.nightly),
    ],
)
def test_losses_and_weights_come_out_again(recipe: str, settings: list[str], compared: set[str], tmp_path: Path) -> None:
    """A run in one process: everything but Ray and engines. Groups are sampled at two temperatures; token 0, the pad token, is read."""
    settings = [setting for setting in settings if "devices" not in setting]
    if settings == EXPERTS:
        settings = [*settings, f"model.path={make_tiny_model(tmp_path / 'experts', 'qwen3_moe', tied=False)}"]
    run = python("tests/examples/one_process_run.py", str(tmp_path / "run"), recipe, *settings)
    assert run.returncode == 0, run.stdout + run.stderr
    comes_out_again(tmp_path / "run", compared)
    if recipe == "tiny_ppo":
        changed_advantages_are_told(tmp_path / "run")
        the_last_step_may_be_missing(tmp_path / "run", compared)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("recipe", "settings", "compared"),
    [
        pytest.param("tiny_grpo", GRPO, BOTH, marks=pytest.mark.nightly),
        pytest.param("tiny_grpo", TRUNCATED, BOTH | {"old_log_probs"}, marks=pytest.mark.nightly),
        ("tiny_ppo", PPO, BOTH | OF_PPO),
    ],
)
def test_a_whole_runs_losses_and_weights_come_out_again(recipe: str, settings: list[str], compared: set[str], tmp_path: Path) -> None:
    run = python(
        "examples/start_rlvr_pipeline.py", f"--config-name={recipe}", *SMALL, *TEMPERATURES, *settings, f"run_dir={tmp_path / 'runs'}"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()]
    between = {name: value for name, value in metrics[0].items() if name.endswith("mismatch/mean")}
    assert len(between) == 4 and (settings == TRUNCATED or max(between.values()) < 1e-5), between
    elsewhere = tmp_path / "moved"
    shutil.move((tmp_path / "runs" / "latest").resolve(), elsewhere)
    comes_out_again(elsewhere, compared)


def comes_out_again(folder: Path, compared: set[str]) -> None:
    again = python("examples/recompute.py", str(folder))
    assert again.returncode == 0, again.stdout + again.stderr
    found = differences(again.stdout)
    assert set(found) == compared
    for name in ("advantages", "returns", "loss_weight", "actor loss", "critic loss", "actor weights", "critic weights"):
        assert found.get(name, 0.0) < 2e-5, again.stdout


def the_last_step_may_be_missing(folder: Path, compared: set[str]) -> None:
    shutil.rmtree(max((folder / "batches").iterdir()))
    assert set(differences(python("examples/recompute.py", str(folder)).stdout)) == compared - {"actor weights", "critic weights"}


def changed_advantages_are_told(folder: Path) -> None:
    file = next((folder / "batches" / "step_000002").glob("rows_*.parquet"))
    table = pq.read_table(file)
    advantages = [[2 * value + 0.1 for value in row] for row in table["advantages"].to_pylist()]
    pq.write_table(table.set_column(table.column_names.index("advantages"), "advantages", pa.array(advantages)), file)
    other = python("examples/recompute.py", str(folder))
    assert other.returncode == 1 and re.search(r"^advantages .* step 2, sample \d+  <- too large$", other.stdout, re.MULTILINE)


def test_truncated_sampling_keeps_the_tokens_that_transformers_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of kept tokens; a dropped one has none. The last setting is the whole distribution."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script: Any = importlib.import_module("recompute")
    logits = torch.randn(200, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    ids = torch.arange(201)[None] % 30
    for top_k, top_p, min_p in ((5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (4, 0.7, 0.05), (0, 1.0, 0.0)):
        kept = MinPLogitsWarper(min_p)(ids, logits)
        kept = TopKLogitsWarper(top_k)(ids, kept) if top_k else kept
        expected = TopPLogitsWarper(top_p)(ids, kept).log_softmax(-1).gather(-1, ids[0, 1:, None])[None, :, 0]
        settings = [{"top_k": top_k, "top_p": top_p, "min_p": min_p}]
        exact, *_ = script.truncated(logits.log_softmax(-1)[None], ids, settings)
        torch.testing.assert_close(exact, expected)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("advantage", ESTIMATORS, ids=lambda config: "-".join(str(value) for value in config.values()))
def test_every_estimators_advantages_come_out_again(
    advantage: dict[str, Any], whiten: bool, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows drawn at random, with KL in the reward; with `turns` responses are rewarded one by one and samples have several rows."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script: Any = importlib.import_module("recompute")
    rows, config = many_rows(), algorithm(advantage, whiten, "k1")
    config = AlgorithmConfig.model_validate({**config.model_dump(), "reward": {"scale": 2.0}})
    rows.columns.update(index=torch.arange(24), group=torch.arange(24) // 6)
    if turns:
        of_first = torch.arange(24) // 3 * 3  # three rows make a sample
        rows.columns.update(index=of_first, branch=torch.arange(24) % 3)
        rows.columns.update({name: rows.columns[name][of_first] for name in ("reward", "train_weight", "baseline_score")})
        rows.columns["turn_rewards"] = torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(1))
    expected = assign_credit(rows, 0, config, 0.1, alone)

    columns = {name: column.tolist() for name, column in rows.columns.items()}
    columns["response_mask"] = [[False, *mask] for mask in rows.mask.tolist()]
    step: Any = SimpleNamespace(facts={"kl_coefs": {"kl_in_reward": 0.1}})
    step.rows = {number: script.Row({name: column[number] for name, column in columns.items()}) for number in range(24)}
    found = script.credit(SimpleNamespace(algorithm=config.model_dump()), step)
    if advantage["name"] == "custom":
        assert found is None
        return
    assert set(found) == {"advantages", "returns"} - (set() if advantage["name"] == "gae" else {"returns"})
    for name, of_rows in found.items():
        again = torch.stack([of_rows[number] for number in range(24)]).float()
        torch.testing.assert_close(again, getattr(expected, name), rtol=1e-5, atol=1e-5)


def test_log_probs_of_another_policy_or_precision_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script: Any = importlib.import_module("recompute")
    settings = (("sync", None, "full", True), ("sync", "float32", "full", True), ("async", None, "full", False))
    for supply, dtype, mode, compared in (*settings, ("sync", "bfloat16", "full", False), ("sync", None, "train_only", False)):
        config = {"mode": mode, "rollout": {"supply": supply}, "actor_infer": {"dtype": dtype}, "model": {"dtype": "float32"}}
        assert script.sampled_by_the_policy_of_the_step(config) is compared, config


def test_the_check_knows_what_the_script_has_formulas_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script: Any = importlib.import_module("recompute")
    assert script.LOSSES == RECOMPUTED_LOSSES
    numbers, mask = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    losses = {one.model_fields["name"].default: one for one in get_args(PolicyLossConfig)}
    assert set(script.LOSSES) < set(losses)
    for name in script.LOSSES:
        assert script.policy_loss(losses[name]().model_dump(), numbers, numbers, numbers + 1, mask).shape == (1, 3)
    for settings, told in (
        ("algorithm.policy_loss={name: gmpo}", "algorithm.policy_loss.name: gmpo"),
        ("algorithm.kl_in_reward={coef: 0.1, estimator: full}", "algorithm.kl_in_reward.estimator: full"),
        ("algorithm.kl_in_loss={coef: 0.1, estimator: full}", "algorithm.kl_in_loss.estimator: full"),
    ):
        overrides = [settings, "algorithm.old_log_probs=recompute", *(["reference={}"] if "kl_" in settings else [])]
        config = load_config("tiny_grpo", ROOT / "examples/configs", overrides, files=False)
        assert without_formula(config) == [told] and not batches_are_written(config)
        assert [what for what in script.without_formula(config.model_dump(mode="json")) if told in what]


def test_what_cannot_be_recomputed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script: Any = importlib.import_module("recompute")
    refused = {
        r"algorithm\.routing_replay: train": {"algorithm": {"routing_replay": "train"}},
        r"computed in bfloat16 \(model\.dtype\)": {"model": {"dtype": "bfloat16"}},
    }
    for told, sections in refused.items():
        given = {"algorithm": {}, "actor_train": {"balance_coef": 0.0}, "critic": None, "reference": None, **sections}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(given))
        with pytest.raises(script.NotRecomputable, match=told):
            script.Run(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"algorithm": {}, "actor_train": {}}))
    with pytest.raises(script.NotRecomputable, match=r"has no start/models.json: was the run made with batches.write: never\?"):
        script.Run(tmp_path)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "models.json").write_text('{"resumed_from": "runs/a/checkpoints/step_000010", "models": {}}')
    with pytest.raises(script.NotRecomputable, match="went on from runs/a/checkpoints/step_000010"):
        script.Run(tmp_path)
