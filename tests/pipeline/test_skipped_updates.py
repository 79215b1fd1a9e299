"""Updates that are not finite: counted in a row for each role, over steps and checkpoints, with the samples of the first one on the disk.

The roles are stand-ins that report what the test says."""

from __future__ import annotations

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
from roll_lite.config.schema.algorithm import PtxConfig, PtxDataConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.ragged import Ragged
from roll_lite.distributed import dataflow
from roll_lite.distributed.dataflow import Batch, put_block
from roll_lite.distributed.strategy.base import TrainResult
from roll_lite.pipeline import rlvr
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.clusters import Model, Models
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.pipeline.skipped_updates import NotFinite, SkippedUpdates
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.model import TrainShare, Update

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 6


def update(skipped: bool = False, row_losses: dict[int, float] | None = None) -> Update:
    loss = math.nan if skipped else 0.5
    return Update(0, TrainResult({"actor/loss": loss}, loss, math.inf if skipped else 1.0, 1e-3, skipped), row_losses=row_losses or {})


FINE, BROKEN = update(), update(skipped=True)


def counted(limit: int, *steps: list[Update], role: str = "actor") -> SkippedUpdates:
    skipped = SkippedUpdates({"actor": limit, "critic": limit})
    for number, updates in enumerate(steps, start=1):
        skipped.count(number, {role: [updates]})
    return skipped


# ---------------------------------------------------------------- counting


def test_the_run_ends_after_so_many_in_a_row_over_steps() -> None:
    counted(3, [FINE, BROKEN], [BROKEN, FINE], [BROKEN, BROKEN]).check()
    with pytest.raises(NotFinite) as error:
        counted(3, [FINE, FINE], [FINE, BROKEN], [BROKEN, BROKEN, BROKEN]).check()
    first, where, *remedies = str(error.value).splitlines()
    assert first == (
        "actor: 3 updates in a row were skipped, because loss or gradient was not finite, up to update 2 of step 3; "
        "the last finite one was update 1 of step 2. actor_train.optimizer.stop_after_skipped allows less than 3."
    )
    assert "update 2 of step 2" in where and "skipped/step_000002_actor_update_02" in where and "roll-lite docs recompute" in where
    assert any("checkpoint before step 2" in line and "actor_train.optimizer.lr" in line for line in remedies)
    assert any("actor_train.optimizer.stop_after_skipped: 0" in line for line in remedies)


def test_what_comes_after_the_last_one_in_the_same_step_does_not_hide_it() -> None:
    with pytest.raises(NotFinite, match=r"(?s)up to update 2 of step 1; none before them was finite.*to blame: start again with"):
        counted(2, [BROKEN, BROKEN, FINE]).check()


def test_rows_beside_the_samples_are_named_as_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the actor: they have a file of their own."""
    monkeypatch.chdir(ROOT)
    config = load_config("tiny_ppo", ROOT / "examples/configs")
    ptx = PtxConfig(data=PtxDataConfig(train=["rows.jsonl"]), coef=0.1, samples=2)
    with_ptx = SkippedUpdates.of(config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"ptx": ptx})}))
    for role, told in (("actor", True), ("critic", False)):
        skipped = SkippedUpdates({role: 1}, with_ptx.with_ptx)
        skipped.count(1, {role: [[BROKEN]]})
        with pytest.raises(NotFinite) as error:
            skipped.check()
        assert ("rows of algorithm.ptx alone have a loss that is not finite (supervised.parquet)" in str(error.value)) is told


def test_roles_are_counted_on_their_own() -> None:
    skipped = SkippedUpdates({"actor": 2, "critic": 2})
    skipped.count(1, {"actor": [[BROKEN]], "critic": [[FINE]]})
    skipped.count(2, {"actor": [[FINE]], "critic": [[BROKEN]]})
    skipped.check()
    skipped.count(3, {"critic": [[BROKEN]]})  # the actor did not train
    with pytest.raises(NotFinite, match=r"^critic: 2 updates in a row.*update 1 of step 1\. critic\.optimizer\.stop_after_skipped"):
        skipped.check()


def test_zero_lets_the_run_go_on() -> None:
    counted(0, *[[BROKEN] * 4] * 5).check()


def test_the_settings_are_each_roles_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("tiny_ppo", ROOT / "examples/configs", ["critic.optimizer.stop_after_skipped=9"])
    assert SkippedUpdates.of(config).limits == {"actor": 5, "critic": 9}
    assert SkippedUpdates.of(load_config("tiny_grpo", ROOT / "examples/configs")).limits == {"actor": 5}


def test_a_checkpoint_holds_the_count() -> None:
    saved = json.loads(json.dumps(counted(3, [FINE, BROKEN], [BROKEN]).state_dict()))
    resumed = SkippedUpdates({"actor": 3})
    resumed.load_state_dict(saved)
    resumed.check()
    assert resumed.count(3, {"actor": [[BROKEN]]}) == [], "the series began before the checkpoint"
    with pytest.raises(NotFinite, match="3 updates in a row.*the last finite one was update 1 of step 1") as error:
        resumed.check()
    assert "skipped/step_000001_actor_update_02" in str(error.value)


def test_a_series_of_a_step_that_is_repeated_is_forgotten() -> None:
    """A device that failed gave the skipped updates; its rank is lost in the same step."""
    skipped = counted(3, [BROKEN])
    before = skipped.state_dict()
    skipped.count(2, {"actor": [[BROKEN, BROKEN]]})
    skipped.load_state_dict(before)
    skipped.count(2, {"actor": [[FINE, FINE]]})
    skipped.check()


# ---------------------------------------------------------------- in a run


def test_a_resumed_run_may_have_a_smaller_limit() -> None:
    resumed = SkippedUpdates({"actor": 3})
    resumed.load_state_dict(counted(0, [BROKEN] * 5).state_dict())
    resumed.check()
    resumed.count(2, {"actor": [[BROKEN]]})
    with pytest.raises(NotFinite, match="6 updates in a row"):
        resumed.check()


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(dataflow, "ray", SimpleNamespace(put=lambda value: value, get=lambda references: references, ObjectRef=object))
    changed = ["batches.write=never", "trackers=[{name: jsonl}]", "steps=3", "checkpoint.export_model=false"]
    changed += ["algorithm.mini_batches=2", "algorithm.old_log_probs=recompute"]
    return load_config("tiny_grpo", ROOT / "examples/configs", [*changed, "actor_train.optimizer.stop_after_skipped=3"])


def batch() -> Batch:
    """Six samples, tokens in a block."""
    samples = torch.arange(SAMPLES)
    rows: dict[str, Any] = {
        "sample": samples,
        "domain": object_column(["add", "make", "repeat"] * 2),
        "group": samples // 2,
        "index": samples % 2,
        "prompt_uid": samples + 100,
        "prompt_length": torch.full((SAMPLES,), 2),
        "response_length": samples + 1,
        "policy_tokens": samples + 1,
        "train_weight": torch.ones(SAMPLES),
    }
    tokens = {"sample": samples, "input_ids": Ragged.from_rows([torch.full((sample + 3,), sample) for sample in range(SAMPLES)])}
    return Batch(DataProto(rows), [put_block(DataProto(tokens))])


def heads_scatter(method: Any, shards: list[Any], *arguments: Any) -> None:
    for rank, shard in enumerate(shards):
        method(SimpleNamespace(strategy=SimpleNamespace(layout=SimpleNamespace(data_rank=rank))), shard, *arguments)


def run_with(config: RunConfig, folder: Path, steps: list[list[Update]], monkeypatch: pytest.MonkeyPatch) -> RLVRPipeline:
    """A run whose actor, on two data-parallel ranks, reports these updates; the second rank has no losses of rows to tell."""
    reports = iter(steps)
    monkeypatch.setattr(rlvr, "take_turns", lambda *_: [[report := next(reports), [update(one.result.skipped) for one in report]]])

    def step(self: RLVRPipeline) -> None:
        self.kl_coefs = {"kl_in_loss": 0.1}
        self.train(batch())
        self.steps_done += 1

    monkeypatch.setattr(RLVRPipeline, "step", step)
    layouts = [SimpleNamespace(attention_parity_tokens=math.inf)]
    ranks = SimpleNamespace(
        name="actor_train", heads_scatter=heads_scatter, start_scatter=print, data_size=2, layouts=layouts, all=lambda _: []
    )
    monkeypatch.setattr(Model, "shares", lambda *_: [])
    actor = Model(ranks, SimpleNamespace(offload=False), ActorWorker)  # type: ignore[arg-type]
    journal = Journal(config, folder)
    journal.connect()
    checkpoints: Any = SimpleNamespace(
        load=lambda *_: None,
        finished=nullcontext,
        finish_if_written=lambda: None,
        finish=lambda: None,
        upload_last=lambda _: None,
        continues_in_folder=False,
        newest=None,
        copy_every=0,
    )
    monkeypatch.setattr(RLVRPipeline, "validate", lambda self: None)
    source: Any = SimpleNamespace(judge_roles=(), loaded=lambda *_: nullcontext(), state_dict=dict, wait_for_files=lambda: None)
    return RLVRPipeline(config, Models(actor), source, journal, checkpoints, BatchFiles(config, folder))


def test_the_samples_of_the_first_one_are_in_the_runs_folder_and_the_run_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = update(skipped=True, row_losses={0: 0.25, 1: math.nan, 2: 0.5, 3: 0.75, 4: 1.0, 5: math.inf})
    pipeline = run_with(config, tmp_path, [[FINE, first], [BROKEN, FINE], [FINE, FINE]], monkeypatch)
    pipeline.run()
    assert pipeline.steps_done == 3
    (folder,) = (tmp_path / "skipped").iterdir()
    assert folder.name == "step_000001_actor_update_02"
    pipeline.steps_done = 0
    cut = pipeline.cut(batch())[1].samples.tolist()
    assert len(cut) == 3
    told = pq.read_table(folder / "mini_batches.parquet").to_pydict()
    assert told["update"] == [2] * 3 and told["epoch"] == [1] * 3 and told["sample"] == cut
    np.testing.assert_array_equal(told["loss"], [first.row_losses[sample] for sample in cut])
    rows = [row for path in sorted(folder.glob("rows_*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert sorted(row["sample"] for row in rows) == cut
    for row in rows:
        sample = row["sample"]
        assert (row["group"], row["index"], row["prompt_uid"]) == (sample // 2, sample % 2, sample + 100)
        assert row["domain"] == ("add", "make", "repeat")[sample % 3] and row["response_length"] == sample + 1
        assert row["input_ids"] == [sample] * (sample + 3)
    facts = json.loads((folder / "step.json").read_text())
    same = {"step": 1, "role": "actor", "update": 2, "kl_coefs": {"kl_in_loss": 0.1}, "loss": "nan", "grad_norm": "inf"}
    assert facts == same
    said = capsys.readouterr().out
    assert f"update 2 of the actor was skipped, its loss is nan and its gradient norm inf; its samples are in {folder}" in said
    assert not (tmp_path / "batches").exists(), "batches.write: never"


def test_supervised_rows_of_the_first_one_are_there_too(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of each update on two ranks: the second rank's row is the one whose loss is not finite."""
    first = update(skipped=True, row_losses={**dict.fromkeys(range(SAMPLES), 0.5), -3: 0.25, -2: 0.75, -1: math.nan})
    pipeline = run_with(config, tmp_path, [[FINE, first], [FINE, FINE], [FINE, FINE]], monkeypatch)

    def rows(number: int, samples: list[int]) -> DataProto:
        ids = [torch.full((3 - sample,), 10 * number - sample) for sample in samples]
        masks = [torch.arange(len(one)) > 1 for one in ids]
        columns = {"input_ids": Ragged.from_rows(ids), "response_mask": Ragged.from_rows(masks), "ptx_weight": torch.full((len(ids),), 0.5)}
        return DataProto({"sample": torch.tensor(samples), "temperature": torch.ones(len(ids)), **columns})

    supervised = [[rows(number, samples) for number in range(2)] for samples in ([-3, -2], [-1])]
    told_of: list[int] = []
    pipeline.ptx = SimpleNamespace(  # type: ignore[assignment]
        shares=lambda *_: supervised, take_back=lambda made: told_of.append(made), state_dict=dict
    )
    monkeypatch.setattr(Model, "shares", lambda self, batch, columns, *given: [TrainShare(batch, *given)] * 2)
    pipeline.run()
    told = pq.read_table(tmp_path / "skipped/step_000001_actor_update_02/supervised.parquet").to_pylist()
    assert told_of == [2, 2, 2], "updates of each step, of which rows do not come again"
    assert [row["sample"] for row in told] == [-3, -2, -1] and [row["loss"] for row in told][:2] == [0.25, 0.75]
    assert told[2] == {"sample": -1, "input_ids": [11] * 4, "response_mask": [False, False, True, True], "ptx_weight": 0.5} | {
        "loss": pytest.approx(math.nan, nan_ok=True)
    }


def test_a_run_ends_with_what_happened_behind_it(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = run_with(config, tmp_path, [[FINE, BROKEN], [BROKEN, BROKEN], [FINE, FINE]], monkeypatch)
    with pytest.raises(NotFinite, match="^actor: 3 updates in a row were skipped"):
        pipeline.run()
    assert pipeline.steps_done == 2
    assert sorted(pipeline.journal.history.records) == [1, 2], "the step that ended it has its metrics"
    assert [json.loads(line)["actor/skipped"] for line in (tmp_path / "updates.jsonl").read_text().splitlines()] == [0, 1, 1, 1]
    pipeline.journal.close("failed: it")


def test_a_checkpoint_from_before_they_were_counted_is_gone_on_from(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = run_with(config, tmp_path, [], monkeypatch)
    state = pipeline.state_dict()
    del state["skipped"]
    pipeline.checkpoints = SimpleNamespace(load=lambda *_: {**state, "steps_done": 2}, newest=None, continues_in_folder=False)  # type: ignore[assignment]
    pipeline.resume()
    assert pipeline.steps_done == 2
