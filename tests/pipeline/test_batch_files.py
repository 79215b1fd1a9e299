"""What a run keeps of its steps for whoever computes them once more. The actor is a stand-in that writes down what it is asked for."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from roll_lite.config.loading import load_config
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.ragged import Ragged
from roll_lite.distributed import dataflow
from roll_lite.distributed.dataflow import Batch, put_block
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.clusters import Model, Models
from roll_lite.workers.actor import ActorWorker

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/tiny"


def load(monkeypatch: pytest.MonkeyPatch, recipe: str, *overrides: str) -> RunConfig:
    monkeypatch.chdir(ROOT)
    return load_config(recipe, ROOT / "examples/configs", list(overrides))


@pytest.mark.parametrize(
    ("overrides", "written"),
    [
        ([], True),
        (["batches.write=never"], False),
        (["rollout.samples_per_prompt=1000"], False),  # 32 x 1000 x 24 tokens
        (["rollout.samples_per_prompt=1000", "batches.write=always"], True),
        (["actor_train.lora={}"], True),
        (["actor_train.lora={}", "batches.write=never"], False),
        (["reference={refresh: {every: 1}}", "algorithm.kl_in_loss.coef=0.1"], True),
        (["+algorithm.ptx={data: {train: examples/data/add_train.jsonl, answer: answer}, coef: 0.1, samples: 4, max_tokens: 64}"], True),
        (["algorithm.advantage={name: gae}", "critic={devices: 1}"], True),
        (["model.dtype=bfloat16"], False),
        (["model.dtype=bfloat16", "batches.write=always"], True),
    ],
)
def test_small_runs_keep_their_batches_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], written: bool
) -> None:
    asked: list[Any] = []
    ranks = SimpleNamespace(all=lambda method, folder: asked.append((method.__name__, folder)))
    clusters: Any = SimpleNamespace(actor=SimpleNamespace(ranks=ranks, loaded=lambda states: nullcontext(), bring_home=lambda *_: None))
    files = BatchFiles(load(monkeypatch, "tiny_grpo", *overrides), tmp_path)
    assert files.are_written is written
    files.keep_start(clusters)
    assert (tmp_path / "start").exists() is written
    assert (asked == [("save_adapters", tmp_path / "start" / "adapters")]) is (written and "actor_train.lora={}" in overrides)


@pytest.mark.parametrize(("limit", "path"), [(256, "start/actor_train"), (0, str(MODEL))])
def test_the_weights_that_training_starts_from_are_in_the_folder_or_named_with_checksums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, path: str
) -> None:
    BatchFiles(load(monkeypatch, "tiny_ppo", f"batches.copy_models_mb={limit}"), tmp_path).keep_start(Models(None))
    start = json.loads((tmp_path / "start" / "models.json").read_text())
    assert start["resumed_from"] is None and set(start["models"]) == {"actor_train", "critic"}
    actor = start["models"]["actor_train"]
    assert actor["path"] == path
    weights = (tmp_path / actor["path"] / "model.safetensors").read_bytes()
    assert actor["files"]["model.safetensors"] == {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}


def test_a_step_has_its_rows_its_mini_batches_in_their_order_and_its_coefficients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    ranks = SimpleNamespace(heads_scatter=lambda method, shards, folder: asked.append((method.__name__, shards, folder)))
    actor = SimpleNamespace(ranks=ranks, shards=lambda batch, columns: columns.of(batch.keys()))
    batch = Batch(DataProto({"sample": torch.tensor([0, 1, 2]), "reward": torch.zeros(3)}))
    mini_batches = [
        MiniBatch(0, np.array([2, 0]), np.array([0.5, 0.25], dtype=np.float32)),
        MiniBatch(1, np.array([1]), np.array([1.0], dtype=np.float32)),
    ]
    files = BatchFiles(load(monkeypatch, "tiny_grpo"), tmp_path)
    files.write(12, actor, batch, mini_batches, {"kl_in_reward": 0.01, "kl_in_loss": 0.0})  # type: ignore[arg-type]
    folder = tmp_path / "batches" / "step_000012"
    assert asked == [("write_rows", ["sample", "reward"], folder)]
    assert pq.read_table(folder / "mini_batches.parquet").to_pydict() == {
        "update": [1, 1, 2],
        "epoch": [1, 1, 2],
        "sample": [2, 0, 1],
        "loss_weight": [0.5, 0.25, 1.0],
    }
    facts = json.loads((folder / "step.json").read_text())
    assert facts == {"step": 12, "kl_coefs": {"kl_in_reward": 0.01, "kl_in_loss": 0.0}}
    for when, step, is_written in (("auto", 500, True), ("auto", 501, False), ("always", 501, True), ("never", 1, False)):
        files = BatchFiles(load(monkeypatch, "tiny_grpo", f"batches.write={when}"), tmp_path / when)
        if files.writes(step):
            files.write(step, actor, batch, mini_batches, {})  # type: ignore[arg-type]
        assert (tmp_path / when / f"batches/step_{step:06d}").exists() is is_written


def test_every_rank_writes_its_own_rows_with_all_their_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of two producers, one of which has half of the samples; the object store is a stand-in that hands back what it gets."""
    monkeypatch.setattr(dataflow, "ray", SimpleNamespace(put=lambda value: value, get=lambda references: references, ObjectRef=object))

    def tokens(samples: list[int]) -> dict[str, Any]:
        return {"sample": torch.tensor(samples), "input_ids": Ragged.from_rows([torch.full((sample + 2,), sample) for sample in samples])}

    def transitions(name: str, samples: list[int]) -> dict[str, Any]:
        rows = [torch.full((sample + 1,), sample / 10) for sample in samples]
        return {"sample": torch.tensor(samples), name: Ragged.from_rows(rows)}

    rows = {"sample": torch.arange(4), "domain": object_column(["a", "b", "a", "b"]), "truncated": torch.tensor([True, False] * 2)}
    lengths = {"prompt_length": torch.ones(4, dtype=torch.int64), "response_length": torch.arange(1, 5)}
    blocks = [tokens([0, 1]), tokens([3, 2]), transitions("advantages", [2, 0]), transitions("advantages", [1, 3])]
    whole = {"sample": torch.arange(4), "ref_distribution": Ragged.from_rows([torch.zeros(sample + 1, 258) for sample in range(4)])}
    batch = Batch(DataProto({**rows, **lengths}), [put_block(DataProto(columns)) for columns in [*blocks, whole]])

    def heads_scatter(method: Any, shards: list[Any], *arguments: Any) -> None:
        for rank, shard in enumerate(shards):
            method(SimpleNamespace(strategy=SimpleNamespace(layout=SimpleNamespace(data_rank=rank))), shard, *arguments)

    ranks = SimpleNamespace(heads_scatter=heads_scatter, data_size=2, layouts=[SimpleNamespace(attention_parity_tokens=math.inf)])
    actor = Model(ranks, None, ActorWorker)  # type: ignore[arg-type]
    BatchFiles(load(monkeypatch, "tiny_grpo"), tmp_path).write(1, actor, batch, [], {})
    folder = tmp_path / "batches" / "step_000001"
    assert sorted(path.name for path in folder.iterdir()) == ["mini_batches.parquet", "rows_0000.parquet", "rows_0001.parquet", "step.json"]
    written = [row for rank in (0, 1) for row in pq.read_table(folder / f"rows_{rank:04d}.parquet").to_pylist()]
    assert sorted(row["sample"] for row in written) == [0, 1, 2, 3]
    for row in written:
        sample = row["sample"]
        assert row["input_ids"] == [sample] * (sample + 2) and row["advantages"] == pytest.approx([sample / 10] * (sample + 1))
        assert row["domain"] == "ab"[sample % 2] and row["truncated"] is (sample % 2 == 0)
        assert "ref_distribution" not in row
