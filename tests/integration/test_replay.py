"""Record and replay with whole runs, started as a user starts them: the real Megatron-Core, vLLM and Ray."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet as pq
import pytest
import torch
from engine_harness import require
from support_dumps import assert_same

from roll_lite.data.dumps import load_dump
from tests.integration.test_runs import Run, assert_generates_with_transformers

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "validation.enabled=false", "deterministic=true", "steps=2")


def run(run_dir: Path, recipe: str, *overrides: str) -> Path:
    """Its folder, once it has ended well."""
    command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", recipe, f"run_dir={run_dir}", *SMALL, *overrides]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return (run_dir / "latest").resolve()


def checksums(run: Path) -> dict[str, str]:
    """Of the weights that a run ended with."""
    files = [file for folder in ("model", "critic") for file in sorted((run / folder).glob("*.safetensors"))]
    return {f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def metrics(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "time/step" in record]


def started(run: Path) -> set[str]:
    """The roles that had processes."""
    return {path.name.rpartition("-")[0] for path in (run / "logs").glob("*-*.log")}


def assert_dumped_what_trained(run: Path, step: int) -> None:
    """The dump against what the training ranks wrote of the same step (groups that do not train are left out there)."""
    dump = load_dump(run / "dumps" / f"step_{step:06d}.parquet")
    trained = pq.read_table(run / "batches" / f"step_{step:06d}" / "rows_0000.parquet").to_pydict()
    place = {sample: row for row, sample in enumerate(dump.tensor("sample").tolist())}
    rows = [place[sample] for sample in trained["sample"]]
    assert rows, "nothing trained, the test proves nothing"
    for name in ("input_ids", "response_mask", "rollout_log_probs"):
        column = dump.ragged(name)
        for row, values in zip(rows, trained[name], strict=True):
            assert torch.equal(column.row(row), torch.tensor(values, dtype=column.dtype)), name
    for name in ("group", "prompt_uid", "score", "sample_weight"):
        if name in trained:
            own = dump.tensor(name)
            assert torch.equal(own[rows], torch.tensor(trained[name], dtype=own.dtype)), name


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic GRPO run that dumps, and writes a checkpoint after each step."""
    require("vllm")
    return run(tmp_path_factory.mktemp("recorded"), "tiny_grpo", "rollout.dump=true", "checkpoint.every=1")


@pytest.fixture(scope="module")
def replayed(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("replayed"), "tiny_grpo", "mode=train_only", f"replay.path={recorded}", "checkpoint.every=1")


@pytest.mark.timeout(590)
def test_a_dump_is_what_trained_and_replaying_it_ends_with_the_same_weights_bit_for_bit(recorded: Path, replayed: Path) -> None:
    assert_dumped_what_trained(recorded, 1)
    assert_dumped_what_trained(recorded, 2)
    frame = pandas.read_parquet(recorded / "dumps" / "step_000002.parquet")
    lines = [json.loads(line) for line in (recorded / "samples" / "step_000002.jsonl").read_text().splitlines()]
    for column in ("domain", "group", "index", "response", "score", "outcome"):
        assert frame[column].tolist() == [line[column] for line in lines]
    assert {span["version"] for spans in frame["versions"] for span in spans} == {1}

    script = subprocess.run([sys.executable, "examples/read_dumps.py", str(recorded)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "step_000002.parquet: 24 samples trained" in script.stdout and "hardest prompts" in script.stdout

    assert checksums(replayed) == checksums(recorded)
    assert started(replayed) == {"actor_train", "replay"}, "no engines, no rewards"
    for mine, its in zip(metrics(replayed), metrics(recorded), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/samples", "mismatch/mean", "rollout/staleness"):
            assert mine[name] == its[name], name


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_a_resumed_replay_ends_with_the_same_weights(recorded: Path, replayed: Path, tmp_path: Path) -> None:
    halfway = replayed / "checkpoints" / "step_000001"
    resumed = run(tmp_path, "tiny_grpo", "mode=train_only", f"replay.path={recorded}", f"checkpoint.resume={halfway}")
    assert checksums(resumed) == checksums(recorded)


@pytest.mark.timeout(590)
def test_a_resumed_run_goes_on_like_an_uninterrupted_one_though_one_before_it_was_killed_at_its_start(
    recorded: Path, tmp_path: Path
) -> None:
    """Sample for sample. The killed one has written no checkpoint, and does not hide the one that it began from."""
    latest = tmp_path / "runs" / "latest"
    latest.parent.mkdir()
    latest.symlink_to(recorded)
    with Run(tmp_path, "tiny_grpo", *SMALL, f"checkpoint.resume={latest / 'checkpoints' / 'step_000001'}") as killed:
        while killed.folder == recorded:
            assert killed.process.poll() is None, killed.finish()[1]
            time.sleep(0.05)
        killed.process.kill()
        killed.finish(30)
    with Run(tmp_path, "tiny_grpo", *SMALL, f"checkpoint.resume={latest}") as again:
        code, output = again.finish()
    assert code == 0 and f"{again.folder.parent}" in output, output
    assert again.summary()["resumed_after"] == 1 and "resumed after step 1" in output
    assert "has written no checkpoint; going on from where it began" in output
    uninterrupted = [json.loads(line) for line in (recorded / "samples" / "step_000002.jsonl").read_text().splitlines()]
    for mine, its in zip(again.samples(2), uninterrupted, strict=True):
        assert all(mine[column] == its[column] for column in ("prompt", "response", "score"))
    (step,) = metrics(again.folder)
    assert step["actor/loss"] == metrics(recorded)[1]["actor/loss"]
    assert checksums(again.folder) == checksums(recorded)


LAYOUTS: dict[str, tuple[str, ...]] = {
    "TP2": ("strategy.tensor_parallel=2",),
    "DP2": (),
    "PP2": ("strategy.pipeline_parallel=2",),
    "DP2 replicated": ("strategy.distributed_optimizer=false",),
}
"""Of two ranks, to go on under."""
SEVERAL_UPDATES = ("algorithm.old_log_probs=rollout", "algorithm.mini_batches=2", "algorithm.ppo_epochs=2")
"""Four of them in a step."""


def second_step(run: Path, role: str) -> list[dict[str, Any]]:
    """What became of its updates."""
    lines = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] == 2 and line["role"] == role]


def assert_same_updates(ours: Path, theirs: Path, role: str) -> None:
    mine, its = second_step(ours, role), second_step(theirs, role)
    assert len(mine) == len(its) == 4
    for one, other in zip(mine, its, strict=True):
        assert one[f"{role}/lr"] == other[f"{role}/lr"]
        assert one[f"{role}/loss"] == pytest.approx(other[f"{role}/loss"], rel=1e-5)
        assert one[f"{role}/grad_norm"] == pytest.approx(other[f"{role}/grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def trained_by_one_rank(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded samples, with a checkpoint after the first step."""
    settings = ("mode=train_only", f"replay.path={recorded}", "checkpoint.every=1", *SEVERAL_UPDATES)
    return run(tmp_path_factory.mktemp("one"), "tiny_grpo", *settings)


@pytest.mark.timeout(590)
@pytest.mark.parametrize("name", [name if name == "TP2" else pytest.param(name, marks=pytest.mark.nightly) for name in LAYOUTS])
def test_a_stopped_run_goes_on_under_another_layout(recorded: Path, trained_by_one_rank: Path, tmp_path: Path, name: str) -> None:
    halfway = trained_by_one_rank / "checkpoints" / "step_000001"
    settings = ("mode=train_only", f"replay.path={recorded}", f"checkpoint.resume={halfway}", "actor_train.devices=2", *SEVERAL_UPDATES)
    resumed = run(tmp_path, "tiny_grpo", *settings, *(f"actor_train.{setting}" for setting in LAYOUTS[name]))
    assert [record["step"] for record in metrics(resumed)] == [2]
    assert_same_updates(resumed, trained_by_one_rank, "actor")


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_a_stopped_run_with_a_critic_goes_on_under_other_layouts(recorded: Path, tmp_path: Path) -> None:
    """From an actor of two copies and a critic on one rank to a cut actor and a critic in stages."""
    settings = ("mode=train_only", f"replay.path={recorded}", "algorithm.critic_warmup_steps=0", *SEVERAL_UPDATES)
    whole = run(tmp_path / "whole", "tiny_ppo", *settings, "checkpoint.every=1", "actor_train.devices=2")
    resume = f"checkpoint.resume={whole / 'checkpoints' / 'step_000001'}"
    actor = ("actor_train.devices=2", "actor_train.strategy.tensor_parallel=2", "actor_train.strategy.sequence_parallel=true")
    critic = ("critic.devices=2", "critic.strategy.pipeline_parallel=2")
    resumed = run(tmp_path / "resumed", "tiny_ppo", *settings, resume, *actor, *critic)
    for role in ("actor", "critic"):
        assert_same_updates(resumed, whole, role)


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_a_dump_trains_another_algorithm_on_another_layout(recorded: Path, tmp_path: Path) -> None:
    layout = ("actor_train.devices=2", "actor_train.strategy.tensor_parallel=2", "algorithm.mini_batches=2")
    other = run(tmp_path, "tiny_gspo", "mode=train_only", f"replay.path={recorded}", "algorithm.old_log_probs=rollout", *layout)
    first, second = metrics(other)
    assert first["actor/updates"] == second["actor/updates"] == 2
    assert first["reward/mean"] == metrics(recorded)[0]["reward/mean"], "scores are those of the dump"
    assert checksums(other) != checksums(recorded)
    assert_generates_with_transformers(other / "model", pandas.read_parquet(recorded / "dumps" / "step_000001.parquet")["prompt"][0])


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_rollouts_alone_are_generated_with_the_model_as_it_is_and_go_on_from_a_checkpoint(recorded: Path, tmp_path: Path) -> None:
    alone = run(tmp_path, "tiny_ppo", "mode=rollout_only", "checkpoint.every=1")
    assert not {"actor_train", "critic", "reference"} & started(alone)
    assert sorted(path.name for path in (alone / "dumps").iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    first, second = (load_dump(alone / "dumps" / f"step_00000{step}.parquet") for step in (1, 2))
    assert set(second.tensor("min_version").tolist()) == {0}, "the weights never change"
    full = load_dump(recorded / "dumps" / "step_000001.parquet")
    assert_same(full, first)  # a full run's first batch comes from the same weights
    (tmp_path / "resumed").mkdir()
    resumed = run(tmp_path / "resumed", "tiny_ppo", "mode=rollout_only", f"checkpoint.resume={alone / 'checkpoints' / 'step_000001'}")
    assert [path.name for path in (resumed / "dumps").iterdir()] == ["step_000002.parquet"]
    assert_same(load_dump(resumed / "dumps" / "step_000002.parquet"), second)
    trained = run(tmp_path / "trained", "tiny_grpo", "mode=train_only", f"replay.path={resumed}", "algorithm.old_log_probs=rollout")
    assert metrics(trained)[1]["rollout/staleness"] == 1.0, "one update older than the policy in training"


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_replaying_ppo_with_a_critic_ends_with_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    require("vllm")
    settings = ("algorithm.critic_warmup_steps=1",)
    original = run(tmp_path / "original", "tiny_ppo", "rollout.dump=true", *settings)
    again = run(tmp_path / "again", "tiny_ppo", "mode=train_only", f"replay.path={original}", *settings)
    assert set(checksums(again)) == {"model/model.safetensors", "critic/model.safetensors"}
    assert checksums(again) == checksums(original)


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_what_an_asynchronous_run_with_a_filter_dumped_trains_again_as_it_did(tmp_path: Path) -> None:
    """Samples of several versions, some of them stale, and in the files beside them what the filter left out."""
    require("vllm")
    settings = ("deterministic=false", "steps=3", "rollout.filter={name: accuracy, when_short: continue}")
    original = run(tmp_path / "original", "tiny_async", "rollout.dump=true", *settings)
    frames = [pandas.read_parquet(original / "dumps" / f"step_00000{step}.parquet") for step in (1, 2, 3)]
    for step, frame in enumerate(frames, start=1):
        assert_dumped_what_trained(original, step)
        assert frame["sample"].isna().eq(frame["outcome"] != "accepted").all()
    assert any((frame["outcome"] == "filtered").any() for frame in frames)
    again = run(tmp_path / "again", "tiny_async", "mode=train_only", f"replay.path={original}", *settings)
    assert started(again) == {"actor_train", "replay"}
    assert max(record["rollout/staleness"] for record in metrics(original)) > 0
    for mine, its in zip(metrics(again), metrics(original), strict=True):
        for name in ("reward/mean", "rollout/samples", "rollout/staleness", "rollout/filtered_groups", "actor/tokens"):
            assert mine[name] == its[name], name
        for name in ("actor/loss", "actor/grad_norm", "mismatch/mean"):
            assert mine[name] == pytest.approx(its[name], rel=1e-4, abs=1e-7), name


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_greedy_baselines_are_dumped_and_train_again(tmp_path: Path) -> None:
    require("vllm")
    original = run(tmp_path / "original", "tiny_remax", "rollout.dump=true")
    frame = pandas.read_parquet(original / "dumps" / "step_000001.parquet")
    assert int(frame["baseline"].sum()) == 6 and frame.loc[frame["baseline"], "sample"].isna().all()
    again = run(tmp_path / "again", "tiny_remax", "mode=train_only", f"replay.path={original}")
    assert checksums(again) == checksums(original)


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_sglang_alone_generates_with_the_model_as_it_is(tmp_path: Path) -> None:
    require("sglang")
    alone = run(tmp_path / "alone", "tiny_grpo", "mode=rollout_only", "actor_infer.strategy=sglang", "steps=1")
    trained = run(tmp_path / "trained", "tiny_grpo", "mode=train_only", f"replay.path={alone}", "steps=1")
    assert metrics(trained)[0]["mismatch/max"] < 1e-4, "engine and trainer hold the same weights"
