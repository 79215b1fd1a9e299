"""Where metrics are written. A tracker gets flat names and numbers once per step."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from roll_lite.config.schema import TrackerConfig

METRICS_FILE = "metrics.jsonl"


class Tracker(ABC):
    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """May be called more than once for a step, with different names."""

    @abstractmethod
    def close(self) -> None:
        """Safe to call twice."""


class JsonlTracker(Tracker):
    """`metrics.jsonl`: one object per call, on disk when the call returns. Numbers that JSON lacks (NaN, infinities) become null."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker(Tracker):
    """Event files under `tensorboard/`."""

    def __init__(self, folder: Path) -> None:
        # Imported here: it takes a second that runs without this tracker need not spend.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class HistoryTracker(Tracker):
    """Keeps everything in memory, one record per step, for the report at the end."""

    def __init__(self) -> None:
        self.records: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.setdefault(step, {}).update(metrics)

    def close(self) -> None:
        pass


class Trackers(Tracker):
    """Several as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"jsonl": JsonlTracker, "tensorboard": TensorBoardTracker}


def build_trackers(configs: Sequence[TrackerConfig], folder: Path) -> list[Tracker]:
    """Those that the configuration names, writing under the run's folder."""
    return [TRACKERS[config.type](folder) for config in configs]
