import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic_core import PydanticSerializationError
from support_view import make_run

from roll_lite.observability.health import Finding
from roll_lite.observability.report import LivePicture, LiveReport, held_out_change, largest_k, write_summary


def test_the_summary_is_what_the_readme_promises(tmp_path: Path) -> None:
    before = {"validation/accuracy": 0.25, "domain/add/validation/accuracy": 0.2, "domain/make/validation/accuracy": 0.3}
    after = {"validation/accuracy": 0.75, "domain/add/validation/accuracy": 0.9}
    write_summary(
        tmp_path,
        domains=["add", "make"],
        validation=held_out_change(before, after),
        steps=40,
        wall_s={"total": 100.00049, "generate": 60.0},
        tokens={"prompt": 10, "response": 20},
        exit_state="completed",
        findings=[Finding("truncated", "cut at max_tokens", 3, 5)],
    )
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "accuracy": {
            "overall": {"before": 0.25, "after": 0.75},
            "add": {"before": 0.2, "after": 0.9},
            "make": {"before": 0.3, "after": None},
        },
        "validation": {
            "overall": {"accuracy": {"before": 0.25, "after": 0.75}},
            "add": {"accuracy": {"before": 0.2, "after": 0.9}},
            "make": {"accuracy": {"before": 0.3, "after": None}},
        },
        "steps": 40,
        "resumed_after": 0,
        "wall_s": {"total": 100.0, "generate": 60.0},
        "tokens": {"prompt": 10, "response": 20},
        "warnings": [{"sign": "truncated", "message": "cut at max_tokens", "first_step": 3, "steps": 5}],
        "exit": "completed",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"], "no draft is left"


def test_everything_that_validations_measure_is_in_the_summary_by_what_it_is_of() -> None:
    before = {"validation/pass@2": 0.5, "validation/pass@16": 0.75, "domain/math/level:1/2/validation/maj@16": 0.5, "reward/mean": 1.0}
    assert held_out_change(before, {"validation/pass@16": 1.0}) == {
        "overall": {"pass@2": {"before": 0.5, "after": None}, "pass@16": {"before": 0.75, "after": 1.0}},
        "math/level:1/2": {"maj@16": {"before": 0.5, "after": None}},
    }
    assert largest_k(before) == 16 and largest_k(["validation/accuracy"]) is None


def test_a_later_summary_replaces_the_first_and_numbers_json_lacks_are_null(tmp_path: Path) -> None:
    for state in ("completed", "interrupted", "failed: actor_train rank 1 in train: out of memory"):
        write_summary(
            tmp_path,
            domains=[],
            validation=held_out_change({"validation/accuracy": math.nan}, {}),
            steps=0,
            wall_s={"total": 1.0},
            tokens={"per_second": math.inf},
            exit_state=state,
        )
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["exit"] == state
    assert summary["accuracy"]["overall"]["before"] is None and summary["tokens"]["per_second"] is None


def test_a_failure_in_writing_leaves_the_old_summary(tmp_path: Path) -> None:
    good = {"domains": [], "validation": {}, "steps": 1, "wall_s": {"total": 1.0}, "tokens": {}}
    write_summary(tmp_path, **good, exit_state="completed")
    with pytest.raises(PydanticSerializationError):
        write_summary(tmp_path, **(good | {"tokens": {"a": object()}}), exit_state="completed")
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


def test_other_exit_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="crashed"):
        write_summary(tmp_path, domains=[], validation={}, steps=1, wall_s={"total": 1.0}, tokens={}, exit_state="crashed")


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_picture_is_drawn_after_a_change_and_not_again_too_soon() -> None:
    drawn: list[float] = []
    picture = LivePicture(lambda: drawn.append(time.monotonic()), every_s=0.5)
    time.sleep(0.1)
    assert not drawn, "nothing has changed"
    for _ in range(3):
        picture.changed()
    until(lambda: len(drawn) == 1)
    picture.changed()
    until(lambda: len(drawn) == 2)
    assert drawn[1] - drawn[0] >= 0.5, "the last change is drawn, half a second after the one before"
    picture.close()


def test_a_picture_that_is_closed_waits_for_nothing() -> None:
    drawn: list[int] = []
    picture = LivePicture(lambda: drawn.append(1), every_s=600.0)
    picture.changed()
    until(lambda: len(drawn) == 1)
    picture.changed()
    started = time.monotonic()
    picture.close()
    assert time.monotonic() - started < 60 and len(drawn) == 1
    picture.changed()
    assert len(drawn) == 1


def test_a_picture_that_cannot_be_written_is_tried_again() -> None:
    tries: list[int] = []

    def draw() -> None:
        tries.append(1)
        raise OSError("no room")

    picture = LivePicture(draw, every_s=0.01)
    for number in (1, 2):
        picture.changed()
        until(lambda number=number: len(tries) >= number)  # type: ignore[misc]
    picture.close()


def test_the_report_is_written_during_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "small/first")
    report = LiveReport(folder, every=2)
    report.step_done(1)
    assert report._process is None
    report.step_done(2)
    assert report._process is not None
    first = report._process
    report.step_done(4)
    assert report._process is first, "one at a time"
    assert first.wait() == 0 and "small/first" in (folder / "report.html").read_text()
    report.step_done(6)
    report.close()
    assert report._process is not first and report._process.returncode is not None
