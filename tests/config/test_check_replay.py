"""Runs of a part: what belongs to a mode, and dumps that do not fit the model or the domains. Every mistake is told before a start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from config_project import Project
from support_dumps import dump_run

from roll_lite.config.arithmetic import derive, roles
from roll_lite.config.arithmetic_tables import render
from roll_lite.config.checks.notes import mode_notes
from roll_lite.data import dump_files
from roll_lite.data.dump_files import METADATA, found_dumps
from roll_lite.files import record
from roll_lite.pipeline.checkpoint_files import SCHEMA_VERSION, write_list

ROLLOUT = "algorithm.old_log_probs=rollout"
TRAIN = ("mode=train_only", "replay.path=past/dumps", "steps=3", "rollout.samples_per_prompt=2", "rollout.prompts_per_step=2")


@pytest.fixture
def past(project: Project) -> Project:
    """With the dumps of three steps."""
    config = project.load("rollout.dump=true", "steps=3", *TRAIN[3:])
    dump_run(project.folder / "past" / "dumps", config, 3)
    return project


def told(project: Project, *overrides: str) -> dict[str, str]:
    return {problem.path: problem.message for problem in project.problems(*overrides)}


def test_the_mode_decides_who_takes_part(past: Project) -> None:
    critic = ("critic.devices=1", "algorithm.advantage={name: gae}")
    assert list(roles(past.load(*critic))) == ["actor_train", "actor_infer", "critic"]
    config = past.load(*critic, "mode=rollout_only")
    assert list(roles(config)) == ["actor_infer"]
    assert "updates per step" not in render(derive(config)) and "micro-batches" not in render(derive(config))
    assert mode_notes(config) == ["mode: rollout_only: actor_train, critic and validation are left out; batches are dumped, nothing trains"]
    config = past.load(*critic, *TRAIN, ROLLOUT)
    assert list(roles(config)) == ["actor_train", "critic"]
    assert "engine replicas" not in render(derive(config))
    assert str(past.folder / "past/dumps") in mode_notes(config)[0]


def test_what_belongs_to_another_mode_is_told(project: Project) -> None:
    assert told(project, "mode=train_only") == {"replay.path": "mode: train_only trains on the dumps of a past run; name its folder"}
    assert "is only used by mode: train_only, the mode is full" in told(project, "replay.path=past")["replay.path"]
    assert "is only used by" in told(project, "mode=rollout_only", "replay.path=past")["replay.path"]
    assert "no weights are sent" in told(project, "mode=rollout_only", "weight_sync.verify=full")["weight_sync.verify"]
    assert "expected one of full, rollout_only, train_only" in told(project, "mode=train")["mode"]


def test_a_run_that_repeats_another_may_train_as_that_did(past: Project) -> None:
    assert told(past, *TRAIN) == {}
    assert told(past, *TRAIN, "replay.path=past") == {}, "the run's folder will do"


def test_data_and_rewards_that_nobody_reads_need_not_be_there(past: Project) -> None:
    for name in ("train.jsonl", "held_out.jsonl"):
        (past.folder / name).unlink()
    assert told(past, *TRAIN) == {}
    assert told(past)


def test_another_policy_needs_the_sampling_ones_log_probs(past: Project) -> None:
    other = "algorithm.policy_loss={name: ppo, clip_high: 0.3}"
    message = told(past, *TRAIN, other)["algorithm.old_log_probs"]
    assert "from the second step on this run's policy is not the one that sampled (algorithm differs), which recompute takes it" in message
    for right in (ROLLOUT, "algorithm.mismatch_correction={weight: {level: token}}", "steps=1"):
        assert told(past, *TRAIN, other, right) == {}
    assert "seed, actor_train.optimizer differ" in told(past, *TRAIN, "seed=5", "actor_train.optimizer.lr=1e-4")["algorithm.old_log_probs"]
    assert told(past, *TRAIN, "actor_train.micro_batch_size=1", "actor_train.devices=2") == {}, "a layout changes nothing"
    assert "(model.dtype differs)" in told(past, *TRAIN, "model.dtype=bfloat16")["algorithm.old_log_probs"]


ADAPTERS = "actor_train.lora={rank: 4, targets: [q_proj, o_proj]}"
FOLLOWED = (
    "algorithm={kl_in_loss: {coef: 0.1}, advantage: {name: gae}}",
    "critic={balance_coef: 0.0}",
    "actor_train.ema={decay: 0.9}",
    "reference={refresh: {every: 2, weights: ema}}",
)


@pytest.mark.parametrize(
    ("made", "changed", "differs"),
    [
        ((ADAPTERS,), "actor_train.lora.rank=8", "actor_train.lora"),
        ((ADAPTERS,), "actor_train.lora=null", "actor_train.lora"),
        ((ADAPTERS,), "actor_train.lora={rank: 4, targets: [o_proj, q_proj], export: adapter, engines: adapter}", None),
        (FOLLOWED, "reference.refresh.every=1", "reference.refresh"),
        (FOLLOWED, "actor_train.ema.decay=0.99", "actor_train.ema"),
        ((*FOLLOWED, "reference.refresh.weights=actor"), "actor_train.ema.decay=0.99", None),
        (FOLLOWED, "critic.micro_batch_size=1", None),
    ],
)
def test_what_else_makes_another_policy(project: Project, made: tuple[str, ...], changed: str, differs: str | None) -> None:
    dump_run(project.folder / "past" / "dumps", project.load("rollout.dump=true", "steps=3", *TRAIN[3:], *made), 3)
    assert told(project, *TRAIN, *made) == {}
    messages = told(project, *TRAIN, *made, changed)
    assert messages == {} if differs is None else f"({differs} differs)" in messages["algorithm.old_log_probs"]


def test_balanced_experts_make_another_policy(past: Project) -> None:
    """Their coefficients. (The project's model has no experts; a check of its own says so.)"""
    config = past.load("critic.devices=1", "algorithm.advantage={name: gae}").model_dump(mode="json")
    for role in ("actor_train", "critic"):
        other = {**config, role: {**config[role], "balance_coef": 0.01}}
        assert dump_files._differences(config, config) == "" != dump_files._differences(config, other)


def test_what_an_older_version_did_not_have_is_taken_for_the_default(past: Project) -> None:
    for file in (past.folder / "past/dumps").iterdir():
        header = json.loads(pq.read_metadata(file).metadata[METADATA.encode()])
        made = header["config"]
        del made["reference"], made["algorithm"]["ptx"], made["actor_train"]["optimizer"]["decay_shape"]
        for name in ("lora", "ema", "balance_coef"):
            del made["actor_train"][name]
        pq.write_table(pq.read_table(file).replace_schema_metadata({METADATA: json.dumps(header)}), file)
    assert told(past, *TRAIN) == {}
    assert "(actor_train.lora differs)" in told(past, *TRAIN, ADAPTERS)["algorithm.old_log_probs"]


def test_rollouts_of_one_policy_are_another_ones_from_the_second_step_on(project: Project) -> None:
    config = project.load("mode=rollout_only", "steps=3", *TRAIN[3:])
    dump_run(project.folder / "past" / "dumps", config, 3)
    assert "rollout_only sampled all dumps with the same weights" in told(project, *TRAIN)["algorithm.old_log_probs"]
    assert told(project, *TRAIN, ROLLOUT) == {} == told(project, *TRAIN, "steps=1")


def test_missing_steps_are_named(past: Project) -> None:
    assert told(past, *TRAIN, "steps=5")["replay.path"] == "has no dump of step 4, 5, the run is to train 5 steps; use steps: 3"
    (past.folder / "past/dumps/step_000001.parquet").unlink()
    assert told(past, *TRAIN)["replay.path"] == "has no dump of step 1, the run is to train 3 steps"
    shutil.rmtree(past.folder / "past")
    assert "no such folder" in told(past, *TRAIN)["replay.path"]
    (past.folder / "past" / "dumps").mkdir(parents=True)
    assert "holds no dumps (dumps/step_*.parquet); the run" in told(past, *TRAIN)["replay.path"]
    (past.folder / "past" / "dumps").rmdir()
    (past.folder / "past" / "dumps").write_text("")
    assert "is a file" in told(past, *TRAIN)["replay.path"]


def test_a_resumed_runs_earlier_dumps_are_where_it_went_on_from(past: Project) -> None:
    next_run = past.folder / "next"
    (next_run / "dumps").mkdir(parents=True)
    (past.folder / "past/dumps/step_000003.parquet").rename(next_run / "dumps/step_000003.parquet")
    assert sorted(found_dumps(next_run)) == [3]
    checkpoint = past.folder / "past" / "checkpoints" / "step_000002"
    (next_run / "config.yaml").write_text(f"checkpoint: {{resume: {checkpoint}}}")
    assert {step: path.parent.parent.name for step, path in found_dumps(next_run).items()} == {1: "past", 2: "past", 3: "next"}
    assert told(past, *TRAIN, "replay.path=next") == {}


def test_broken_dumps_are_told_by_file(past: Project) -> None:
    second = past.folder / "past/dumps/step_000002.parquet"
    whole = second.read_bytes()
    second.write_bytes(whole[:-9])
    assert "step_000002.parquet is damaged" in told(past, *TRAIN)["replay.path"]
    second.write_bytes(whole)
    header = {"format": "roll_lite.dump", "schema_version": 2, "made_by": "roll_lite 3"}
    pq.write_table(pq.read_table(second).replace_schema_metadata({METADATA: json.dumps(header)}), second)
    assert "has schema version 2, this program reads 1; it was written by roll_lite 3" in told(past, *TRAIN)["replay.path"]


def test_a_dump_of_a_configuration_that_says_too_little_is_told(past: Project) -> None:
    first = past.folder / "past/dumps/step_000001.parquet"
    header = json.loads(pq.read_metadata(first).metadata[METADATA.encode()])
    del header["config"]["domains"]["add"]["sampling"]
    pq.write_table(pq.read_table(first).replace_schema_metadata({METADATA: json.dumps(header)}), first)
    assert told(past, *TRAIN) == {"replay.path": "the dumps' own configuration lacks something (KeyError: 'sampling')"}


def test_another_tokenizer_or_a_smaller_vocabulary_is_told(past: Project) -> None:
    tokenizer = past.folder / "model" / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    assert "was made with another tokenizer" in told(past, *TRAIN)["model.path"]
    tokenizer.write_text('{\n"added_tokens": [], "model": {"vocab": {}}}')
    assert told(past, *TRAIN) == {}, "the same tokens, laid out in another way"
    past.write_model("small", vocab_size=14)
    message = told(past, *TRAIN, "model.path=small")["model.path"]
    assert message.endswith("step_000001.parquet has the token 14, the model's vocabulary (vocab_size) has 14 rows")


def test_sampling_and_sizes_have_to_be_those_of_the_dumps(past: Project) -> None:
    changed = {
        "domains.add.sampling.temperature=0.7": "the dumps were sampled with 1.0, whose log-probs they hold; use 1.0",
        "domains.copy.sampling.max_prompt_tokens=2": "the dumps have a prompt of 3 tokens; use at least that",
        "domains.copy.sampling.max_tokens=1": "the dumps have a response of 2 tokens; use at least that",
        "rollout.prompts_per_step=4": "the dumps were made with 2; use 2",
        "rollout.samples_per_prompt=4": "the dumps have groups of 2; use 2",
        "domains.add.reward.format={pattern: '^a'}": "responses were matched when they were dumped, with none",
        "algorithm.advantage={name: remax}": "remax needs greedy baselines",
    }
    for override, message in changed.items():
        messages = told(past, *TRAIN, ROLLOUT, override).values()
        assert any(message in one for one in messages), (override, messages)
        assert len(past.problems(*TRAIN, ROLLOUT, override)) == len(messages), "one mistake is told once, however many files have it"


def test_a_domain_that_is_not_configured_is_told(past: Project) -> None:
    message = told(past, *TRAIN, "~domains.copy")["domains"]
    assert "holds samples of the domain 'copy'; configured are add" in message


def test_a_checkpoint_of_another_mode_is_refused(project: Project, tmp_path: Path) -> None:
    checkpoint = project.folder / "old" / "checkpoints" / "step_000001"
    (checkpoint / "actor_train").mkdir(parents=True)
    (checkpoint / "actor_train" / "file").write_text("")
    state = {"schema_version": SCHEMA_VERSION, "pipeline": {}, "rollouts": {}, "config": {"mode": "train_only"}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_list(checkpoint, {"state.json": record(checkpoint / "state.json")})
    message = told(project, f"checkpoint.resume={checkpoint}")["checkpoint.resume"]
    assert message.endswith('may not change on resume: mode: "train_only" -> "full"')


@pytest.mark.parametrize("mistake", ["seed=x", "algorithm.ppo_epochs=x", "domains.add.sampling.top_p=x", "actor_train.optimizer.lr=x"])
def test_another_mistake_does_not_hide_behind_the_dumps_nor_makes_up_some(past: Project, mistake: str) -> None:
    assert list(told(past, *TRAIN, mistake)) == [mistake.partition("=")[0]]


def test_another_mistake_does_not_hide_a_missing_dump(past: Project) -> None:
    assert set(told(past, *TRAIN, "steps=9", "seed=x")) == {"seed", "replay.path"}
