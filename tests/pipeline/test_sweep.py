"""Several runs, one after the other: programs that leave what a run leaves, and end as they are told to."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.pipeline.sweep import Choice, run_each

RUN = """
import json, os, pathlib, sys
settings = dict(one.split("=", 1) for one in sys.argv[1:])
if settings["end"] != "2":
    place = pathlib.Path(settings["run_dir"]) / settings["seed"]
    place.mkdir(parents=True)
    accuracy = {"overall": {"before": 0.5, "after": 0.75 if settings["end"] == "0" else None}}
    state = {"0": "completed", "130": "interrupted"}.get(settings["end"], "failed: x")
    (place / "summary.json").write_text(json.dumps({"exit": state, "accuracy": accuracy}))
    latest = place.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(place)
sys.exit(int(settings["end"]))
"""


def swept(folder: Path, ends: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[list[str]], str]:
    """Exit code, the table's lines in words, and what was said on the way."""
    script = folder / "run.py"
    script.write_text(RUN)
    config: Any = SimpleNamespace(run_dir=folder / "runs")
    choices = [Choice([f"run_dir={folder / 'runs'}", f"seed={n}", f"end={end}", "api_key=sk-1"], config) for n, end in enumerate(ends)]
    code = run_each([sys.executable, str(script)], choices)
    said = capsys.readouterr()
    return code, [line.split() for line in said.out.splitlines() if "seed=" in line], said.err


def test_each_has_a_line_with_how_it_ended_and_a_failure_keeps_no_other_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, said = swept(tmp_path, ["0", "1", "2", "0"], capsys)
    assert code == 1
    assert [next(word for word in line if word.startswith("seed=")) for line in lines] == [f"seed={n}" for n in range(4)]
    for line, words in zip(lines, ["completed 50.0% -> 75.0%", "failed: x 50.0% -> ?", "did not start", "completed 50.0% ->"], strict=True):
        assert all(word in line for word in words.split()), line
    assert [str(tmp_path / "runs" / str(n)) in line for n, line in enumerate(lines)] == [True, True, False, True]
    assert "run 4 of 4: " in said


def test_an_interruption_ends_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = swept(tmp_path, ["0", "130", "0"], capsys)
    assert code == 130 and len(lines) == 2 and "interrupted" in lines[1]


def test_keys_are_shown_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, said = swept(tmp_path, ["0"], capsys)
    assert "sk-1" not in said and not any("sk-1" in word for line in lines for word in line)
