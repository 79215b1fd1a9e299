"""Profiler traces of the steps in `profile.steps`, one per training rank and engine process."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from roll_lite.pipeline.clusters import Engines, Models
from roll_lite.pipeline.journal import Journal
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.model import ModelWorker


@dataclass(frozen=True)
class Traces:
    models: Models
    engines: Engines | None
    journal: Journal
    steps: Collection[int] = ()
    nodes_without_run_folder: Collection[str] = ()

    def start(self, step: int) -> None:
        if step in self.steps:
            self._trace_engines(None)
            for model in self.models.all:
                model.ranks.all(ModelWorker.trace, None)

    def write(self, step: int) -> None:
        if step not in self.steps:
            return
        folder = (self.journal.folder / "profiles" / f"step_{step:06d}").resolve()
        failed = self._trace_engines(folder)
        for model in self.models.all:
            found = model.ranks.all(ModelWorker.trace, folder)
            written = {f"{model.ranks.name}-{rank}.json.gz": why for rank, why in enumerate(found)}
            model.bring_home(folder, [[] if why else [name] for name, why in written.items()], self.nodes_without_run_folder)
            failed |= written
        missing = "".join(f"; {name} is missing: {why}" for name, why in failed.items() if why)
        self.journal.console.message(f"step {step}: profiler traces are in {folder}; open them at https://ui.perfetto.dev{missing}")

    def _trace_engines(self, folder: Path | None) -> dict[str, str]:
        whys = self.engines.replicas.each(InferWorker.trace, folder) if self.engines is not None else {}
        return {f"actor_infer-{engine}-{number}.json.gz": why for engine, own in whys.items() for number, why in enumerate(own)}
