import errno
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from roll_lite.observability.run_folder import create_run_folder, cut_after, keep_config, locked, point_latest, resumed_from

NOON = datetime(2026, 3, 4, 12, 0, 5)


def test_folder_and_link(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "runs", "demo", NOON)
    assert folder == tmp_path / "runs" / "demo" / "2026-03-04_12-00-05" and folder.is_dir()
    latest = tmp_path / "runs" / "latest"
    assert not latest.exists(), "it holds nothing yet"
    point_latest(tmp_path / "runs", folder)
    assert latest.resolve() == folder.resolve()
    assert not latest.readlink().is_absolute(), "the runs folder can be moved"


def test_two_runs_in_the_same_second_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = (create_run_folder(tmp_path, "demo", NOON) for _ in range(2))
    assert first != second and second.name == "2026-03-04_12-00-05_2"


def test_relative_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = create_run_folder(Path("runs"), "a/b", NOON)
    point_latest(Path("runs"), folder)
    assert Path("runs/latest").resolve() == folder.resolve()


def test_a_dead_link_is_replaced_and_a_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    folder = create_run_folder(tmp_path, "demo", NOON)
    point_latest(tmp_path, folder)
    assert (tmp_path / "latest").resolve() == folder.resolve()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(ValueError, match=r"run_dir: .*latest is not a link"):
        point_latest(tmp_path, folder)


@pytest.mark.parametrize("experiment", ["latest", "latest/x", "../out", "/abs", "."])
def test_experiments_that_would_not_be_a_folder_of_their_own(tmp_path: Path, experiment: str) -> None:
    with pytest.raises(ValueError, match=f"experiment: '{experiment}'"):
        create_run_folder(tmp_path, experiment, NOON)


HOLDS = """
import sys, time
from pathlib import Path
from roll_lite.observability.run_folder import locked
with locked(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


def test_one_driver_writes_to_a_folder_until_it_dies(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "in\n"
        with pytest.raises(ValueError, match="another driver still writes to"), locked(tmp_path):
            pass
        other.kill()
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_used_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(number, "not here")

    monkeypatch.setattr("fcntl.flock", refuses)
    with locked(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked ([Errno {number}] not here): a second driver is not noticed" in caplog.text


def test_an_earlier_configuration_is_kept_if_it_differs(tmp_path: Path) -> None:
    for text in ("a", "a", "b", "c"):
        keep_config(tmp_path, text)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"config-1.yaml": "a", "config-2.yaml": "b", "config.yaml": "c"}


@pytest.mark.parametrize("validation", [True, False])
def test_what_is_repeated_is_cut(tmp_path: Path, validation: bool) -> None:
    kept = [{"step": 0, "validation/accuracy": 0.1}, {"step": 1, "a": 1}, {"step": 2, "a": 2}]
    lines = [*kept, {"step": 2, "validation/accuracy": 0.2}, {"step": 3}, {"step": 3, "validation/accuracy": 0.3}]
    kept = kept if validation else lines[:4]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "a')
    stay = {"samples/step_000002.jsonl", "logs/x.log", "checkpoints/step_000003/state.json"}
    for name in (*stay, "samples/step_000003.jsonl", "samples/validation_000002.jsonl", "batches/step_000003/rows"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if not validation:
        stay.add("samples/validation_000002.jsonl")
    with file.open("a") as tracker:
        cut_after(tmp_path, 2, ("metrics.jsonl", "updates.jsonl"), validation=validation)
        tracker.write('{"step": 3, "again": 1}\n')
    assert [json.loads(line) for line in file.read_text().splitlines()] == [*kept, {"step": 3, "again": 1}]
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {"metrics.jsonl", *stay}


@pytest.mark.parametrize(("resume", "found"), [("auto", None), (None, None), ("/runs/a", Path("/runs/a"))])
def test_the_run_that_a_run_resumed_from(tmp_path: Path, resume: str | None, found: Path | None) -> None:
    keep_config(tmp_path, json.dumps({"checkpoint": {"resume": resume}}))
    assert resumed_from(tmp_path) == found
