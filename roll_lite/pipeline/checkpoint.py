"""Checkpoints of a run, and the model it ends with.

A checkpoint is a folder `checkpoints/step_000020` with a folder for each trained role and `state.json`. It is written
under another name and renamed when it is whole, so that a folder with that name can be trusted.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from roll_lite.config.schema import RunConfig
from roll_lite.pipeline.models import FORWARD, TRAIN
from roll_lite.pipeline.parts import Parts
from roll_lite.workers.model import ModelWorker
from roll_lite.workers.rollout import RolloutWorker

SCHEMA_VERSION = 2
STATE_FILE = "state.json"
FOLDER = "checkpoints"
EXPORTED = {"actor_train": "model", "critic": "critic"}
NAME = re.compile(r"step_(\d+)")


class Checkpoints:
    def __init__(self, config: RunConfig, run_folder: Path) -> None:
        self._config = config
        self._run_folder = run_folder

    def save(self, parts: Parts, pipeline: dict[str, Any]) -> Path:
        """`pipeline`: the driver's own state, with `steps_done`."""
        whole = self._run_folder / FOLDER / f"step_{pipeline['steps_done']:06d}"
        unfinished = whole.with_name(f"{whole.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        for role, model in parts.trained.items():
            (unfinished / role).mkdir(parents=True)
            with model.loaded(TRAIN):
                model.ranks.all(ModelWorker.save_checkpoint, (unfinished / role).resolve())
        state = {
            "schema_version": SCHEMA_VERSION,
            "pipeline": pipeline,
            "rollouts": parts.rollouts.one(RolloutWorker.state_dict),
            "config": self._config.model_dump(mode="json"),
        }
        (unfinished / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(whole, ignore_errors=True)
        unfinished.rename(whole)
        for old in found(self._run_folder)[: -self._config.checkpoint.keep]:
            shutil.rmtree(old)
        return whole

    def load(self, parts: Parts) -> dict[str, Any] | None:
        """Bring every part to the state of `checkpoint.resume`; the driver's own is returned. None where nothing is to be resumed."""
        if self._config.checkpoint.resume is None:
            return None
        folder = newest(self._config.checkpoint.resume)
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"checkpoint.resume: {folder} has schema version {state['schema_version']}, this program reads {SCHEMA_VERSION}"
            )
        missing = [role for role in parts.trained if not (folder / role).is_dir()]
        if missing:
            raise ValueError(f"checkpoint.resume: {folder} holds nothing for {', '.join(missing)}; was it written without a critic?")
        for role, model in parts.trained.items():
            with model.loaded(TRAIN):
                model.ranks.all(ModelWorker.load_checkpoint, (folder / role).resolve())
        parts.rollouts.one(RolloutWorker.load_state_dict, state["rollouts"])
        return state["pipeline"]

    def export_model(self, parts: Parts) -> Path:
        """The actor as Hugging Face safetensors under `model/`, the critic under `critic/`, for `critic.init: path`."""
        for role, model in parts.trained.items():
            with model.loaded(FORWARD):
                model.ranks.all(ModelWorker.save_hf, (self._run_folder / EXPORTED[role]).resolve())
        return self._run_folder / EXPORTED["actor_train"]


def found(run_folder: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    numbered = [(match, folder) for folder in (run_folder / FOLDER).glob("step_*") if (match := NAME.fullmatch(folder.name))]
    return [folder for _, folder in sorted(numbered, key=lambda pair: int(pair[0].group(1)))]


def newest(folder: Path) -> Path:
    """A checkpoint's own folder, or the newest checkpoint of a run's folder."""
    if (folder / STATE_FILE).is_file():
        return folder
    checkpoints = found(folder)
    if not checkpoints:
        raise ValueError(f"checkpoint.resume: {folder} is no checkpoint and has none under {FOLDER}/")
    return checkpoints[-1]
