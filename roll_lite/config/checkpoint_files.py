"""Files of checkpoints: finds a run's checkpoints, chooses the one to resume from and verifies its files.

A checkpoint is a folder `checkpoints/step_000020` in a run's folder. It holds a folder for each trained role, `state.json`, and
`files.json`, written last: a list of all these files with sizes and checksums.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from roll_lite.config.hf_config import HfConfig
from roll_lite.config.schema.models import ModelConfig

FOLDER = "checkpoints"
STATE_FILE = "state.json"
LIST_FILE = "files.json"
MODEL_FILE = "model.json"
"""File in the folder of each role."""
NOT_IN_TENSORS = ("max_positions", "norm_eps", "rope", "window")
"""Fields of a model's configuration that do not affect its tensors."""
CONFIG_FILE = "config.yaml"
"""File in a run's folder: the configuration at its start."""
NAME = re.compile(r"step_(\d+)")
SCHEMA_VERSION = 4


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Resumption:
    """The checkpoint to resume from, and notes for the user on the choice."""

    checkpoint: Path
    notes: list[str]


# ---------------------------------------------------------------- choice of the checkpoint


def found(run_folder: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    return [folder for folder in _numbered(run_folder) if is_finished(folder)]


def is_finished(checkpoint: Path) -> bool:
    """True if all files of the checkpoint are written. Without a list it counts as finished if its version wrote none."""
    if not (checkpoint / STATE_FILE).is_file():
        return False
    return (checkpoint / LIST_FILE).is_file() or not _should_have_list(checkpoint)


def resumption(folder: Path) -> Resumption:
    """Choose the checkpoint to resume from. `folder`: a checkpoint, or a run's folder, for its newest finished one. If a resumed run has no
    checkpoint yet, the one it resumed from is used. ValueError if there is none."""
    if NAME.fullmatch(folder.name) or (folder / STATE_FILE).is_file():
        if is_finished(folder):
            return Resumption(folder, _unlisted(folder))
        raise ValueError(f"{folder} is an unfinished checkpoint; {remedy(folder)}")
    notes = []
    seen = {folder}
    while not (checkpoints := found(folder)):
        earlier = resumed_from(folder)
        if earlier is None or earlier in seen:
            raise ValueError(_no_checkpoints(folder))
        notes.append(f"{folder} has written no checkpoint; going on from where it began, {earlier}")
        if is_finished(earlier):
            return Resumption(earlier, notes + _unlisted(earlier))
        seen.add(earlier)
        folder = earlier
    newer = [other.name for other in _numbered(folder) if steps_of(other) > steps_of(checkpoints[-1])]
    if newer:
        notes.append(f"{', '.join(newer)} in {folder / FOLDER} was not finished; going on from {checkpoints[-1].name}")
    return Resumption(checkpoints[-1], notes + _unlisted(checkpoints[-1]))


def _no_checkpoints(folder: Path) -> str:
    """Reason why there is no checkpoint: not a run's folder, or the run wrote none, or ended before the first."""
    try:
        every = int(yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))["checkpoint"]["every"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return f"{folder} is no checkpoint (no {STATE_FILE}) and no run with finished checkpoints (no {FOLDER}/step_*)"
    if every > 0:
        return f"the run in {folder} ended before its first checkpoint was complete (checkpoint.every: {every}); start it anew"
    return f"the run in {folder} wrote no checkpoints (checkpoint.every: 0); start it anew with checkpoint.every set"


def remedy(checkpoint: Path) -> str:
    """Advice if this checkpoint cannot be used."""
    earlier = [other for other in found(checkpoint.parent.parent) if steps_of(other) < steps_of(checkpoint)] if steps_of(checkpoint) else []
    if earlier:
        return f"the one before it can be gone on from: checkpoint.resume={earlier[-1]}"
    return "there is no earlier one beside it: go on from another run's checkpoint, or start anew"


def _unlisted(checkpoint: Path) -> list[str]:
    if (checkpoint / LIST_FILE).is_file():
        return []
    return [f"{checkpoint} has no {LIST_FILE}: it comes from an earlier version, and damage to its files cannot be noticed"]


def _numbered(run_folder: Path) -> list[Path]:
    return sorted((folder for folder in (run_folder / FOLDER).glob("step_*") if NAME.fullmatch(folder.name)), key=steps_of)


def steps_of(checkpoint: Path) -> int:
    """Step after which the checkpoint was written; 0 if its name does not say."""
    match = NAME.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else 0


def _should_have_list(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")).get("listed"))
    except (ValueError, AttributeError):  # damaged: reported when it is read
        return False


def resumed_from(run_folder: Path) -> Path | None:
    """Checkpoint or run that the run's configuration resumes from, if any."""
    try:
        config = yaml.safe_load((run_folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return Path(config["checkpoint"]["resume"]).resolve()
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, RuntimeError):  # damaged, or circular links
        return None


# ---------------------------------------------------------------- the checkpoint's model


def describe(hf: HfConfig, model: ModelConfig, has_values: bool) -> dict[str, Any]:
    """Model facts that determine a role's tensors, converted through JSON."""
    shape = {name: value for name, value in asdict(hf).items() if name not in NOT_IN_TENSORS}
    return {**json.loads(json.dumps(shape)), "model.dtype": model.dtype, "outputs": "values" if has_values else "tokens"}


def check_model(role_folder: Path, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError if the checkpoint holds another model or precision. Versions without model.json pass."""
    if not (role_folder / MODEL_FILE).is_file():
        return
    held = _read_json(role_folder, MODEL_FILE)
    differences = [f"{name} is {held[name]} there, {value} here" for name, value in wanted.items() if held.get(name, value) != value]
    if differences:
        raise ValueError(f"checkpoint.resume: {role_folder} holds another model: {'; '.join(differences)}")


# ---------------------------------------------------------------- integrity of the files


def record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())


def write_list(checkpoint: Path, records: Mapping[str, FileRecord]) -> None:
    """Write the list of files, the last file of a checkpoint. `records`: by path within the checkpoint."""
    text = json.dumps({name: asdict(records[name]) for name in sorted(records)}, indent=2) + "\n"
    (checkpoint / LIST_FILE).write_text(text, encoding="utf-8")


def read_list(checkpoint: Path) -> dict[str, FileRecord] | None:
    """Recorded files; None for checkpoints of versions without a list."""
    if not (checkpoint / LIST_FILE).is_file():
        return None
    entries = _read_json(checkpoint, LIST_FILE)
    try:
        records = {name: FileRecord(**entry) for name, entry in entries.items()}
        return {STATE_FILE: records.pop(STATE_FILE), **records}
    except KeyError:
        raise damaged(checkpoint, LIST_FILE, f"does not list {STATE_FILE}") from None
    except (AttributeError, TypeError) as error:
        raise damaged(checkpoint, LIST_FILE, f"is not a list of files: {error}") from None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Content of state.json, after checking that all files have their recorded sizes and that state.json is unchanged."""
    wanted = read_list(checkpoint)
    if wanted is not None:
        check_sizes(checkpoint, wanted)
        check_sums(checkpoint, wanted, [(STATE_FILE, record(checkpoint / STATE_FILE))])
    state = _read_json(checkpoint, STATE_FILE)
    version = state.get("schema_version") if isinstance(state, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"checkpoint.resume: {checkpoint} has schema version {version}, this program reads {SCHEMA_VERSION}")
    return state


def check_sizes(checkpoint: Path, wanted: Mapping[str, FileRecord]) -> None:
    for name, written in wanted.items():
        try:
            size = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            raise damaged(checkpoint, name, "is missing") from None
        if size != written.bytes:
            raise damaged(checkpoint, name, f"has {size:,} bytes; {written.bytes:,} were written")


def check_sums(checkpoint: Path, wanted: Mapping[str, FileRecord], records: Iterable[tuple[str, FileRecord]]) -> None:
    """Compare checksums. `records`: of the files as they are now."""
    for name, now in records:
        if now != wanted[name]:
            raise damaged(checkpoint, name, "has changed since it was written: its checksum is another one")


def damaged(checkpoint: Path, name: str, what: str) -> ValueError:
    return ValueError(f"checkpoint.resume: {checkpoint / name} {what}. The checkpoint is damaged; {remedy(checkpoint)}")


def _read_json(checkpoint: Path, name: str) -> Any:
    try:
        return json.loads((checkpoint / name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(checkpoint, name, f"cannot be read as JSON ({error})") from None
