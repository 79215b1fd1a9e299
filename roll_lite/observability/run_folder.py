"""Folder of a run (run_dir/experiment/start time), and the link run_dir/latest to the newest."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from roll_lite.config.problems import Problem
from roll_lite.config.schema.base import LATEST
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import kind_of, remote_folder, try_store

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
BY_STEP = re.compile(r"(step|validation)_(\d{6,})")
"""Names of files and folders that belong to one step."""


def create_run_folder(run_dir: Path, experiment: str, now: datetime | None = None) -> Path:
    """Make a new folder, even if two runs start in the same second."""
    parts = Path(experiment).parts
    if not parts or parts[0] == LATEST or ".." in parts or Path(experiment).is_absolute():
        raise ValueError(f"experiment: {experiment!r} names no folder of its own under {run_dir}; a plain name such as `my_run` does")
    name = f"{now or datetime.now():%Y-%m-%d_%H-%M-%S}"
    parent = run_dir / experiment
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}_{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("there is always another number")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other drivers; ValueError if it is locked. The lock ends with the process."""
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another driver still writes to {folder}: end it first") from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): a second driver is not noticed", folder, error)
        yield


def experiment_folder(config: RunConfig) -> Path:
    """Folder of the experiment's runs or, with `checkpoint.store`, of their checkpoints in the store."""
    store = config.checkpoint.store
    return (config.run_dir if store is None else remote_folder(store)) / config.experiment


def folder_of_checkpoints(config: RunConfig, run_folder: Path) -> Path:
    return run_folder if config.checkpoint.store is None else experiment_folder(config) / run_folder.name


def continues_in_folder(config: RunConfig, run_folder: Path) -> bool:
    """True if a resumed run writes to the folder of the run it continues (`checkpoint.resume: auto`), not to a new one."""
    source = config.checkpoint.source
    return source is not None and source.parent.parent.resolve() == folder_of_checkpoints(config, run_folder).resolve()


def keep_config(folder: Path, text: str) -> None:
    """Write config.yaml. A different older file is renamed to config-1.yaml, config-2.yaml, ..."""
    file = folder / CONFIG_FILE
    if file.exists() and file.read_text(encoding="utf-8") != text:
        file.rename(next(older for number in count(1) if not (older := folder / f"config-{number}.yaml").exists()))
    file.write_text(text, encoding="utf-8")


def cut_after(folder: Path, step: int, files: Sequence[str], folders: bool = True, validation: bool = False) -> None:
    """Remove what a run resumed after `step` writes again: later steps and, with `validation`, the validation of `step`. `files`:
    JSON-lines files to cut. `folders`: also remove these steps' files and folders."""
    for name in files:
        if not (folder / name).exists():
            continue
        with (folder / name).open("rb+") as file:  # in place: trackers append to the same file
            lines = file.readlines()
            stay = [_stays(line, step, validation) for line in lines]
            before = stay.index(False) if False in stay else len(lines)
            # Cut first: if the process is killed here, no record is there twice.
            file.truncate(sum(map(len, lines[:before])))
            file.seek(0, os.SEEK_END)
            file.writelines(line for line, stays in zip(lines[before:], stay[before:], strict=True) if stays)
    for path in folder.glob("*/*") if folders else ():
        kind = BY_STEP.match(path.name)
        if kind is None or path.parent.name == "checkpoints" or int(kind[2]) < step + (kind[1] == "step" or not validation):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _stays(line: bytes, step: int, validation: bool) -> bool:
    try:
        record = json.loads(line)
    except ValueError:  # its writer was killed
        return False
    return record["step"] < step or (record["step"] == step and not (validation and any("validation/" in name for name in record)))


def point_latest(run_dir: Path, folder: Path) -> None:
    link = run_dir / LATEST
    if link.exists() and not link.is_symlink():
        raise ValueError(f"run_dir: {link} is not a link; it has to make room for the link to the newest run")
    fresh = run_dir / f".{LATEST}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.relative_to(run_dir), target_is_directory=True)
    fresh.replace(link)


def check_run_dir(config: RunConfig) -> Iterator[Problem]:
    """Check that run_dir, or its nearest existing parent, is a writable folder."""
    existing = next(folder for folder in (config.run_dir, *config.run_dir.parents) if kind_of(folder))
    if kind_of(existing) != "folder":
        yield Problem("run_dir", f"{existing} is a file; name a folder", str(config.run_dir))
    elif not os.access(existing, os.W_OK | os.X_OK) or str(existing).startswith(("/proc", "/sys")):
        yield Problem("run_dir", f"{existing} cannot be written to; name another folder", str(config.run_dir))
    link = config.run_dir / LATEST
    if not link.is_symlink() and kind_of(link):
        yield Problem("run_dir", f"{link} is not a link; it has to make room for the link to the newest run", str(config.run_dir))


def check_store(config: RunConfig) -> Iterator[Problem]:
    if (url := config.checkpoint.store) is not None and (why := try_store(url)):
        yield Problem("checkpoint.store", why, url)


def checkpoint_setting(run_folder: Path, key: str) -> Any:
    try:
        return yaml.safe_load((run_folder / CONFIG_FILE).read_text(encoding="utf-8"))["checkpoint"][key]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def resumed_from(run_folder: Path) -> Path | None:
    """Checkpoint or run from which a run resumed; None if it did not, or continued in its own folder."""
    if (resume := checkpoint_setting(run_folder, "resume")) == "auto":
        return None
    try:
        return remote_folder(resume) if "://" in resume else Path(resume).resolve()
    except (OSError, TypeError, ValueError, RuntimeError):  # no path, or circular links
        return None
