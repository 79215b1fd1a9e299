"""`roll-lite init`: the folders that it writes run as their README says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from roll_lite.cli import main
from roll_lite.config.loading import load_config
from roll_lite.files import STARTERS

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.name for path in STARTERS.iterdir())
OWN_MODULES = ("my_reward", "my_environment")


def init(recipe: str, folder: Path) -> Path:
    assert main(["init", recipe, str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder has modules of the same names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in OWN_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_commands_of_the_readme(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = init(recipe, tmp_path / "mine")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    own = "my_environment.py" if recipe == "environment" else "my_reward.py"
    assert names == {"README.md", "my_run.yaml", own, "data/train.jsonl", "data/validation.jsonl"}
    monkeypatch.chdir(folder)
    (block,) = re.findall(r"```bash\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    commands = [line.partition("#")[0].split() for line in block.splitlines()]
    assert ["roll-lite", "check", "--config-name", "my_run"] in commands and ["roll-lite", "run", "--config-name", "my_run"] in commands
    for command in commands:
        assert command[0] == "roll-lite"
        arguments = ["check", *command[2:]] if command[1] == "run" else command[1:]
        if "--episodes" not in arguments:  # needs the model; tests/environments/test_preview.py
            assert main(arguments) == 0, command


def test_the_next_step_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = init("default", tmp_path / "mine")
    monkeypatch.chdir(folder)
    (settings,) = re.findall(r"```yaml\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    (folder / "my_run.yaml").write_text(settings)
    assert list(load_config("my_run", folder, files=False).domains) == ["sums"]
    small = ["model.path=examples/models/tiny_chat", "domains.sums.sampling={max_prompt_tokens: 100, max_tokens: 12}"]
    assert main(["check", "--config-name", "my_run", *small]) == 0


def test_the_next_step_of_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = init("gsm8k", tmp_path / "mine")
    monkeypatch.chdir(folder)
    lines = re.sub(", train: .*}", "}", (folder / "my_run.yaml").read_text().replace("gsm8k_tiny", "gsm8k_0.5b_grpo"))
    left_out = re.compile(r" *(sampling|steps):")
    (folder / "my_run.yaml").write_text("".join(line for line in lines.splitlines(keepends=True) if not left_out.match(line)))
    config = load_config("my_run", folder, files=False)
    assert config.steps == 200 and "openai--gsm8k" in str(config.domains["gsm8k"].data.train)
    assert config.domains["gsm8k"].reward.terms[0].name == "my_reward.brief"


def test_what_exists_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert "cd my_run\n  roll-lite run --config-name my_run" in capsys.readouterr().out
    (tmp_path / "my_run/README.md").write_text("mine")
    assert main(["init", "gsm8k"]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'my_run'} cannot be written (File exists); name a new folder\n"
    assert (tmp_path / "my_run/README.md").read_text() == "mine"
    with pytest.raises(SystemExit):
        main(["init", "gsm9k"])
    assert "choose from" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize("recipe", [one if one == "default" else pytest.param(one, marks=pytest.mark.nightly) for one in RECIPES])
def test_a_folder_runs_at_once(recipe: str, tmp_path: Path) -> None:
    folder = init(recipe, tmp_path / "mine")
    command = [sys.executable, "-m", "roll_lite.cli", "run", "--config-name", "my_run", "steps=2", "validation.enabled=false"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "runs/latest/summary.json").read_text())["steps"] == 2
    assert (folder / "runs/latest/model/model.safetensors").is_file()
