"""Choose the checkpoint to resume from; check that its files are intact and fit the run.

A folder `checkpoints/step_000020` holds a folder per trained role, `state.json`, `unfinished.parquet` (samples in flight) and, written
last, `files.json` (sizes and checksums). A newer state of the same step has other names (`state-*.json`, `unfinished-*.parquet`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roll_lite.config.arithmetic import roles, trains
from roll_lite.config.checks.layout import model_folder
from roll_lite.config.problems import Problem
from roll_lite.config.schema.models import ReferenceRoleConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import (
    FileRecord,
    StoreUnreachable,
    elsewhere,
    flush,
    is_file,
    is_folder,
    is_local,
    kind_of,
    listing,
    reaching,
    record,
    remote_folder,
    remove_tree,
    replacing,
    write_json,
)
from roll_lite.models.hf_config import check_same_model, read_hf_config
from roll_lite.observability.run_folder import checkpoint_setting, experiment_folder, resumed_from
from roll_lite.observability.trackers import tracker_ids
from roll_lite.pipeline.resumed_settings import described, refused

FOLDER = "checkpoints"
STATE_FILE = "state.json"
LIST_FILE = "files.json"
UNFINISHED_FILE = "unfinished.parquet"
NAME = re.compile(r"step_(\d+)")
SCHEMA_VERSION = 6
NEW_CRITIC = (
    "its run had no critic, and none can be added on resume. Start a new run (checkpoint.resume=null) with the exported actor as "
    "model.path; resumed without `critic` and with steps={steps}, a run exports this checkpoint's"
)


@dataclass(frozen=True)
class Resumption:
    checkpoint: Path
    notes: list[str]


# ---------------------------------------------------------------- choice of the checkpoint


def finished_checkpoints(run_folder: Path) -> list[Path]:
    """Return finished checkpoints, oldest first."""
    return [folder for folder in _numbered(run_folder) if is_finished(folder)]


def is_finished(checkpoint: Path) -> bool:
    return all(is_file(checkpoint / name) for name in (STATE_FILE, LIST_FILE))


def resumption(folder: Path) -> Resumption:
    """Return `folder` if it is a checkpoint; if it is a run, the newest finished checkpoint or, if none, the checkpoint the run resumed
    from. ValueError without any."""
    if NAME.fullmatch(folder.name) or is_file(folder / STATE_FILE):
        if is_finished(folder):
            return Resumption(folder, [])
        raise ValueError(f"{folder} is an unfinished checkpoint; {remedy(folder)}")
    notes = []
    seen = {folder}
    while not (checkpoints := finished_checkpoints(folder)):
        earlier = resumed_from(folder)
        if earlier is None or earlier in seen:
            raise ValueError(f"{folder} is no checkpoint (no {STATE_FILE}) and no run with finished checkpoints ({FOLDER}/step_*)")
        notes.append(f"{folder} has written no checkpoint; going on from where it began, {earlier}")
        if is_finished(earlier):
            return Resumption(earlier, notes)
        seen.add(earlier)
        folder = earlier
    newer = [other.name for other in _numbered(folder) if steps_of(other) > steps_of(checkpoints[-1])]
    if newer:
        notes.append(f"{', '.join(newer)} in {folder / FOLDER} was not finished, or is damaged; going on from {checkpoints[-1].name}")
    return Resumption(checkpoints[-1], notes)


def settled(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Replace `checkpoint.resume: auto` by the experiment's newest intact checkpoint, or None; return configuration and notes. If all are
    damaged, choose the newest: loading it ends the run. May raise StoreUnreachable."""
    given = config.checkpoint.resume
    if given != "auto":
        if isinstance(given, Path) and (store := checkpoint_setting(given, "store")):
            given = str(remote_folder(store) / given.parent.name / given.name)
        return _resuming(config, given), []
    experiment = experiment_folder(config)
    chosen, damaged_one, notes = None, None, list[str]()
    with reaching(experiment):
        for checkpoint in (
            checkpoint
            # By date and time, then by the number of runs that started in the same second.
            for run in sorted(experiment.glob("*"), key=lambda run: list(map(int, re.findall(r"\d+", run.name))), reverse=True)
            for checkpoint in reversed(finished_checkpoints(run))
        ):
            try:
                with reaching(checkpoint):
                    read_state(checkpoint)
            except (ValueError, OSError) as error:
                damaged_one = damaged_one or checkpoint.resolve()
                notes.append(f"{str(error).split('; ')[0]}; an older one is looked for")
                continue
            chosen = checkpoint.resolve()
            break
    chosen = chosen or damaged_one
    if chosen is None:
        notes.append(f"checkpoint.resume: auto: no checkpoint in {experiment}, the run starts afresh")
    return _resuming(config, chosen if chosen is None or is_local(chosen) else str(chosen)), notes


def _resuming(config: RunConfig, resume: Path | str | None) -> RunConfig:
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": resume})})


def earlier_ones(checkpoint: Path) -> list[Path]:
    return [other for other in finished_checkpoints(checkpoint.parent.parent) if steps_of(other) < steps_of(checkpoint)]


def remedy(checkpoint: Path) -> str:
    if earlier := earlier_ones(checkpoint):
        return f"the one before it can be gone on from: checkpoint.resume={earlier[-1]}"
    return "there is no earlier one beside it: go on from another run's checkpoint, or start anew (checkpoint.resume=null)"


def _numbered(run_folder: Path) -> list[Path]:
    return sorted((folder for folder in (run_folder / FOLDER).glob("step_*") if NAME.fullmatch(folder.name)), key=steps_of)


def steps_of(checkpoint: Path) -> int:
    match = NAME.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else 0


def discard(checkpoint: Path) -> None:
    """Delete a checkpoint, beginning with the files that mark it as finished."""
    for name in (STATE_FILE, LIST_FILE):
        (checkpoint / name).unlink(missing_ok=True)
    remove_tree(checkpoint)


def set_aside(checkpoint: Path) -> None:
    """Mark a checkpoint as damaged: no run resumes from it."""
    (checkpoint / STATE_FILE).rename(checkpoint / f"{STATE_FILE}.damaged")


# ---------------------------------------------------------------- integrity of the files


def write_list(checkpoint: Path, records: Mapping[str, FileRecord]) -> None:
    with replacing(checkpoint / LIST_FILE) as draft:
        write_json(draft, {name: asdict(records[name]) for name in sorted(records)})
        flush([draft])  # first: after a power loss, a finished checkpoint's list might be empty


def read_list(checkpoint: Path) -> dict[str, FileRecord]:
    entries = _read_json(checkpoint, LIST_FILE)
    try:
        records = {name: FileRecord(**entry) for name, entry in entries.items()}
        return {STATE_FILE: records.pop(STATE_FILE), **records}
    except KeyError:
        raise damaged(checkpoint, LIST_FILE, f"does not list {STATE_FILE}") from None
    except (AttributeError, TypeError) as error:
        raise damaged(checkpoint, LIST_FILE, f"is not a list of files: {error}") from None


def read_state(checkpoint: Path, sizes: bool = True) -> dict[str, Any]:
    """Return the newest state after checking its checksum and, with `sizes`, all files' sizes."""
    wanted = read_list(checkpoint)
    for name, written in wanted.items() if sizes else ():
        try:
            size = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            raise damaged(checkpoint, name, "is missing") from None
        if size != written.bytes:
            raise damaged(checkpoint, name, f"has {size:,} bytes; {written.bytes:,} were written")
    newest = _state_file(wanted)
    check_sums(checkpoint, wanted, [(newest, record(checkpoint / newest))])
    state = _read_json(checkpoint, newest)
    version = state.get("schema_version") if isinstance(state, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"checkpoint.resume: {checkpoint} has schema version {version}, this program reads {SCHEMA_VERSION}: "
            "go on with the version of roll_lite that wrote it, or start anew (checkpoint.resume=null)"
        )
    return state


def _state_file(wanted: Iterable[str]) -> str:
    return next((name for name in wanted if name.startswith("state-")), STATE_FILE)


def check_sums(checkpoint: Path, wanted: Mapping[str, FileRecord], records: Iterable[tuple[str, FileRecord]]) -> None:
    for name, now in records:
        if now != wanted[name]:
            raise damaged(checkpoint, name, "has changed since it was written: its checksum is another one")


class DamagedCheckpoint(ValueError):
    pass


def damaged(checkpoint: Path, name: str, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"checkpoint.resume: {checkpoint / name} {what}. The checkpoint is damaged; {remedy(checkpoint)}")


def known_tracker_ids(checkpoint: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with suppress(OSError, ValueError, StoreUnreachable), reaching(checkpoint):
        found = _read_json(checkpoint, _state_file(read_list(checkpoint))).get("trackers", {})
    return found or (tracker_ids(checkpoint.parent.parent) if is_local(checkpoint) else {})


def _read_json(checkpoint: Path, name: str) -> Any:
    try:
        return json.loads((checkpoint / name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(checkpoint, name, f"cannot be read as JSON ({error})") from None


# ---------------------------------------------------------------- does it fit this run


def follows_actor(reference: ReferenceRoleConfig | None) -> bool:
    return reference is not None and reference.refresh is not None


def saved_roles(config: RunConfig, files: Iterable[str] | None = None) -> list[str]:
    """Return roles saved or, with a checkpoint's `files`, loaded."""
    follows = follows_actor(config.reference)
    if files is not None:  # without any, reference.refresh is new: until this checkpoint, the reference was the start model
        follows = follows and any(name.startswith("reference/") for name in files)
    return ["actor_train", "critic", *(["reference"] if follows else [])]


def check_resumption(config: RunConfig) -> Iterator[Problem]:
    is_named = config.checkpoint.resume != "auto"
    try:
        config, _ = settled(config)
    except StoreUnreachable:  # reported for checkpoint.store
        return
    folder = config.checkpoint.source
    if folder is None:
        return
    try:
        with reaching(folder):
            _check_folder(config, folder, is_named)
    except (ValueError, OSError, StoreUnreachable) as error:
        yield Problem("checkpoint.resume", str(error).removeprefix("checkpoint.resume: "), str(folder))


def _check_folder(config: RunConfig, folder: Path, is_named: bool) -> None:
    if (found := kind_of(folder)) != "folder":
        hint = elsewhere(folder) if is_local(folder) else ""
        raise ValueError(f"no such folder: {folder}{hint}" if found is None else f"{folder} is no folder; name a checkpoint's or a run's")
    checkpoint = resumption(folder).checkpoint
    state = read_state(checkpoint)
    absent = [name for name in ("pipeline", "rollouts") if not isinstance(state.get(name), dict)]
    if absent:
        raise ValueError(f"{checkpoint / 'state.json'} has no {' and no '.join(absent)}; {remedy(checkpoint)}")
    if told := [str(change) for change in refused(_settings(state), config.model_dump(mode="json"), trains(config))]:
        raise ValueError(f"{checkpoint} was written with other settings, which may not change on resume: {'; '.join(told)}")
    if is_named and (done := state["pipeline"].get("steps_done", 0)) > config.steps:
        raise ValueError(f"{checkpoint} was written after step {done}, and steps is {config.steps}; raise steps, or name an earlier one")
    with_state = [role for role in saved_roles(config, read_list(checkpoint)) if role in roles(config)]
    absent = [role for role in with_state if not is_folder(checkpoint / role) or not listing(checkpoint / role)]
    if absent:
        hint = NEW_CRITIC.format(steps=steps_of(checkpoint)) if absent == ["critic"] else remedy(checkpoint)
        raise ValueError(f"{checkpoint} holds nothing for {', '.join(absent)}; {hint}")
    for role in with_state:
        try:
            hf = read_hf_config(model_folder(config, roles(config)[role]))
        except ValueError:  # reported where the model is checked
            continue
        check_same_model(checkpoint / role, hf.tensor_facts(config.model.dtype, role == "critic"))


def _settings(state: Mapping[str, Any]) -> Mapping[str, Any]:
    found = state.get("config")
    return found if isinstance(found, dict) else {}


def resumption_notes(config: RunConfig) -> list[str]:
    config, notes = settled(config)
    if config.checkpoint.source is None:
        return notes
    chosen = resumption(config.checkpoint.source)
    state = read_state(chosen.checkpoint)
    told = described(_settings(state), config.model_dump(mode="json"))
    return [*notes, *chosen.notes, f"checkpoint.resume: {told}"]
