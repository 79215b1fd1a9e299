"""Trackers get flat metric names and numbers once per step."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from roll_lite.config.problems import without_secrets
from roll_lite.config.schema.run import TrackerConfig

METRICS_FILE = "metrics.jsonl"
IDS_FILE = "trackers.json"
"""Ids of this run at tracking services. A run that resumes this one continues under them."""


@dataclass(frozen=True)
class TrackedRun:
    folder: Path
    experiment: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Configuration without secrets."""
    id: str | None = None
    """Id of the resumed run."""


class Tracker(ABC):
    """Base class. A user's own tracker is called with a `TrackedRun` and the `args` of its entry."""

    run_id: str | None = None
    """Id under which a later run can continue."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step. Further calls for the same step bring other names."""

    @abstractmethod
    def close(self, exit_state: str = "completed") -> None:
        """Close; may be called twice. `exit_state`: completed, interrupted, or failed: <cause>."""


class JsonlTracker(Tracker):
    """Writes `metrics.jsonl`: one object per call, flushed before it returns. NaN and infinities become null."""

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

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, exit_state: str = "completed") -> None:
        self._writer.close()


class HistoryTracker(Tracker):
    """Metrics in memory, one record per step. Records are replaced, never changed: another thread may be reading them."""

    def __init__(self) -> None:
        self.records: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records[step] = {**self.records.get(step, {}), **metrics}

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


LOCAL: dict[str, Callable[[TrackedRun], Tracker]] = {"jsonl": JsonlTracker, "tensorboard": TensorBoardTracker}
SERVICES = {
    "wandb": "roll_lite.observability.tracking_services.WandbTracker",
    "mlflow": "roll_lite.observability.tracking_services.MlflowTracker",
    "swanlab": "roll_lite.observability.tracking_services.SwanLabTracker",
}
"""Classes by name, imported only if used."""


SECRET_VARIABLE = re.compile("key|token|secret|password|credential", re.IGNORECASE)
SHORTEST_SECRET = 6


def for_trackers(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings without the section `trackers` and without secrets, among them values of environment variables with such names."""
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


def build_trackers(configs: Sequence[TrackerConfig], run: TrackedRun, goes_on_from: Path | None = None) -> list[Tracker]:
    """Build the configured trackers. `goes_on_from`: folder of the resumed run."""
    known = _ids(goes_on_from) if goes_on_from is not None else {}
    built = [_built(config, replace(run, id=known.get(config.name)), f"trackers.{index}") for index, config in enumerate(configs)]
    ids = {config.name: tracker.run_id for config, tracker in zip(configs, built, strict=True) if tracker.run_id is not None}
    if ids:
        (run.folder / IDS_FILE).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    return built


def _built(config: TrackerConfig, run: TrackedRun, path: str) -> Tracker:
    if config.name in LOCAL:
        return LOCAL[config.name](run)
    module, _, name = SERVICES.get(config.name, config.name).rpartition(".")
    try:
        tracker = getattr(import_module(module), name)(run, **config.args)
    except Exception as error:  # a process edge: see Trackers
        raise ValueError(f"{path}: {config.name}: {type(error).__name__}: {error}") from error
    if not isinstance(tracker, Tracker):
        raise ValueError(f"{path}.name: {config.name} is {type(tracker).__name__}, no {Tracker.__module__}.{Tracker.__name__}")
    return tracker


def _ids(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / IDS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # not a run's folder, or a run without ids
        return {}
