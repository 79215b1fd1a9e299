"""When a validation is begun and waited for, and under which step it is told. The rollout service is a stand-in."""

from __future__ import annotations

import hashlib
import json
import re
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_lite.config.loading import load_config
from roll_lite.data.proto import DataProto, object_column
from roll_lite.distributed.failures import RankFailed
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.clusters import Models
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.scheduler.domain import DataExhausted
from roll_lite.scheduler.stats import DomainStats, RolloutStats

ROOT = Path(__file__).resolve().parents[2]
ASYNC = "rollout={supply: async, max_staleness: 2}"
PROMPTS = ("add", "make", "repeat")


def rows(version: int, newest: int) -> DataProto:
    return DataProto(
        {
            "sample": torch.arange(3),
            "group": torch.arange(3),
            "domain": object_column(PROMPTS),
            "parts": object_column([()] * 3),
            "finish_reason": object_column(["stop"] * 3),
            "correct": torch.tensor([1.0, 0.0, 1.0]),
            "score": torch.tensor([1.0, 0.0, 1.0]),
            "response_length": torch.tensor([4, 5, 6]),
            "answer": torch.zeros(3, dtype=torch.int64),
            "min_version": torch.full((3,), version),
            "max_version": torch.tensor([version, version, newest]),
        }
    )


class Pending:
    """Answers after so many looks."""

    def __init__(self, source: Source, step: int, looks: int) -> None:
        self.source, self.step, self.looks = source, step, looks
        self.error: Exception | None = None
        self.version = source.version

    def answer(self) -> Any:
        if self.error is not None:
            raise self.error
        self.looks -= 1
        return self.value() if self.looks < 0 else None

    def value(self) -> Any:
        stats = RolloutStats({name: DomainStats() for name in PROMPTS}, wall_s=2.5)
        return rows(self.version, self.source.version), stats


class Source:
    """Notes what the pipeline does."""

    judge_roles = ()

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.version = 0
        self.story: list[str] = []
        self.started: list[Pending] = []
        self.loads: list[str] = []

    def loaded(self, phase: Any, version: int) -> Any:
        self.loads.append(phase)
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def wait_for_files(self) -> None:
        pass

    def sync(self, version: int) -> None:
        if version != self.version:
            self.story.append(f"weights {version}")
        self.version = version

    def start_validation(self, samples: int, sampling: Any, steps_done: int) -> Pending:
        assert set(sampling) == set(PROMPTS)
        self.story.append(f"begin {steps_done}")
        self.started.append(Pending(self, steps_done, self.looks))
        return self.started[-1]

    def finish_validation(self, pending: Pending, version: int) -> Any:
        self.story.append(f"end {pending.step}")
        return pending.value()


def pipeline_of(folder: Path, source: Source, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RLVRPipeline:
    monkeypatch.chdir(ROOT)
    given = ["trackers=[{name: jsonl}]", "steps=4", "validation.every=2", *overrides]
    config = load_config("tiny_grpo", ROOT / "examples/configs", given)
    journal = Journal(config, folder)
    journal.connect()

    def step(self: RLVRPipeline) -> None:
        source.sync(self.version)
        source.story.append(f"step {self.steps_done + 1}")
        self.steps_done += 1
        self.version += 1

    monkeypatch.setattr(RLVRPipeline, "step", step)
    checkpoints: Any = SimpleNamespace(
        copy_every=0,
        load=lambda *_: None,
        finished=nullcontext,
        finish_if_written=lambda: None,
        finish=lambda: None,
        continues_in_folder=False,
        newest=None,
    )
    pipeline = RLVRPipeline(config, Models(None), source, journal, checkpoints, BatchFiles(config, folder))  # type: ignore[arg-type]
    monkeypatch.setattr(pipeline.agreement, "check", lambda *_: None)
    monkeypatch.setattr(pipeline, "export_model", lambda: None)
    return pipeline


def told(folder: Path) -> list[tuple[int, float, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(one["step"], one["validation/version_min"], one["validation/version_max"]) for one in records if "validation/accuracy" in one]


def test_synchronous_training_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(looks=0)
    pipeline_of(tmp_path, source, monkeypatch).run()
    assert source.story == [
        *("begin 0", "end 0", "step 1", "weights 1", "step 2", "weights 2", "begin 2", "end 2"),
        *("step 3", "weights 3", "step 4", "weights 4", "begin 4", "end 4"),
    ]
    assert told(tmp_path) == [(0, 0, 0), (2, 2, 2), (4, 4, 4)]


def test_an_evaluation_is_one_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`add` and `repeat` are right, `make` is wrong; three prompts with means 1, 0, 1."""
    (tmp_path / "config.yaml").write_bytes(b"mode: evaluate\n")
    source = Source(looks=0)
    pipeline = pipeline_of(tmp_path, source, monkeypatch, "mode=evaluate")
    pipeline.run()
    pipeline.journal.close("completed")
    assert source.story == ["begin 0", "end 0"]
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["model"] == str(ROOT / "examples/models/tiny")
    assert evaluation["config_sha256"] == hashlib.sha256(b"mode: evaluate\n").hexdigest()
    assert list(evaluation["results"]) == ["overall", *PROMPTS]
    overall = evaluation["results"]["overall"]
    assert overall["accuracy"] == pytest.approx(2 / 3) and overall["accuracy_error"] == pytest.approx(1 / 3)
    assert (overall["prompts"], overall["samples"], overall["truncated"], overall["seconds"]) == (3, 3, 0, 2.5)
    assert evaluation["results"]["make"] | {"reward": 0.0, "failed": 0.0} == evaluation["results"]["make"]
    shown = capsys.readouterr().out
    assert re.search(r"overall +66\.7% +33\.3% +0\.67 +0\.0% +5 +3 +3", shown) and re.search(r"make +0\.0% +- ", shown)
    assert "before training" not in shown and "evaluated in" in shown


def test_beside_asynchronous_steps_it_is_told_under_the_step_that_it_was_begun_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is over when it is looked at after one step, the last one is waited for."""
    source = Source(looks=0)
    pipeline_of(tmp_path, source, monkeypatch, ASYNC).run()
    assert source.story == [
        *("begin 0", "step 1", "end 0", "weights 1", "step 2", "weights 2", "begin 2", "step 3", "end 2"),
        *("weights 3", "step 4", "weights 4", "begin 4", "end 4"),
    ]
    assert told(tmp_path) == [(0, 0, 0), (2, 2, 2), (4, 4, 4)]


def test_the_next_one_waits_for_it_before_new_weights_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(looks=100)
    pipeline = pipeline_of(tmp_path, source, monkeypatch, ASYNC)
    pipeline.run()
    assert source.story == [
        *("begin 0", "step 1", "weights 1", "step 2", "end 0", "weights 2", "begin 2"),
        *("step 3", "weights 3", "step 4", "end 2", "weights 4", "begin 4", "end 4"),
    ]
    assert told(tmp_path) == [(0, 0, 1), (2, 2, 3), (4, 4, 4)], "weights that came meanwhile are told"
    pipeline.journal.close("completed")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy"]["overall"] == {"before": 2 / 3, "after": 2 / 3}


def test_what_is_wrong_with_it_ends_the_run_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(looks=100)
    pipeline = pipeline_of(tmp_path, source, monkeypatch, ASYNC)
    pipeline.validate()
    source.started[0].error = RuntimeError("every sample of the validation failed")
    with pytest.raises(RuntimeError, match="every sample"):
        pipeline.between_steps()


def test_without_staleness_it_is_waited_for_as_in_a_synchronous_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(looks=100)
    pipeline_of(tmp_path, source, monkeypatch, "rollout={supply: async, max_staleness: 0}").validate()
    assert source.story == ["begin 0", "end 0"]


def test_a_resumed_run_begins_with_one_whatever_was_under_way_when_it_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(looks=100)
    pipeline = pipeline_of(tmp_path, source, monkeypatch, ASYNC)
    state = {"steps_done": 3, "version": 3, **{name: part.state_dict() for name, part in pipeline.remembering.items()}}
    monkeypatch.setattr(pipeline.checkpoints, "load", lambda *_: state)
    pipeline.run()
    assert source.story == ["weights 3", "begin 3", "step 4", "end 3", "weights 4", "begin 4", "end 4"]
    assert told(tmp_path) == [(3, 3, 3), (4, 4, 4)]


@pytest.mark.parametrize("overrides", [[], [ASYNC]])
def test_a_run_that_resumed_beyond_its_last_step_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> None:
    source, exported = Source(looks=100), list[int]()
    pipeline = pipeline_of(tmp_path, source, monkeypatch, *overrides)
    state = {"steps_done": 6, "version": 6, **{name: part.state_dict() for name, part in pipeline.remembering.items()}}
    monkeypatch.setattr(pipeline.checkpoints, "load", lambda *_: state)

    def export() -> None:
        assert exported == []
        exported.append(pipeline.steps_done)

    monkeypatch.setattr(pipeline, "export_model", export)
    pipeline.run()
    assert exported == [6] and [step for step, *_ in told(tmp_path)] == [6]


@pytest.mark.parametrize(("pending", "story"), [(2, ["weights 3", "begin 2", "step 4", "end 2"]), (None, ["weights 3", "step 4"])])
def test_one_that_was_under_way_at_the_checkpoint_begins_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pending: int | None,
    story: list[str],
) -> None:
    source = Source(looks=100)
    pipeline = pipeline_of(tmp_path, source, monkeypatch, ASYNC)
    state = {**pipeline.state_dict(), "steps_done": 3, "version": 3, "validation": pending}
    monkeypatch.setattr(pipeline.checkpoints, "load", lambda *_: state)
    monkeypatch.setattr(pipeline.checkpoints, "continues_in_folder", True)
    pipeline.run()
    assert source.story[: len(story)] == story
    assert told(tmp_path)[:-1] == ([(2, 3, 3)] if pending else [])
    assert ("the validation of step 2 was under way at the checkpoint, and starts again" in capsys.readouterr().out) == ("begin 2" in story)


@pytest.mark.parametrize("lost", ["rank", "service"])
def test_one_of_an_earlier_step_that_a_loss_interrupts_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    source = Source(looks=0)
    pipeline = pipeline_of(tmp_path, source, monkeypatch)
    finish, failures = source.finish_validation, [RankFailed("actor_train", 0, "validation", "its process died")]

    def finish_validation(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return finish(*given)

    monkeypatch.setattr(source, "finish_validation", finish_validation)
    with pytest.raises(RankFailed):
        pipeline.validate(2)
    if lost == "service":
        assert pipeline.validation.forget() == 2
        pipeline.validate(2)  # by the recovery
    loads = len(source.loads)
    pipeline.validate(2)
    assert source.loads[loads:] == ([] if lost == "service" else ["sync_weights", "generate"]), "the recovery left the engines offloaded"
    pipeline.validate(2)
    assert source.story == ["begin 2", *(["begin 2"] if lost == "service" else []), "end 2"]
    assert [step for step, *_ in told(tmp_path)] == [2]


@pytest.mark.parametrize("overrides", [[], [ASYNC]])
@pytest.mark.parametrize(("last", "held_out", "saves"), [(2, [0, 2], [2, 2]), (3, [0, 2, 3], [2, 3]), (0, [0], [])])
def test_a_run_without_further_prompts_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, held_out: list[int], saves: list[int], overrides: list[str]
) -> None:
    pipeline, saved = pipeline_of(tmp_path, Source(looks=9), monkeypatch, "checkpoint.every=2", *overrides), list[int]()
    exported = list[int]()
    step = RLVRPipeline.step

    def until_exhausted(self: RLVRPipeline) -> None:
        if self.steps_done == last:
            raise DataExhausted
        step(self)

    monkeypatch.setattr(RLVRPipeline, "step", until_exhausted)
    monkeypatch.setattr(pipeline, "export_model", lambda: exported.append(pipeline.steps_done))
    monkeypatch.setattr(pipeline, "compare_replicas", lambda _: None)
    monkeypatch.setattr(pipeline, "save_checkpoint", lambda: saved.append(pipeline.steps_done))
    pipeline.run()
    assert exported == [last] and saved == saves and [step for step, *_ in told(tmp_path)] == held_out


def test_a_checkpoint_knows_the_one_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_of(tmp_path, Source(looks=1), monkeypatch, ASYNC)
    pipeline.validate()
    assert pipeline.state_dict()["validation"] == 0
    pipeline.look_at_validation()
    pipeline.look_at_validation()
    assert pipeline.state_dict()["validation"] is None


@pytest.mark.parametrize(("collects", "lost"), [(True, None), (False, None), (True, 2), (True, 4)])
def test_a_preempted_run_saves_its_last_step_with_what_is_under_way_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collects: bool, lost: int | None
) -> None:
    source, saved = Source(looks=100), list[Any]()
    pipeline = pipeline_of(tmp_path, source, monkeypatch, ASYNC)
    pipeline.recovery.reached = {"steps_done": 3, "validation": None}
    pipeline.recovery.source_state = {"batches": 3, "groups": "old"}

    def unfinished(state: dict[str, Any], within_s: float) -> tuple[dict[str, Any], bytes]:
        assert state == {"batches": 3, "groups": "old"} and within_s > 1
        if not collects:
            raise TimeoutError
        return {**state, "groups": "new"}, b"samples"

    for name, call in {"unfinished": unfinished, "abandon": lambda within_s: None}.items():
        monkeypatch.setattr(source, name, call, raising=False)
    for name, call in {"save": lambda *given: saved.append(given[1:]), "upload_last": lambda _: None}.items():
        monkeypatch.setattr(pipeline.checkpoints, name, call, raising=False)
    if lost is not None:  # with the rollout service, which is starting again; 4: the run goes back to step 3
        pipeline.recovery.lost_validation = lost
    else:
        pipeline.validate(2)
    monkeypatch.setattr(WATCHDOG, "preempted_at", time.monotonic())
    pipeline.save_before_the_end()
    rollouts = {"batches": 3, "groups": "new" if collects else "old"}
    assert saved == [(rollouts, {"steps_done": 3, "validation": None if lost == 4 else 2}, b"samples" if collects else b"")]


@pytest.mark.parametrize(
    ("done", "story"),
    [(1, ["weights 1", "step 2"]), (2, ["weights 2", "begin 2", "end 2", "step 3"]), (4, ["weights 4", "begin 4", "end 4"])],
)
def test_a_run_that_goes_on_in_its_folder_validates_where_it_is_due_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int, story: list[str]
) -> None:
    source = Source(looks=0)
    pipeline = pipeline_of(tmp_path, source, monkeypatch)
    state = {"steps_done": done, "version": done, **{name: part.state_dict() for name, part in pipeline.remembering.items()}}
    monkeypatch.setattr(pipeline.checkpoints, "load", lambda *_: state)
    monkeypatch.setattr(pipeline.checkpoints, "continues_in_folder", True)
    pipeline.run()
    assert source.story[: len(story)] == story
