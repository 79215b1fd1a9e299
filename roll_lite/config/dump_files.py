"""Dumps of rollouts: finds those of a past run and reads their headers. data/dumps.py writes dumps and reads their rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_lite.config.checkpoint_files import resumed_from
from roll_lite.config.files import elsewhere, is_folder, kind_of, listing
from roll_lite.config.problems import first_line

FOLDER = "dumps"
"""Folder in a run's folder."""
NAME = re.compile(r"step_(\d+)\.parquet")
FORMAT = "roll_lite.dump"
SCHEMA_VERSION = 1
METADATA = "roll_lite"
"""Key in the file's metadata."""


@dataclass(frozen=True)
class DumpHeader:
    """Metadata of a dump."""

    path: Path
    step: int
    config: dict[str, Any]
    """Resolved configuration of the run."""
    tokenizer: str
    """See `tokenizer_checksum`."""
    largest_token: int
    domains: dict[str, dict[str, int]]
    """Per domain, of the samples that train: `samples`, and `longest_prompt` and `longest_response` in tokens."""
    baselines: bool
    """True if the dump has greedy baselines."""
    stats: dict[str, Any]
    """Statistics of the batch."""


def dump_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.parquet"


def found_dumps(path: Path) -> dict[int, Path]:
    """Dumps by step. `path`: the folder of the dumps, or of the run; for a resumed run, earlier dumps come from the run it resumed from.
    ValueError if there are none."""
    if (kind := kind_of(path)) != "folder":
        raise ValueError(
            f"{path} is a file; name a run's folder, or that of its dumps" if kind else f"no such folder: {path}{elsewhere(path)}"
        )
    dumps = _of_run(path) if is_folder(path / FOLDER) else _within(path)
    if not dumps:
        raise ValueError(f"{path} holds no dumps ({FOLDER}/step_*.parquet); the run that is to be replayed needs rollout.dump: true")
    return dumps


def _of_run(run: Path) -> dict[int, Path]:
    dumps, seen = _within(run / FOLDER), {run}
    while dumps and min(dumps) > 1 and (checkpoint := resumed_from(run)) is not None:
        run = checkpoint.parent.parent
        if run in seen or not is_folder(run / FOLDER):
            break
        seen.add(run)
        dumps |= {step: path for step, path in _within(run / FOLDER).items() if step < min(dumps)}
    return dumps


def _within(folder: Path) -> dict[int, Path]:
    return {int(match[1]): path for path in listing(folder) if (match := NAME.fullmatch(path.name))}


def missing_steps(dumps: Mapping[int, Path], steps: int) -> list[int]:
    return [step for step in range(1, steps + 1) if step not in dumps]


def read_header(path: Path) -> DumpHeader:
    """Read a dump's metadata. ValueError with the reason if that fails."""
    from pyarrow import ArrowException, parquet

    try:
        metadata = parquet.read_metadata(path).metadata or {}
    except (ArrowException, OSError) as error:
        raise damaged(path, error) from error
    if METADATA.encode() not in metadata:
        raise ValueError(f"{path} is no dump of rollouts: it has no {METADATA!r} among its metadata")
    try:
        header = json.loads(metadata[METADATA.encode()])
        named, version = header["format"], header["schema_version"]
        if named != FORMAT:
            raise ValueError(f"{path} is no dump of rollouts: its format is {named!r}, expected {FORMAT!r}")
        if version != SCHEMA_VERSION:
            writer = header.get("made_by", "another program")
            raise ValueError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; it was written by {writer}")
        return DumpHeader(path, **{name: header[name] for name in DumpHeader.__dataclass_fields__ if name != "path"})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: BaseException) -> ValueError:
    return ValueError(f"{path} is damaged: it cannot be read as a dump ({type(error).__name__}: {first_line(error)})")
