"""Host memory and disk space that `check` counts, against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from config_project import Project
from published_models import TRAINABLE

from roll_lite.config.checks import notes
from roll_lite.config.schema.models import HfStrategyConfig, RewardModelConfig
from roll_lite.config.schema.run import RunConfig


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "weight_counts", lambda folder, has_head=True: (0, 1000))


def loaded(project: Project, yaml: str) -> RunConfig:
    assert project.problems_of(f"model: {{dtype: bfloat16}}\n{yaml}") == []
    return project.load(name="changed")


@pytest.mark.parametrize(
    ("model", "experts", "others"),
    [("Qwen2.5-7B", 0, 7_615_616_512), ("Qwen3-30B-A3B", 48 * 128 * 3 * 768 * 2048, 1_541_093_376)],
)
def test_weights_of_published_models(tmp_path: Path, model: str, experts: int, others: int) -> None:
    """The sums are those of the published files: 7,615,616,512 and 30,532,122,624 weights."""
    (tmp_path / "config.json").write_text(json.dumps(TRAINABLE[model]))
    assert notes.weight_counts(tmp_path) == (experts, others)


@pytest.mark.parametrize(
    ("actor", "expected"),
    [
        # Two copies of two ranks: weights twice in bfloat16; master weights and moments once, 12 bytes, if ranks share them, else twice.
        ("offload: true, devices: 4, strategy: {tensor_parallel: 2, distributed_optimizer: true}", 1000 * (2 * 2 + 12)),
        ("offload: true, devices: 4, strategy: {tensor_parallel: 2, distributed_optimizer: false}", 1000 * 2 * (2 + 12)),
        ("offload: false, devices: 4, strategy: {tensor_parallel: 2}", 0),
        # Moments, and what the update works on: 16 bytes, which never leave the host; the master weights do if the role leaves.
        ("offload: false, devices: 2, strategy: {distributed_optimizer: true}, optimizer: {on_host: true}", 1000 * 16),
        ("offload: true, devices: 2, strategy: {distributed_optimizer: true}, optimizer: {on_host: true}", 1000 * (2 * 2 + 4 + 16)),
        ("offload: true, devices: 2, strategy: {distributed_optimizer: true}, lora: {rank: 4}", 1000 * 2 * 2),
        ("offload: false, devices: 2, ema: {decay: 0.9}", 1000 * 4),
    ],
)
@pytest.mark.usefixtures("counted")
def test_what_a_trainer_keeps_on_the_host(project: Project, actor: str, expected: int) -> None:
    assert notes.host_bytes(loaded(project, f"actor_train: {{{actor}}}"))["actor_train"] == expected


def test_ranks_that_share_experts_hold_fewer_copies_of_them(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded(project, "actor_train: {offload: true, devices: 4, strategy: {distributed_optimizer: true}}")
    strategy = config.actor_train.strategy.model_copy(update={"expert_parallel": 4})
    config = config.model_copy(update={"actor_train": config.actor_train.model_copy(update={"strategy": strategy})})
    monkeypatch.setattr(notes, "weight_counts", lambda folder, has_head=True: (600, 400))
    assert notes.host_bytes(config)["actor_train"] == 600 * (2 + 12) + 400 * (4 * 2 + 12)


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("actor_infer: {offload: true, devices: 2, replicas_per_device: 2}", 0),  # an update follows: nothing is copied
        ("actor_infer: {offload: true, devices: 2, replicas_per_device: 2}\nactor_train: {lora: {engines: adapter}}", 1000 * 4 * 2 * 2),
        ("actor_infer: {devices: 2}\nactor_train: {lora: {engines: adapter}}", 0),
        ("mode: rollout_only\nactor_infer: {offload: true, devices: 2, strategy: {tensor_parallel: 2}}", 1000 * 2 * 2),
        ("mode: rollout_only\nactor_infer: {offload: true, devices: 2, strategy: {name: sglang, tensor_parallel: 2}}", 1000 * 2),
    ],
)
@pytest.mark.usefixtures("counted")
def test_engines_copy_weights_only_if_nothing_replaces_them(project: Project, yaml: str, expected: int) -> None:
    assert notes.host_bytes(loaded(project, yaml))["actor_infer"] == expected


def test_a_reward_model_that_leaves_is_counted_if_its_kind_is_known(project: Project, tmp_path: Path) -> None:
    """A classifier has no layer over the vocabulary. The roles beside an unknown one are counted."""
    published = {**TRAINABLE["Qwen2.5-7B"], "tie_word_embeddings": False}
    config = loaded(project, "actor_train: {offload: true}")
    shape = {"path": tmp_path, "offload": True, "devices": 2, "dtype": "float32"}
    config = config.model_copy(
        update={"reward_models": {"scorer": RewardModelConfig.model_construct(**shape, strategy=HfStrategyConfig())}}
    )
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert notes.host_bytes(config)["reward_models.scorer"] == 2 * 4 * (7_615_616_512 - 152_064 * 3584)
    (tmp_path / "config.json").write_text(json.dumps(published | {"model_type": "deberta"}))
    assert notes.host_bytes(config).keys() == notes.host_bytes(config.model_copy(update={"reward_models": {}})).keys()


def test_the_note_names_the_fullest_node_and_what_is_missing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "weight_counts", lambda folder, has_head=True: (0, 2**30))
    yaml = "actor_train: {offload: true, devices: %s, strategy: {distributed_optimizer: true}}\n%s"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 << 30))
    (told,) = notes.host_memory_notes(loaded(project, yaml % (4, "")))
    assert told == "a node needs about 20 GiB of host memory for what is offloaded or kept there (actor_train 20)"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 << 30))
    (told,) = notes.host_memory_notes(loaded(project, yaml % (4, "")))
    assert "about 20 GiB" in told and "this machine has 16 GiB; use offload: false" in told
    nodes = "placement: {nodes: 2, devices_per_node: 4}"
    (told,) = notes.host_memory_notes(loaded(project, yaml % (6, nodes)))
    assert "about 16 GiB" in told and "this machine" not in told, "4 of 6 ranks; the other machines' memory is not known"
    monkeypatch.setattr(notes, "weight_counts", lambda folder, has_head=True: (0, 2**20))
    assert notes.host_memory_notes(loaded(project, yaml % (4, ""))) == [], "small models need no note"


def test_a_disk_without_room_for_a_checkpoint_is_told(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 bytes per weight: bfloat16, master weights and moments."""
    monkeypatch.setattr(notes, "weight_counts", lambda folder, has_head=True: (0, 2**30))
    monkeypatch.setattr(notes, "free_bytes", lambda folder, has_head=True: 13 << 30)
    config = loaded(project, "checkpoint: {every: 1}")
    assert notes.disk_notes(config) == ["checkpoint.every: a checkpoint takes about 14.0 GiB, and 13.0 GiB are free in run_dir"]
    monkeypatch.setattr(notes, "free_bytes", lambda folder, has_head=True: 15 << 30)
    assert notes.disk_notes(config) == notes.disk_notes(loaded(project, "checkpoint: {every: 0}")) == []
