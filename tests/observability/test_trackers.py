import json
import math
from pathlib import Path

from roll_lite.config.schema import TrackerConfig
from roll_lite.observability.trackers import HistoryTracker, JsonlTracker, Trackers, build_trackers


def test_jsonl_is_on_disk_after_each_step(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5, "critic/explained_variance": math.nan})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "reward/mean": 0.5, "critic/explained_variance": None}]
    tracker.log(2, {"reward/mean": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    tracker.close()
    tracker.close()


def test_jsonl_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JsonlTracker(tmp_path)
        tracker.log(step, {})
        tracker.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_tensorboard_files_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = build_trackers([TrackerConfig(type="tensorboard")], tmp_path)
    tracker.log(1, {"domain/math/reward/mean": 0.25})
    tracker.log(2, {"domain/math/reward/mean": 0.75})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("domain/math/reward/mean")] == [(1, 0.25), (2, 0.75)]


def test_the_configured_trackers_are_built(tmp_path: Path) -> None:
    history = HistoryTracker()
    trackers = Trackers([*build_trackers([TrackerConfig(type="jsonl")], tmp_path), history])
    trackers.log(3, {"actor/lr": 0.1})
    trackers.log(3, {"validation/accuracy": 0.5})
    trackers.close()
    assert history.records == {3: {"actor/lr": 0.1, "validation/accuracy": 0.5}}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
