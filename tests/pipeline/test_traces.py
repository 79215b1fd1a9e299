"""When profiler traces are recorded, and what is told of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from roll_lite.pipeline.traces import Traces
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.model import ModelWorker

TOO_LATE = "the process started within the step"


class Recorded:
    """Two ranks, of which the second is new, and an engine of two workers; they write down what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[Any] = []
        self.told: list[str] = []
        self.journal: Any = SimpleNamespace(folder=folder, console=SimpleNamespace(message=self.told.append))
        self.engines: Any = SimpleNamespace(replicas=SimpleNamespace(each=self.each))
        ranks = SimpleNamespace(name="actor_train", all=self.all)
        self.models: Any = SimpleNamespace(all=[SimpleNamespace(ranks=ranks, bring_home=lambda *asked: self.calls.append(asked))])

    def all(self, method: Any, folder: Path | None) -> list[str]:
        self.calls.append((method, folder))
        return ["", TOO_LATE]

    def each(self, method: Any, folder: Path | None) -> dict[int, list[str]]:
        self.calls.append((method, folder))
        return {2: ["", "the disk is full"]}


def test_the_steps_that_are_named_are_recorded_and_what_is_missing_is_told(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    traces = Traces(recorded.models, recorded.engines, recorded.journal, [3], ["10.0.0.2"])
    for step in (2, 3, 4):
        traces.start(step)
        recorded.calls.append(step)
        traces.write(step)
    folder = tmp_path / "profiles/step_000003"
    started, written = ([(InferWorker.trace, to), (ModelWorker.trace, to)] for to in (None, folder))
    assert recorded.calls == [2, *started, 3, *written, (folder, [["actor_train-0.json.gz"], []], ["10.0.0.2"]), 4]
    assert recorded.told == [
        f"step 3: profiler traces are in {folder}; open them at https://ui.perfetto.dev; "
        f"actor_infer-2-1.json.gz is missing: the disk is full; actor_train-1.json.gz is missing: {TOO_LATE}"
    ]
