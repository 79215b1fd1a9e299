"""Weights & Biases, MLflow and SwanLab get metrics and settings only: no command line, environment, source code or output. Their own modes
(`mode: offline`, `tracking_uri: sqlite:///...`) decide whether data leaves the machine."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

from roll_lite.observability.trackers import TrackedRun, Tracker

STEP = "step"
MLFLOW_BATCH = 100
"""MLflow's limit of parameters per call; of metrics ten times as many."""
MLFLOW_LONGEST = 500


class WandbTracker(Tracker):
    """Logs the step as a metric: a resumed run may repeat steps, and W&B's own step must not decrease."""

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb reads it when it is imported
        import wandb

        self.run_id = run.id or str(args.pop("id", None) or uuid4().hex[:12])
        private = {
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "silent": True,
        }
        defaults = {"project": run.experiment.replace("/", "-"), "dir": str(run.folder), "resume": "allow"}
        settings = wandb.Settings(**(private | dict(args.pop("settings", {}))))
        own = {**defaults, **args, "id": self.run_id, "config": dict(run.settings), "settings": settings}
        self._run = wandb.init(**own)
        self._run.define_metric("*", step_metric=STEP)
        self._open = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **_finite(metrics)})

    def close(self, exit_state: str = "completed") -> None:
        if self._open:
            self._open = False
            self._run.finish(exit_code=0 if exit_state == "completed" else 1)


class MlflowTracker(Tracker):
    def __init__(
        self, run: TrackedRun, tracking_uri: str | None = None, experiment_name: str | None = None, run_name: str | None = None
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri)
        if run.id is not None:
            self.run_id = run.id
            self._client.update_run(run.id, status="RUNNING")
        else:
            name = experiment_name or run.experiment
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
            self.run_id = self._client.create_run(experiment, run_name=run_name or run.folder.name).info.run_id
            params = [Param(_name(key), str(value)[:MLFLOW_LONGEST]) for key, value in _flat(run.settings)]
            for start in range(0, len(params), MLFLOW_BATCH):
                self._client.log_batch(self.run_id, params=params[start : start + MLFLOW_BATCH])
        self._open = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_name(key), value, now, step) for key, value in _finite(metrics).items()]
        for start in range(0, len(values), 10 * MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=values[start : start + 10 * MLFLOW_BATCH])

    def close(self, exit_state: str = "completed") -> None:
        if self._open:
            self._open = False
            status = {"completed": "FINISHED", "interrupted": "KILLED"}.get(exit_state, "FAILED")
            self._client.set_terminated(self.run_id, status)


class SwanLabTracker(Tracker):
    def __init__(self, run: TrackedRun, **args: Any) -> None:
        import swanlab

        self.run_id = run.id or str(args.pop("id", None) or uuid4().hex[:21])
        probe = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False)
        settings = swanlab.Settings(probe=probe, terminal={"proxy_type": "none"}, interactive=False)
        defaults = {"project": run.experiment.replace("/", "-"), "log_dir": str(run.folder / "swanlab"), "resume": "allow"}
        own = {**defaults, **args, "id": self.run_id, "config": dict(run.settings), "settings": settings}
        self._run = swanlab.init(**own)
        self._open = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_finite(metrics), step=step)

    def close(self, exit_state: str = "completed") -> None:
        if self._open:
            self._open = False
            states = {"completed": "success", "interrupted": "aborted"}
            state = states.get(exit_state, "crashed")
            self._run.finish(state=state, error=exit_state if state == "crashed" else None)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop values that no service can show."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _name(text: str) -> str:
    """Replace characters that MLflow refuses."""
    return re.sub(r"[^\w\-./ ]", "_", text)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
