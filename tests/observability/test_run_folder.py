from datetime import datetime
from pathlib import Path

import pytest

from roll_lite.observability.run_folder import create_run_folder, point_latest

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
