"""Which checkpoints there are, which are kept, and which can be gone on from. The roles are stand-ins."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.schema import RunConfig
from roll_lite.pipeline.checkpoint import SCHEMA_VERSION, Checkpoints, found, newest

ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """A cluster that writes a file where a role would save its state."""

    def all(self, method: Any, folder: Path) -> None:
        if method.__name__ == "save_checkpoint":
            (folder / "weights").write_text("saved")
        else:
            assert (folder / "weights").read_text() == "saved"


def parts(*roles: str) -> Any:
    model = SimpleNamespace(ranks=Ranks(), loaded=lambda groups: nullcontext())
    rollouts = SimpleNamespace(one=lambda method, *state: {"prompts": 3} if method.__name__ == "state_dict" else None)
    return SimpleNamespace(trained=dict.fromkeys(roles, model), rollouts=rollouts)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    return load_config("tiny_grpo", ROOT / "examples/configs", ["checkpoint.keep=2"])


def resuming(config: RunConfig, folder: Path) -> RunConfig:
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": folder})})


def test_the_newest_are_kept_by_number_not_by_name(config: RunConfig, tmp_path: Path) -> None:
    checkpoints = Checkpoints(config, tmp_path)
    for step in (999_998, 999_999, 1_000_000):
        checkpoints.save(parts("actor_train"), {"steps_done": step})
    assert [folder.name for folder in found(tmp_path)] == ["step_999999", "step_1000000"]
    assert newest(tmp_path).name == "step_1000000"


def test_what_was_not_finished_is_none(config: RunConfig, tmp_path: Path) -> None:
    Checkpoints(config, tmp_path).save(parts("actor_train"), {"steps_done": 1})
    (tmp_path / "checkpoints" / "step_000002.partial").mkdir()
    assert newest(tmp_path).name == "step_000001"


def test_a_checkpoint_brings_the_drivers_state_back(config: RunConfig, tmp_path: Path) -> None:
    state = {"steps_done": 4, "version": 3, "kl_in_loss": {"coef": 0.5}}
    Checkpoints(config, tmp_path).save(parts("actor_train", "critic"), state)
    assert Checkpoints(resuming(config, tmp_path), tmp_path / "next").load(parts("actor_train", "critic")) == state


def test_a_checkpoint_without_a_role_is_refused(config: RunConfig, tmp_path: Path) -> None:
    Checkpoints(config, tmp_path).save(parts("actor_train"), {"steps_done": 1})
    with pytest.raises(ValueError, match="holds nothing for critic"):
        Checkpoints(resuming(config, tmp_path), tmp_path / "next").load(parts("actor_train", "critic"))


def test_a_checkpoint_of_another_version_is_refused(config: RunConfig, tmp_path: Path) -> None:
    folder = Checkpoints(config, tmp_path).save(parts("actor_train"), {"steps_done": 1})
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(ValueError, match=f"this program reads {SCHEMA_VERSION}"):
        Checkpoints(resuming(config, folder), tmp_path / "next").load(parts("actor_train"))


def test_no_resumption_where_none_was_asked_for(config: RunConfig, tmp_path: Path) -> None:
    assert Checkpoints(config, tmp_path).load(parts("actor_train")) is None
