"""Whole runs in which training ranks or the rollout service are killed or stopped: they start again, and nothing else changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from left_behind import Traces

from tests.chaos.test_engine_restarts import wait_until
from tests.integration.test_runs import ROOT, Run, until_gone, worker

NIGHTLY = pytest.mark.nightly
SETTINGS = [
    "rollout.prompts_per_step=6",
    "deterministic=true",
    "validation.samples_per_prompt=1",
    "checkpoint.every=3",
    "batches.write=always",
    "limits.silence=10",
]
DIES_IN_A_CALL = Path(__file__).parent / "dies_in_a_call"
RETURNED = r"(\w+) is back at step (\d+), (\d+) s after its loss"


def disturbed(run: Run, victims: list[tuple[int, str, str]], steps: int, further: int = 0) -> str:
    """Kill or stop one worker after another, each as soon as the samples of its step are there; returns what the run said. `further`:
    number of losses that the run sees to itself."""
    for number, (step, name, how) in enumerate(victims):
        run.wait_for_step(step)
        getattr(worker(run.tree(), name), how)()
        wait_until(run, lambda: restarts(run) > number)  # noqa: B023
    code, output = run.finish(400)
    assert code == 0, output
    assert len(re.findall(RETURNED, output)) == len(victims) + further, output
    assert len([line for line in run.metrics() if "time/step" in line]) == steps
    audit = subprocess.run([sys.executable, "examples/audit.py", run.folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert audit.returncode == 0 and "the ledger adds up" in audit.stdout, audit.stdout
    return output


def restarts(run: Run) -> int:
    return (run.folder / "ledger.jsonl").read_text().count('"event": "restart"')


def services(run: Run, *roles: str) -> set[tuple[str, int]]:
    """(role, process id) of what the loss of a training rank leaves alone."""
    return {(one["role"], one["pid"]) for one in json.loads((run.folder / "processes.json").read_text()) if one["role"] in roles}


def assert_equal(run: Run, quiet: Run) -> None:
    """Both runs have the same weights, updates and results, bit for bit."""
    for name in ("model/model.safetensors", "updates.jsonl"):
        same = (run.folder / name).read_bytes() == (quiet.folder / name).read_bytes()
        assert same, name
    kept = ("reward/score", "actor/grad_norm", "actor/loss", "validation/accuracy", "rollout/samples", "mismatch/mean")
    ours, theirs = ([(line["step"], *(line.get(name) for name in kept)) for line in one.metrics()] for one in (run, quiet))
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("config", "overrides", "victims"),
    [
        pytest.param(
            "tiny_grpo",
            ["actor_train.devices=2"],
            [(2, "ActorWorker", "kill"), (4, "RolloutWorker", "kill"), (5, "ActorWorker", "suspend")],
            id="two data-parallel ranks and the rollout service",
        ),
        pytest.param(
            "tiny_ppo",
            [],
            [(2, "CriticWorker", "kill"), (4, "ReferenceWorker", "kill"), (6, "ActorWorker", "kill")],
            id="critic, reference and actor",
            marks=NIGHTLY,
        ),
        pytest.param(
            "tiny_grpo",
            ["actor_train.offload=true", "actor_infer.offload=true", "actor_train.devices=[0]", "actor_infer.devices=[0]"],
            [(2, "ActorWorker", "kill"), (3, "RolloutWorker", "kill"), (5, "ActorWorker", "kill")],
            id="all on one device",
            marks=NIGHTLY,
        ),
        pytest.param(
            "tiny_grpo",
            ["checkpoint.every=0"],
            [(2, "RolloutWorker", "suspend"), (4, "RolloutWorker", "kill"), (5, "ActorWorker", "kill")],
            id="without a checkpoint",
            marks=NIGHTLY,
        ),
    ],
)
def test_what_is_lost_changes_nothing(
    tmp_path: Path, config: str, overrides: list[str], victims: list[tuple[int, str, str]], undisturbed: Any
) -> None:
    quiet = undisturbed(config, *SETTINGS, *overrides, "steps=7")
    with Run(tmp_path / "disturbed", config, *SETTINGS, *overrides, "steps=7") as run:
        run.wait_for_step(1)
        processes, engines = run.tree(), services(run, "actor_infer")
        disturbed(run, victims, 7)
        assert services(run, "actor_infer") == engines != set()
        assert_equal(run, quiet)
    assert until_gone(processes, 60) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "again"), [("train_step", ""), ("copy_state", ", and repeats the updates of steps 4 to 4")])
def test_from_a_copy_in_memory_no_step_is_repeated(tmp_path: Path, method: str, again: str, undisturbed: Any) -> None:
    """Except one whose copy was not complete. Nothing is left in shared memory."""
    settings = ["tiny_grpo", *SETTINGS, "actor_train.devices=2", "algorithm.mini_batches=1", "steps=7", "checkpoint.every=0"]
    quiet, traces = undisturbed(*settings), Traces(tmp_path / "traces")
    path = os.pathsep.join([str(DIES_IN_A_CALL), *filter(None, [os.environ.get("PYTHONPATH")])])
    dies = {"DIES_MARK": str(tmp_path / "died"), "DIES_IN": method, "DIES_AT_CALL": "4", "PYTHONPATH": path}
    with Run(tmp_path / "disturbed", *settings, "checkpoint.in_memory_every=1", environment=dies) as run:
        output = " ".join(disturbed(run, [(6, "RolloutWorker", "kill")], 7, further=1).split())
        assert_equal(run, quiet)
    assert f"actor_train starts again from the copy in memory of step 3{again} (more" in output, output
    traces.assert_nothing_shared()


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("config", "devices", "method", "phase", "role", "call"),
    [
        ("tiny_grpo", "actor_train.devices=2", "train_step", "train", "actor_train", "train"),
        ("tiny_ppo", "critic.devices=[1, 2]", "train_step", "train", "critic", "train"),
        ("tiny_ppo", "reference.devices=2", "forward", "log_probs", "reference", "compute"),
    ],
)
def test_a_rank_that_hangs_is_found_though_all_answer(
    tmp_path: Path, config: str, devices: str, method: str, phase: str, role: str, call: str, undisturbed: Any
) -> None:
    """In training, the other rank waits for it in a collective of gloo's. Both are shown with their stacks."""
    settings = [config, *SETTINGS, devices, "algorithm.mini_batches=1", "steps=7", f"limits.{phase}=15"]
    quiet = undisturbed(*settings)
    path = os.pathsep.join([str(DIES_IN_A_CALL), *filter(None, [os.environ.get("PYTHONPATH")])])
    hangs = {"DIES_MARK": str(tmp_path / "hangs"), "DIES_IN": method, "DIES_AT_CALL": "5", "HANGS": "1", "PYTHONPATH": path}
    with Run(tmp_path / "disturbed", *settings, environment=hangs) as run:
        run.wait_for_step(1)
        kept = ("actor_infer", "rollouts", "rewards")
        processes, before = run.tree(), services(run, *kept)
        output = disturbed(run, [], 7, further=1)
        assert services(run, *kept) == before and {role for role, _ in before} == set(kept)
        assert_equal(run, quiet)
        blamed, *waiting = re.split(r"rank 0 stands at", (run.folder / "failure.txt").read_text())
    assert f"{role} rank 1 is lost in {call}: no answer after 15 s from rank" in " ".join(output.split())
    assert f"{DIES_IN_A_CALL}/sitecustomize.py" in blamed and "waits in" not in blamed
    assert len(waiting) == (phase == "train")
    for other in waiting:
        assert re.search(r"waits in collective gloo:\w+ number \d+ of \d+ DATA_PARALLEL", other), other
        assert "in finalize_model_grads" in other
    assert until_gone(processes, 60) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("early", [[], ["rollout.stream_log_probs=true", "actor_infer.devices=[1]"]], ids=["", "with early passes"])
def test_an_asynchronous_run_loses_no_prompt(tmp_path: Path, early: list[str]) -> None:
    settings = ["rollout.prompts_per_step=8", "checkpoint.every=5", "limits.silence=10", "rollout.restarts=10", "actor_train.restarts=10"]
    victims = [(3, "RolloutWorker", "kill"), (8, "ActorWorker", "kill"), (13, "RolloutWorker", "suspend"), (18, "ActorWorker", "kill")]
    with Run(tmp_path, "tiny_async", *settings, *early, "validation.every=4", "steps=24") as run:
        processes = run.tree()
        disturbed(run, victims, 24)
        assert all(line["rollout/failed"] == 0 for line in run.metrics() if "time/step" in line)
    assert until_gone(processes, 60) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_chaos_kills_stops_and_slows(tmp_path: Path) -> None:
    """All faults of `chaos` that need one machine only. A stopped process is found and replaced; a slow one is left alone."""
    chaos = "chaos={every_s: 8, seed: 4, most: 9, actions: {kill: 1, stop: 1, slow: 1}, slow_s: 5}"
    restarts = [f"{role}.restarts=100" for role in ("actor_train", "actor_infer", "rollout")]
    settings = ["rollout.prompts_per_step=8", "checkpoint.every=5", "limits.silence=10", "validation=null", "steps=100"]
    with Run(tmp_path, "tiny_async", *settings, *restarts, chaos) as run:
        run.wait_for_step(1)
        processes = run.tree()
        code, output = run.finish(800)
    assert code == 0, output
    assert set(re.findall(r"chaos: (\w+) of", output)) == {"kill", "stop", "slow"}, output
    steps = [line for line in run.metrics() if "time/step" in line]
    assert len(steps) == 100 and all(line["rollout/failed"] == 0 for line in steps)
    audit = subprocess.run([sys.executable, "examples/audit.py", run.folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert audit.returncode == 0 and "the ledger adds up" in audit.stdout, audit.stdout
    assert until_gone(processes, 60) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("config", "role"), [("tiny_grpo", "rewards"), ("tiny_calculator", "environments")])
def test_killed_reward_and_environment_workers_cost_no_sample(tmp_path: Path, config: str, role: str) -> None:
    chaos = f"chaos={{every_s: 3, seed: 2, most: 6, targets: [{role}]}}"
    settings = ["rollout.prompts_per_step=8", "checkpoint.every=0", "validation=null", "steps=60"]
    with Run(tmp_path, config, *settings, chaos) as run:
        run.wait_for_step(1)
        processes = run.tree()
        code, output = run.finish(800)
    assert code == 0, output
    assert output.count(f"chaos: kill of {role} rank") == 6, output
    steps = [line for line in run.metrics() if "time/step" in line]
    assert len(steps) == 60 and all(line["rollout/failed"] == 0 for line in steps)
    audit = subprocess.run([sys.executable, "examples/audit.py", run.folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert audit.returncode == 0 and "the ledger adds up" in audit.stdout, audit.stdout
    assert until_gone(processes, 60) == []
