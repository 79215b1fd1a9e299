"""The folder of a run: run_dir/experiment/start time, and run_dir/latest pointing at the newest."""

from __future__ import annotations

import os
from datetime import datetime
from itertools import count
from pathlib import Path

LATEST = "latest"


def create_run_folder(run_dir: Path, experiment: str, now: datetime | None = None) -> Path:
    """Made empty and owned by this run alone, also when two start in the same second."""
    parts = Path(experiment).parts
    if not parts or parts[0] == LATEST or ".." in parts or Path(experiment).is_absolute():
        raise ValueError(f"experiment: {experiment!r} names no folder of its own under {run_dir}; a plain name such as `my_run` does")
    name = f"{now or datetime.now():%Y-%m-%d_%H-%M-%S}"
    parent = run_dir / experiment
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always another number")


def point_latest(run_dir: Path, folder: Path) -> None:
    """Point `runs/latest` at the run, once its folder describes it. The link is replaced atomically: a reader finds the old run or the new
    one."""
    link = run_dir / LATEST
    if link.exists() and not link.is_symlink():
        raise ValueError(f"run_dir: {link} is not a link; it has to make room for the link to the newest run")
    fresh = run_dir / f".{LATEST}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.relative_to(run_dir), target_is_directory=True)
    fresh.replace(link)
