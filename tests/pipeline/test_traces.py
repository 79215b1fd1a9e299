"""When profiler traces are recorded, and what is told of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from roll_lite.pipeline.traces import Traces

TOO_LATE = "the process started within the step"


class Recorded:
    """Two ranks, of which the second is new, and an engine of two workers; they write down what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[Any] = []
        self.told: list[str] = []
        self.journal: Any = SimpleNamespace(folder=folder, console=SimpleNamespace(message=self.told.append))
        self.source: Any = SimpleNamespace(start_trace=lambda: self.calls.append("engines start"), write_trace=self.write_engines)
        ranks = SimpleNamespace(name="actor_train", all=self.all)
        self.models: Any = SimpleNamespace(all=[SimpleNamespace(ranks=ranks, bring_home=lambda *asked: self.calls.append(asked))])

    def all(self, method: Any, *arguments: Any) -> list[str | None]:
        self.calls.append(method.__name__)
        return [None, TOO_LATE]

    def write_engines(self, folder: Path) -> dict[str, str | None]:
        self.calls.append(("engines write", folder))
        return {"actor_infer-0-0.json.gz": None, "actor_infer-0-1.json.gz": "the disk is full"}


def test_the_steps_that_are_named_are_recorded_and_what_is_missing_is_told(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    traces = Traces([3], recorded.models, recorded.source, recorded.journal, ["10.0.0.2"])
    for step in (2, 3, 4):
        traces.start(step)
        recorded.calls.append(step)
        traces.write(step)
    folder = tmp_path / "profiles/step_000003"
    home = (folder, [["actor_train-0.json.gz"], []], ["10.0.0.2"])
    assert recorded.calls == [2, "engines start", "start_trace", 3, ("engines write", folder), "write_trace", home, 4]
    assert recorded.told == [
        f"step 3: profiler traces are in {folder}; open them at https://ui.perfetto.dev; those of engines on 10.0.0.2 are there, in a "
        f"folder of the same name; actor_infer-0-1.json.gz is missing: the disk is full; actor_train-1.json.gz is missing: {TOO_LATE}"
    ]
