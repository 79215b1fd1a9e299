"""Whole runs in which an engine's weights go wrong at an update: the run ends at that update, and names the engine and the version."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from engine_harness import Make, require
from support_models import make_tiny_model

from tests.chaos.test_engine_restarts import wait_until
from tests.integration.test_lost_engines import SETTINGS
from tests.integration.test_runs import Run

FOLDER = Path(__file__).parent / "wrong_weights"
UPDATE = 2
BY_CHECKSUM = rf"actor_infer\[{{engine}}\] does not hold version {UPDATE} after its update: \d+ of \d+ compared tensors differ"
BY_LOG_PROBS = (
    rf"actor_infer\[{{engine}}\], weights of version {UPDATE}: log-probs of \d+ tokens differ from the trainer's by [\d.e-]+ nats"
)
SLOW, NIGHTLY = (pytest.mark.slow,), (pytest.mark.slow, pytest.mark.nightly)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "how", "verify", "engine", "says"),
    [
        *(
            pytest.param(make, how, verify, engine, says, marks=NIGHTLY)
            for how in ("swapped", "unapplied")
            for make, engine in (("vllm", 0), ("sglang", 1))
            for verify, says in (("none", BY_LOG_PROBS), ("auto", BY_CHECKSUM))  # an engine's first three updates are compared whole
        ),
        pytest.param("vllm", "negated", "none", 1, BY_LOG_PROBS, marks=SLOW),
        pytest.param("sglang", "stale", "auto", 1, BY_CHECKSUM, marks=NIGHTLY),
        pytest.param("sglang", "negated", "none", 0, BY_LOG_PROBS, marks=NIGHTLY),
        pytest.param("vllm", "negated", "auto", 1, BY_CHECKSUM, marks=NIGHTLY),
        pytest.param("sglang", "negated", "auto", 1, BY_CHECKSUM, marks=NIGHTLY),
        pytest.param("vllm", "stale", "auto", 0, BY_CHECKSUM, marks=NIGHTLY),
        pytest.param("vllm", "stale", "none", 1, BY_LOG_PROBS, marks=NIGHTLY),
    ],
)
def test_wrong_weights_are_named_at_the_update_that_brought_them(
    make: Make, how: str, verify: str, engine: int, says: str, tmp_path: Path
) -> None:
    require(make)
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    wrong = {"WRONG_HOW": how, "WRONG_FROM_UPDATE": str(UPDATE), "WRONG_ENGINE": str(engine), "PYTHONPATH": path}
    settings = [f"actor_infer.strategy={make}", f"weight_sync.verify={verify}", "steps=5", "checkpoint.every=1"]
    if how == "swapped":
        model = make_tiny_model(tmp_path / "model", "qwen3_moe", tied=False, num_experts=4, sharpness=2.0)
        settings += [f"model.path={model}", "algorithm.entropy_coef=0.3"]
    elif how == "unapplied":
        settings += ["actor_train.lora={rank: 8, engines: adapter}", "actor_train.optimizer.lr=5e-3"]
    with Run(tmp_path, "tiny_grpo", *SETTINGS, *settings, environment=wrong) as run:
        code, output = run.finish(400)
    assert code == 1 and re.search(says.format(engine=engine), output), output
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == UPDATE and summary["exit"].startswith("failed: "), "nothing trained on what it sampled"
    assert sorted(one.name for one in run.folder.glob("checkpoints/step_*")) == ["step_000001", "step_000002"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["vllm", "sglang"])
@pytest.mark.parametrize(("verify", "says"), [("none", BY_LOG_PROBS), ("auto", BY_CHECKSUM)])
def test_wrong_weights_in_one_of_two_tensor_parallel_workers(make: Make, verify: str, says: str, tmp_path: Path) -> None:
    """Member 2 of the transfer group, which WRONG_ENGINE calls 1, is the second worker of the only engine."""
    require(make)
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    wrong = {"WRONG_HOW": "negated", "WRONG_FROM_UPDATE": str(UPDATE), "WRONG_ENGINE": "1", "PYTHONPATH": path}
    engine = [f"actor_infer.strategy={{name: {make}, tensor_parallel: 2}}", "actor_infer.devices=2"]
    with Run(tmp_path, "tiny_grpo", *SETTINGS, *engine, f"weight_sync.verify={verify}", "steps=5", environment=wrong) as run:
        code, output = run.finish(400)
    assert code == 1 and re.search(says.format(engine=0), output), output
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == UPDATE


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_rounding_in_asynchronous_bfloat16_and_float8_is_no_alarm(make: Make, tmp_path: Path) -> None:
    """The engine rounds all matrices to float8, as one with fp8 weights does."""
    require(make)
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    rounded = {"WRONG_HOW": "rounded", "WRONG_FROM_UPDATE": "0", "WRONG_ENGINE": "0", "PYTHONPATH": path}
    settings = [f"actor_infer.strategy={make}", "actor_infer.devices=1", "weight_sync.verify=none", "model.dtype=bfloat16", "steps=12"]
    with Run(tmp_path, "tiny_grpo", *SETTINGS, *settings, "rollout.supply=async", "rollout.max_staleness=2", environment=rounded) as run:
        code, output = run.finish(400)
    assert code == 0, output
    differences = [line["mismatch/mean"] for line in run.metrics() if "mismatch/mean" in line]
    assert len(differences) == 12 and max(differences) > 1e-3, "rounding can be seen"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checkpoints", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_damaged_replica_is_named_before_it_is_saved(checkpoints: int, tmp_path: Path) -> None:
    require("vllm")
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    wrong = {"WRONG_HOW": "replica", "WRONG_FROM_UPDATE": str(UPDATE), "PYTHONPATH": path}
    settings = ["actor_infer.devices=1", "actor_train.devices=2", "algorithm.mini_batches=1", "steps=5", f"checkpoint.every={checkpoints}"]
    every = ["actor_train.compare_replicas_every=2", "actor_train.strategy.distributed_optimizer=false"]
    with Run(tmp_path, "tiny_grpo", *SETTINGS, *settings, *every, environment=wrong) as run:
        code, output = run.finish(400)
    says = rf"actor_train: data-parallel replicas hold different weights after step {UPDATE}: rank 0 and rank 1 differ in .*linear_proj"
    assert code == 1 and re.search(says, output), output
    assert sorted(one.name for one in run.folder.glob("checkpoints/step_*")) == ["step_000001"] * checkpoints


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("signals_arrive")
@pytest.mark.parametrize(("old_log_probs", "trained"), [("recompute", 0), ("current", 1)])
def test_a_run_that_pauses_continues_when_it_is_told_so(old_log_probs: str, trained: int, tmp_path: Path) -> None:
    """Every later step samples with the wrong weights, too: it pauses again. With `current` the difference is known after the update."""
    require("vllm")
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    wrong = {"WRONG_HOW": "negated", "WRONG_FROM_UPDATE": str(UPDATE), "WRONG_ENGINE": "1", "PYTHONPATH": path}
    settings = ["weight_sync.verify=none", "steps=9", "rollout.on_mismatch=pause", f"algorithm.old_log_probs={old_log_probs}"]
    with Run(tmp_path, "tiny_grpo", *SETTINGS, *settings, environment=wrong) as run:
        for pauses in (1, 2):
            wait_until(run, lambda: (run.run_dir / "latest" / "paused.txt").exists(), 300)
            says = BY_LOG_PROBS.format(engine=1).replace(f"version {UPDATE}:", f"version {UPDATE + pauses - 1}:")
            assert re.match(says, (run.folder / "paused.txt").read_text())
            assert len(run.metrics()) == UPDATE + pauses - 1 + trained
            (run.folder / "paused.txt").unlink()
        wait_until(run, lambda: (run.folder / "paused.txt").exists())
        run.process.send_signal(signal.SIGINT)
        code, output = run.finish(100)
    assert output.count("the run continues") == 2 and code == 130
    assert json.loads((run.folder / "summary.json").read_text())["exit"] == "interrupted"
