"""Traces of torch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from roll_lite.observability.trace_recorder import TraceRecorder
from roll_lite.workers.phases import RankPhases


def names(file: Path) -> set[str]:
    with gzip.open(file) as trace:
        return {event.get("name", "") for event in json.load(trace)["traceEvents"]}


def test_a_trace_holds_what_ran_between_start_and_end_with_backward_passes_and_phases(tmp_path: Path) -> None:
    recorder, file = TraceRecorder(), tmp_path / "step_000003" / "actor_train-0.json.gz"
    torch.ones(3).erfinv()
    recorder.trace(None)
    with RankPhases("actor_train-0", tmp_path).of("train"):
        (torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)).sum().backward()
    assert recorder.trace(file) == ""
    found = names(file)
    assert {"train", "aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= found
    assert "aten::erfinv" not in found
    assert "nothing was recorded" in (recorder.trace(file)), "each recording is written once"


def test_a_repeated_step_is_recorded_anew(tmp_path: Path) -> None:
    recorder = TraceRecorder()
    recorder.trace(None)
    torch.ones(3).erfinv()
    recorder.trace(None)
    torch.ones(3).lgamma()
    assert recorder.trace(tmp_path / "again.json.gz") == ""
    found = names(tmp_path / "again.json.gz")
    assert "aten::lgamma" in found and "aten::erfinv" not in found


def test_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    recorder = TraceRecorder()
    recorder.trace(None)
    assert "File exists" in recorder.trace(tmp_path / "file" / "a.json.gz")

    def refuse(self: object) -> None:
        raise RuntimeError("another profiler is active")

    monkeypatch.setattr(torch.profiler.profile, "start", refuse)
    assert recorder.trace(None) == "another profiler is active"
    assert "nothing was recorded" in (recorder.trace(tmp_path / "b.json.gz"))
