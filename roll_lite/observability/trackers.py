from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from roll_lite.config.problems import without_secrets
from roll_lite.config.schema.run import TrackerConfig

METRICS_FILE = "metrics.jsonl"
IDS_FILE = "trackers.json"
"""Ids of this run at tracking services, also stored in checkpoints. A run that resumes this run continues under them."""


@dataclass(frozen=True)
class TrackedRun:
    folder: Path
    experiment: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    repeats_from: int | None = None
    """First step that a resumed run repeats in its folder; None for a new folder."""
    id: str | None = None
    """Tracking service's id of the resumed run; None for a new run."""


class Tracker(ABC):
    """Base class. A user's tracker is called with a `TrackedRun` and the `args` of its YAML entry."""

    run_id: str | None = None
    """The service's id of this run, for resuming."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step. Later calls for the same step add other metrics."""

    @abstractmethod
    def close(self, exit_state: str = "completed") -> None:
        """Close; may be called twice. `exit_state`: completed, interrupted, or failed: <cause>."""


class JsonlTracker(Tracker):
    """Writes `metrics.jsonl`: one flushed object per call. NaN and infinities become null."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = (run.folder / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, exit_state: str = "completed") -> None:
        self._file.close()


class TensorBoardTracker(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        # Imported here: it takes a second.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.repeats_from, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, exit_state: str = "completed") -> None:
        self._writer.close()


class HistoryTracker(Tracker):
    """Keeps metrics in memory by step. Records are replaced, never changed: another thread may read them."""

    def __init__(self) -> None:
        self.records: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Each step brings its names as new strings, which together would take more memory than the numbers.
        self.records[step] = {**self.records.get(step, {}), **{sys.intern(name): value for name, value in metrics.items()}}

    def restore(self, file: Path) -> None:
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            record = json.loads(line)
            self.log(record.pop("step"), {name: math.nan if value is None else value for name, value in record.items()})

    def close(self, exit_state: str = "completed") -> None:
        pass


class Trackers(Tracker):
    """Several trackers as one. A tracker that fails is dropped, and the run continues."""

    def __init__(self, trackers: Sequence[Tracker], tell: Callable[[str], None] = lambda _: None) -> None:
        self._trackers = list(trackers)
        self._tell = tell

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def close(self, exit_state: str = "completed") -> None:
        self._each(lambda tracker: tracker.close(exit_state))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # a process edge: a service or a user's code may fail in any way; the failure is reported
                self._trackers.remove(tracker)
                self._tell(f"{type(tracker).__name__} failed and gets nothing more: {type(error).__name__}: {error}")


# ---------------------------------------------------------------- services

# Weights & Biases, MLflow and SwanLab get metrics and settings only: no command line, environment, source code or output. Their own modes
# (`mode: offline`, `tracking_uri: sqlite:///...`) decide whether data leaves the machine.

STEP = "step"
MLFLOW_BATCH = 100
"""Maximum parameters per MLflow call; metrics: ten times as many."""
MLFLOW_LONGEST = 500


class WandbTracker(Tracker):
    """Logs the step as a metric: W&B's own step must not decrease, but resumed runs repeat steps."""

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
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _name(text: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", text)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


LOCAL: dict[str, Callable[[TrackedRun], Tracker]] = {"jsonl": JsonlTracker, "tensorboard": TensorBoardTracker}
SERVICES: dict[str, Callable[..., Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker, "swanlab": SwanLabTracker}


# ---------------------------------------------------------------- built from the configuration

SECRET_VARIABLE = re.compile("key|token|secret|password|credential", re.IGNORECASE)
SHORTEST_SECRET = 6


def for_trackers(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Remove the section `trackers` and secrets, such as values of environment variables with secret-like names."""
    secrets = {value: name for name, value in environment.items() if SECRET_VARIABLE.search(name) and len(value) >= SHORTEST_SECRET}

    def shown(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shown(one) for key, one in value.items()}
        if isinstance(value, list):
            return [shown(one) for one in value]
        for secret, name in secrets.items() if isinstance(value, str) else ():
            value = value.replace(secret, f"${{oc.env:{name}}}")
        return value

    return {key: shown(value) for key, value in without_secrets(dict(settings)).items() if key != "trackers"}


def build_trackers(configs: Sequence[TrackerConfig], run: TrackedRun, known: Mapping[str, str] | None = None) -> list[Tracker]:
    """Build a run's trackers. `known`: the resumed run's ids at tracking services, to continue under them."""
    known = known or {}
    built = [_built(config, replace(run, id=known.get(config.name)), f"trackers.{index}") for index, config in enumerate(configs)]
    ids = {config.name: tracker.run_id for config, tracker in zip(configs, built, strict=True) if tracker.run_id is not None}
    if ids:
        (run.folder / IDS_FILE).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    return built


def _built(config: TrackerConfig, run: TrackedRun, path: str) -> Tracker:
    if config.name in LOCAL:
        return LOCAL[config.name](run)
    module, _, name = config.name.rpartition(".")
    try:
        make = SERVICES.get(config.name) or getattr(import_module(module), name)
        tracker = make(run, **config.args)
    except Exception as error:  # a process edge: see Trackers
        raise ValueError(f"{path}: {config.name}: {type(error).__name__}: {error}") from error
    if not isinstance(tracker, Tracker):
        raise ValueError(f"{path}.name: {config.name} is {type(tracker).__name__}, no {Tracker.__module__}.{Tracker.__name__}")
    return tracker


def tracker_ids(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / IDS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # not a run's folder, or a run without ids
        return {}
