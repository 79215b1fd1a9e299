"""Each service's tracker against the real package, in its offline or local mode; nothing leaves the machine."""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from roll_lite.config.schema.run import TrackerConfig
from roll_lite.observability.timers import Span
from roll_lite.observability.trackers import TrackedRun, Tracker, Trackers, build_trackers, tracker_ids

SETTINGS = {"seed": 1, "model": {"path": "/models/a"}, "domains": {"add": {"share": 2}}}
SAMPLES = [
    {"domain": "add", "prompt": "1 + 1", "response": "a-response", "answer": "2", "score": 1, "correct": True, "outcome": "accepted"}
]
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==")
PRIVATE = "a-private-word"
"""On the command line, in the environment, in what is printed."""


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_MODE": "offline",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "SWANLAB_MODE": "offline",
        "SWANLAB_SAVE_DIR": str(tmp_path / "home"),
        "HOME": str(tmp_path),
        "MY_API_KEY": PRIVATE,
        **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", f"key={PRIVATE}"])
    monkeypatch.chdir(tmp_path)


def twice(config: TrackerConfig, tmp_path: Path, end_of_process: Callable[[], None] = lambda: None) -> Iterator[Tracker]:
    """A run, and one that goes on from it: a step is repeated."""
    folders, picture = [tmp_path / "first", tmp_path / "second"], tmp_path / "curves.png"
    picture.write_bytes(PIXEL)
    for number, folder in enumerate(folders):
        folder.mkdir()
        run = TrackedRun(folder, "tiny", SETTINGS)
        (tracker,) = build_trackers([config], run, tracker_ids(folders[number - 1]) if number else None)
        print(f"what the run prints, {PRIVATE}", flush=True)
        for step in (1 + number, 2 + number):
            tracker.log(step, {"reward/mean": 0.25 * step, "domain/add/reward/mean": 1.0, "critic/explained_variance": math.nan})
        tracker.log(2 + number, {"validation/accuracy": 0.5})
        tracker.samples(2 + number, "validation", SAMPLES)
        tracker.picture(picture)
        whole = Trackers([tracker])
        whole.close("failed: something" if number else "interrupted")
        whole.close()
        end_of_process()
        yield tracker


def private_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and PRIVATE.encode() in path.read_bytes()]


def records_of_wandb(file: Path) -> list[Any]:
    """Its file is a LevelDB log of protobuf records: blocks of 32 KiB, chunks with seven bytes in front."""
    from wandb.proto import wandb_internal_pb2

    content, place, parts, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    first, second = twice(TrackerConfig(name="wandb", args={"mode": "offline", "project": "mine"}), tmp_path, wandb.teardown)
    assert first.run_id == second.run_id
    rows, configs = [], {}
    for folder in ("first", "second"):
        (file,) = (tmp_path / folder).glob(f"wandb/offline-run-*/run-{first.run_id}.wandb")
        records = records_of_wandb(file)
        for record in records:
            if record.WhichOneof("record_type") == "history":
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
            if record.WhichOneof("record_type") == "run":
                configs |= {item.key: item.value_json for item in record.run.config.update}
                assert record.run.project == "mine" and record.run.run_id == first.run_id
    pictures, rows = [row for row in rows if "curves/path" in row], [row for row in rows if "curves/path" not in row]
    assert [(int(row["step"]), row.get("reward/mean")) for row in rows] == [
        (1, "0.25"), (2, "0.5"), (2, None), (2, None), (2, "0.5"), (3, "0.75"), (3, None), (3, None),
    ]  # fmt: skip
    assert len(pictures) == 2 and json.loads(pictures[0]["curves/_type"]) == "image-file"
    table = tmp_path / "first" / "wandb"
    (file,) = table.rglob(json.loads(rows[3]["samples/validation/path"]))
    assert json.loads(file.read_text())["data"] == [["add", "1 + 1", "a-response", "2", 1, True, "accepted"]]
    assert rows[2]["validation/accuracy"] == "0.5" and not any("critic/explained_variance" in row for row in rows)
    assert configs["seed"] == "1" and "share" in configs["domains"]
    assert private_files(tmp_path) == []


def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    first, second = twice(TrackerConfig(name="mlflow", args={"tracking_uri": uri, "experiment_name": "mine"}), tmp_path)
    assert first.run_id == second.run_id and first.run_id is not None
    client = MlflowClient(uri)
    run = client.get_run(first.run_id)
    assert run.info.status == "FAILED" and run.data.params["model.path"] == "/models/a" and run.info.run_name == "first"
    history = client.get_metric_history(first.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    assert {file.path for file in client.list_artifacts(first.run_id)} == {"samples", "curves.png"}
    assert len(client.list_artifacts(first.run_id, "samples")) == 2, "the second run repeats no file"
    (table,) = [client.download_artifacts(first.run_id, "samples/validation_000002.json", str(tmp_path))]
    assert json.loads(Path(table).read_text())["data"] == [["add", "1 + 1", "a-response", "2", 1, True, "accepted"]]
    assert "critic/explained_variance" not in run.data.metrics and run.data.metrics["domain/add/reward/mean"] == 1.0
    assert private_files(tmp_path) == []


def test_swanlab(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    first, second = twice(TrackerConfig(name="swanlab", args={"mode": "offline", "project": "mine"}), tmp_path)
    assert first.run_id == second.run_id
    for folder in ("first", "second"):
        written = b"".join(path.read_bytes() for path in (tmp_path / folder / "swanlab").rglob("*") if path.is_file())
        assert b"reward/mean" in written and b"validation/accuracy" in written
        assert b"samples/validation" in written and b"curves" in written
        assert str(first.run_id).encode() in written or any(first.run_id in str(path) for path in (tmp_path / folder).rglob("*"))
    assert private_files(tmp_path) == []


def test_opentelemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name)
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(request)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    args = {"endpoint": f"http://127.0.0.1:{server.server_port}/v1/traces"}
    (tracker,) = build_trackers([TrackerConfig(name="opentelemetry", args=args)], TrackedRun(tmp_path, "tiny"))
    tracker.log(1, {"reward/mean": 0.5})
    step = [
        Span("step", 100.0, 5.0),
        Span("train", 102.0, 2.0, "step"),
        Span("actor_train[1] train", 102.5, 1.5, "train", "actor_train", 1),
    ]
    tracker.spans(1, step)
    tracker.spans(2, step[:1])
    tracker.close()
    server.shutdown()
    server.server_close()
    (resource,) = [resource for request in received for resource in request.resource_spans]
    assert {"tiny", "roll_lite", tmp_path.name} <= {one.value.string_value for one in resource.resource.attributes}
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    named = {(span.name, span.attributes[0].value.int_value): span for span in spans}
    first, train, rank, second = (named[key] for key in (("step", 1), ("train", 1), ("actor_train[1] train", 1), ("step", 2)))
    assert (train.parent_span_id, rank.parent_span_id, first.parent_span_id) == (first.span_id, train.span_id, b"")
    assert len({first.trace_id, train.trace_id, rank.trace_id}) == 1 and second.trace_id != first.trace_id
    assert (rank.start_time_unix_nano, rank.end_time_unix_nano) == (102_500_000_000, 104_000_000_000)
    assert {one.key: one.value.string_value or one.value.int_value for one in rank.attributes} == {
        "step": 1,
        "role": "actor_train",
        "rank": 1,
    }
