import json
import math
import resource
import socket
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from roll_lite.config.schema.run import LOCAL_TRACKERS, TRACKER_PACKAGES, TrackerConfig
from roll_lite.observability.trackers import (
    TRACKERS,
    HistoryTracker,
    JsonlTracker,
    TrackedRun,
    Trackers,
    build_trackers,
    shown_settings,
    tracker_ids,
)


def test_jsonl_is_on_disk_after_each_step(tmp_path: Path) -> None:
    tracker = JsonlTracker(TrackedRun(tmp_path))
    tracker.log(1, {"reward/mean": 0.5, "critic/explained_variance": math.nan})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "reward/mean": 0.5, "critic/explained_variance": None}]
    tracker.log(2, {"reward/mean": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    tracker.close()
    tracker.close()


def test_jsonl_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JsonlTracker(TrackedRun(tmp_path))
        tracker.log(step, {})
        tracker.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_full_disk_ends_the_run_and_no_part_of_a_line_stays(tmp_path: Path) -> None:
    history = HistoryTracker()
    trackers = Trackers([JsonlTracker(TrackedRun(tmp_path)), history])
    trackers.log(1, {"x": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, before[1]))
    try:
        with pytest.raises(RuntimeError, match=r"metrics\.jsonl cannot be written: .*File too large"):
            trackers.log(2, {"x": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]


def test_tensorboard_files_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = build_trackers([TrackerConfig(name="tensorboard")], TrackedRun(tmp_path))
    tracker.log(1, {"domain/math/reward/mean": 0.25})
    tracker.log(2, {"domain/math/reward/mean": 0.75})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("domain/math/reward/mean")] == [(1, 0.25), (2, 0.75)]


SAMPLES = [
    {"domain": domain, "prompt": f"What is 1 + {number}?\n", "response": f"<b>{1 + number}", "answer": str(1 + number), "score": 1.0}
    | {"correct": True, "outcome": "accepted", "details": {}}
    for domain in ("add", "sub")
    for number in range(3)
]


@pytest.fixture
def samples_file(tmp_path: Path) -> Path:
    file = tmp_path / "samples" / "step_000010.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(record) + "\n" for record in SAMPLES))
    return file


def test_tensorboard_shows_samples_and_the_picture(tmp_path: Path, samples_file: Path) -> None:
    import matplotlib.pyplot as plt
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    trackers = Trackers(build_trackers([TrackerConfig(name="tensorboard", samples=2)], TrackedRun(tmp_path)))
    trackers.show_samples(10, "step", samples_file, ["add", "sub"])
    trackers.show_samples(20, "step", samples_file.with_name("missing.jsonl"), ["add", "sub"])
    plt.imsave(tmp_path / "curves.png", [[0.0, 0.5], [1.0, 0.25]])
    trackers.picture(tmp_path / "curves.png")
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={TENSORS: 0})
    events.Reload()
    ((text,),) = [[one.tensor_proto.string_val[0].decode() for one in events.Tensors("samples/step/sub/text_summary")]]
    assert text.count("score 1.0, correct True, outcome accepted, answer") == 2, "two of the three samples"
    assert "    What is 1 + 0?" in text and "    <b>1" in text
    assert [(image.width, image.height) for image in events.Images("curves")] == [(2, 2)]


def test_prometheus_reads_the_newest_metrics(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tracker,) = build_trackers([TrackerConfig(name="prometheus", args={"port": port})], TrackedRun(tmp_path, "mine"))
    of_roles = {"ranks/slowest_seconds/actor_train/load": 2.0, "offload/in_megabytes/reference": 3.0}
    for step, value in ((1, 0.25), (2, 0.75)):
        tracker.log(
            step, {"reward/mean": value, "domain/math/reward/mean": value / 2, "time/train": 1.5, "actor/loss": math.nan, **of_roles}
        )
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [
        'roll_lite_step{domain="",experiment="mine",role=""} 2.0',
        'roll_lite_reward_mean{domain="",experiment="mine",role=""} 0.75',
        'roll_lite_reward_mean{domain="math",experiment="mine",role=""} 0.375',
        'roll_lite_time_train{domain="",experiment="mine",role=""} 1.5',
        'roll_lite_actor_loss{domain="",experiment="mine",role=""} NaN',
        'roll_lite_ranks_slowest_seconds_load{domain="",experiment="mine",role="actor_train"} 2.0',
        'roll_lite_offload_in_megabytes{domain="",experiment="mine",role="reference"} 3.0',
    ]
    assert "# HELP roll_lite_reward_mean Score of the accepted samples" in text
    with pytest.raises(ValueError, match="trackers.0: prometheus: OSError.*in use"):
        build_trackers([TrackerConfig(name="prometheus", args={"port": port})], TrackedRun(tmp_path))
    tracker.close()
    socket.create_server(("127.0.0.1", port)).close()


def test_tensorboard_forgets_steps_that_a_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for repeats_from, steps in ((None, (1, 2, 3)), (3, (3, 4))):
        (tracker,) = build_trackers([TrackerConfig(name="tensorboard")], TrackedRun(tmp_path))
        if repeats_from is not None:
            tracker.repeat(repeats_from)
        for step in steps:
            tracker.log(step, {"actor/lr": step + (0.5 if repeats_from else 0.0)})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_users_own_id_comes_before_that_of_the_resumed_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = MagicMock()
    monkeypatch.setitem(sys.modules, name, service)
    for args, expected in (({"id": "mine"}, "mine"), ({}, "its parent's")):
        (tracker,) = build_trackers([TrackerConfig(name=name, args=args)], TrackedRun(tmp_path), {name: "its parent's"})
        assert tracker.run_id == expected == service.init.call_args.kwargs["id"]


def test_the_configured_trackers_are_built(tmp_path: Path) -> None:
    history = HistoryTracker()
    trackers = Trackers([*build_trackers([TrackerConfig(name="jsonl")], TrackedRun(tmp_path)), history])
    trackers.log(3, {"actor/lr": 0.1})
    trackers.log(3, {"validation/accuracy": 0.5})
    trackers.close()
    assert history.records == {3: {"actor/lr": 0.1, "validation/accuracy": 0.5}}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


OWN = """
import json
from roll_lite.observability.trackers import Tracker

class Notes(Tracker):
    def __init__(self, run, file="notes.txt", broken=False):
        if broken == "start":
            raise RuntimeError("no room")
        self.path, self.broken = run.folder / file, broken
        self.run_id = run.id or "note-1"
        self.path.write_text(json.dumps([run.experiment, run.settings, run.id]) + "\\n")

    def log(self, step, metrics):
        if self.broken:
            raise OSError("the wall is full")
        self.path.open("a").write(f"{step} {dict(metrics)}\\n")

    def close(self, exit_state="completed"):
        self.path.open("a").write(f"{exit_state}\\n")

def nothing(run):
    return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    yield tmp_path
    sys.modules.pop("own_trackers", None)


def notes(**args: Any) -> TrackerConfig:
    return TrackerConfig(name="own_trackers.Notes", args=args)


def test_a_class_of_ones_own(own: Path) -> None:
    run = TrackedRun(own / "first", "mine", {"seed": 1})
    trackers = Trackers(build_trackers([notes(file="own.txt")], run))
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close("interrupted")
    assert (own / "first/own.txt").read_text().splitlines() == ['["mine", {"seed": 1}, null]', "1 {'reward/mean': 0.5}", "interrupted"]


def test_a_resumed_run_goes_on_in_the_same_run_of_its_tracker(own: Path) -> None:
    build_trackers([notes(), TrackerConfig(name="jsonl")], TrackedRun(own / "first"))
    assert json.loads((own / "first/trackers.json").read_text()) == {"own_trackers.Notes": "note-1"}
    (tracker,) = build_trackers([notes()], TrackedRun(own / "second"), tracker_ids(own / "first"))
    assert json.loads((own / "second/notes.txt").read_text())[2] == "note-1" == tracker.run_id
    build_trackers([notes()], TrackedRun(own / "second"), tracker_ids(own))
    assert json.loads((own / "second/notes.txt").read_text())[2] is None, "that folder knows of none"


def test_a_tracker_that_fails_on_the_way_is_told_once_and_costs_no_more(own: Path) -> None:
    told: list[str] = []
    history = HistoryTracker()
    trackers = Trackers([*build_trackers([notes(broken="later")], TrackedRun(own / "first")), history], told.append)
    for step in (1, 2):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert told == ["Notes failed and gets nothing more: OSError: the wall is full"]
    assert list(history.records) == [1, 2]
    assert (own / "first/notes.txt").read_text().splitlines()[-1] == "failed: the wall is full", "it is closed when it is dropped"


def test_a_tracker_that_fails_with_samples_still_gets_metrics(own: Path, samples_file: Path) -> None:
    """Trackers that show no samples get none, and no tracker gets an empty list."""
    told: list[str] = []
    (tracker, silent) = build_trackers([notes(), TrackerConfig(name="jsonl")], TrackedRun(own / "first"))
    got: list[int] = []

    def fail(step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
        got.append(len(records))
        raise OSError("too long")

    type(tracker).samples = fail  # type: ignore[method-assign,assignment]
    tracker.samples = fail  # type: ignore[method-assign]
    trackers = Trackers([tracker, silent], told.append)
    trackers.show_samples(10, "step", samples_file.with_name("missing.jsonl"), ["add", "sub"])
    for step in (20, 30):
        trackers.show_samples(step, "step", samples_file, ["add", "sub"])
        trackers.log(step, {"x": 1.0})
    assert (told, got) == (["Notes failed and gets no samples: OSError: too long"], [6])
    assert (own / "first/notes.txt").read_text().count("{'x': 1.0}") == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (notes(broken="start"), "trackers.0: own_trackers.Notes: RuntimeError: no room"),
        (notes(flie="x"), "trackers.0: own_trackers.Notes: TypeError"),
        (TrackerConfig(name="own_trackers.nothing"), "trackers.0.name: own_trackers.nothing is NoneType, no roll_lite.observability"),
        (TrackerConfig(name="no_such_module.Tracker"), "trackers.0: no_such_module.Tracker: ModuleNotFoundError"),
    ],
)
def test_a_tracker_that_cannot_start_is_told_by_its_path(own: Path, config: TrackerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_trackers([config], TrackedRun(own / "first"))


def test_secrets_are_not_shown() -> None:
    settings = {
        "model": {"path": "/models/a"},
        "domains": {"x": {"reward": {"args": {"headers": ["Bearer sk-12345678"], "api_key_env": "MY_API_KEY"}}}},
        "mine": {"api_key": "written out"},
        "trackers": [{"name": "wandb", "args": {"key": "sk-other"}}],
    }
    shown = shown_settings(settings, {"MY_API_KEY": "sk-12345678", "SHORT_TOKEN": "a", "HOME": "/models"})
    assert shown["mine"] == {"api_key": "***"}
    assert shown["trackers"] == [{"name": "wandb", "args": {"key": "***"}}] and shown["model"] == {"path": "/models/a"}
    assert shown["domains"]["x"]["reward"]["args"] == {"headers": ["Bearer ${oc.env:MY_API_KEY}"], "api_key_env": "MY_API_KEY"}


def test_the_configurations_checks_know_the_same_trackers() -> None:
    assert list(TRACKERS) == [*LOCAL_TRACKERS, *TRACKER_PACKAGES]
