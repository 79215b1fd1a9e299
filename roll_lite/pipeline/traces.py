"""Profiler traces of the steps in `profile.steps`: one of each training rank and each engine process."""

from __future__ import annotations

from collections.abc import Collection

from roll_lite.pipeline.clusters import Models
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.sources import BatchSource
from roll_lite.workers.model import ModelWorker

FOLDER = "profiles"


class Traces:
    def __init__(self, steps: Collection[int], models: Models, source: BatchSource, journal: Journal, apart: Collection[str] = ()) -> None:
        """`apart`: addresses of nodes that do not share the run's folder."""
        self._steps = steps
        self._models = models
        self._source = source
        self._journal = journal
        self._apart = apart

    def start(self, step: int) -> None:
        """Start to record if the step is to be recorded. A repeated step is recorded anew."""
        if step in self._steps:
            self._source.start_trace()
            for model in self._models.all:
                model.ranks.all(ModelWorker.start_trace)

    def write(self, step: int) -> None:
        """Write the traces of a step that has ended, and say where they are."""
        if step not in self._steps:
            return
        folder = (self._journal.folder / FOLDER / f"step_{step:06d}").resolve()
        failed = self._source.write_trace(folder)
        for model in self._models.all:
            found = model.ranks.all(ModelWorker.write_trace, folder)
            written = {f"{model.ranks.name}-{rank}.json.gz": why for rank, why in enumerate(found)}
            model.bring_home(folder, [[] if why else [name] for name, why in written.items()], self._apart)
            failed |= written
        told = [f"step {step}: profiler traces are in {folder}; open them at https://ui.perfetto.dev"]
        if self._apart:
            told.append(f"those of engines on {', '.join(self._apart)} are there, in a folder of the same name")
        self._journal.console.message("; ".join([*told, *(f"{name} is missing: {why}" for name, why in failed.items() if why)]))
