"""docs/add_a_domain.md is true: its commands work, its YAML and its function are those of examples/domains, and a run trains on both."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_lite.cli import main
from roll_lite.config.loading import load_config
from roll_lite.data.prompts import load_prompts
from roll_lite.data.templates import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/add_a_domain.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
RUNS = [line for line in COMMANDS if line.startswith("roll-lite run")]
SMALL = ["steps=1", "rollout.prompts_per_step=10", "rollout.samples_per_prompt=4", "domains.upper.samples_per_prompt=4"]


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("command", [line for line in COMMANDS if line not in RUNS])
def test_commands_of_the_page(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command)
    assert program == "roll-lite" and main(arguments) == 0
    shown = capfd.readouterr().out
    if arguments[0] == "reward":
        start = "4 responses: " if "--responses" in arguments else "5 reference answers: "
        (summary,) = [line for line in PAGE.splitlines() if line.startswith(start)]
        assert summary.partition("; median")[0] in shown


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_pages_sections_are_the_examples() -> None:
    config = yaml.safe_load((ROOT / "examples/domains/words.yaml").read_text())
    defaults: dict[str, Any] = {"prompt": "prompt", "answer": "answer"}
    shown = {name: section for block in blocks("yaml") for name, section in yaml.safe_load(block)["domains"].items()}
    assert shown["reverse"] == {key: part for key, part in config["domains"]["reverse"].items() if key != "share"}
    assert shown["upper"]["data"] == {**defaults, **config["domains"]["upper"]["data"]}
    assert shown["upper"]["sampling"] == config["domains"]["upper"]["sampling"]
    load_config("words", ROOT / "examples/domains", [f"domains.upper={json.dumps(shown['upper'])}"])


def test_the_pages_function_is_the_examples() -> None:
    shown, _ = blocks("python")
    found: dict[str, Any] = {}
    exec(shown, found)
    from examples.domains.reverse import score
    from roll_lite.data.samples import RewardInput

    for response in ("enots", " enots ", "enotx", "", "stone and more"):
        sample = RewardInput("reverse", "reverse stone:", response, None, {"word": "stone"}, "stop")
        assert found["score"](sample, partial_credit=0.5) == score(sample, partial_credit=0.5)


def test_each_domain_gets_its_own_rows() -> None:
    config = load_config("words", ROOT / "examples/domains")
    tokenizer = load_tokenizer(config.model.path)
    prompts = {name: load_prompts(name, config.domains[name], "train", tokenizer, config.domains) for name in ("upper", "reverse")}
    assert {name: (len(found), found.left_out) for name, found in prompts.items()} == {
        "upper": (58, {"of domain reverse": 58}),
        "reverse": (58, {"of domain upper": 58}),
    }
    held_out = {prompt.text for prompt in load_prompts("upper", config.domains["upper"], "validation", tokenizer, config.domains)}
    assert not held_out & {prompt.text for prompt in prompts["upper"]}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_trains_on_both(tmp_path: Path) -> None:
    (command,) = RUNS
    arguments = [sys.executable, "-m", "roll_lite.cli", *shlex.split(command)[1:], f"run_dir={tmp_path}", *SMALL]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=360, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    samples = [json.loads(line) for line in (tmp_path / "latest/samples/step_000001.jsonl").read_text().splitlines()]
    assert {name: sum(one["domain"] == name for one in samples) for name in ("upper", "reverse")} == {"upper": 8, "reverse": 8}
    for one in samples:
        assert one["failure"] is None
        if one["domain"] == "reverse":
            assert one["prompt"].startswith("reverse ") and (one["correct"] == (one["score"] == 1.0)) and 0 <= one["score"] <= 1
    look = ["reward", "--config-path", "examples/domains", "--config-name", "words", "--domain", "reverse", "--limit", "0"]
    assert main([*look, "--responses", str(tmp_path / "latest/samples/step_000001.jsonl")]) == 0
