"""Evaluations, started as a user starts them: real engines, real rewards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_harness import require

from roll_lite.observability.view.runs import Run as ViewedRun
from roll_lite.observability.view.runs import find_runs
from tests.integration.test_runs import ENGINES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GREEDY = ("validation.sampling.temperature=0", "domains.make=null")


def started(run_dir: Path, *arguments: str, config: str = "tiny_grpo") -> tuple[Path, str]:
    """Folder and output of a run that has ended well."""
    command = [sys.executable, "-m", "roll_lite.cli", *arguments, "--config-name", config, f"run_dir={run_dir}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return (run_dir / "latest").resolve(), done.stdout


def results(folder: Path) -> dict[str, dict[str, Any]]:
    evaluation: dict[str, dict[str, dict[str, Any]]] = json.loads((folder / "evaluation.json").read_text())
    return evaluation["results"]


@pytest.mark.timeout(590)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_is_evaluated_by_level(engine: str, tmp_path: Path) -> None:
    """Two engines, four samples of each prompt, and a reward that fails for every tenth prompt."""
    require(engine)
    rows = [json.loads(line) for line in (ROOT / "examples/data/add_validation.jsonl").read_text().splitlines()][:40]
    for number, row in enumerate(rows):
        row |= {"level": 1 + number % 2, "subject": "sums", "answer": row["answer"] if number % 10 else "fails"}
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards_here.py").write_text(REWARD)
    domain = "domains.sums={sampling: {max_prompt_tokens: 12, max_tokens: 12}, reward: {name: rewards_here.score, retries: 0}}"
    settings = (f"actor_infer.strategy={engine}", "actor_infer.devices=2", "validation.samples_per_prompt=4")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    folder, output = started(tmp_path / "runs", "evaluate", "examples/models/tiny", "--data", f"{tmp_path}/sums.jsonl", domain, *settings)
    got = results(folder)
    assert list(got) == ["overall", "sums", "sums/level:1", "sums/level:2", "sums/subject:sums"]
    assert got["sums"]["failed"] == 16 and (got["sums"]["prompts"], got["sums"]["samples"]) == (36, 144)
    assert "16 sample(s) failed for good, 16 of them:" in output and "no such answer" in output
    samples = [json.loads(line) for line in (folder / "samples/validation_000000.jsonl").read_text().splitlines()]
    right = [sample["correct"] for sample in samples if sample["outcome"] == "accepted" and "level:2" in sample["parts"]]
    assert got["sums/level:2"]["accuracy"] == pytest.approx(sum(right) / len(right)) and len(samples) == 160
    assert 0.2 < got["sums"]["accuracy"] < got["sums"]["pass@4"] <= 1
    assert not (folder / "model").exists() and {path.name for path in (folder / "logs").glob("actor_train*")} == set()
    (viewed,) = (ViewedRun(name, found) for name, found in find_runs([folder]).items())
    assert viewed.status()["evaluates"] and len(viewed.group("validation", 0, samples[0]["group"])) == 4
    assert "report.html" in {path.name for path in folder.iterdir()}


REWARD = """
def score(sample):
    if sample.answer == "fails":
        raise ValueError("no such answer")
    return float(sample.response.strip() == sample.answer)
"""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_measures_what_the_first_validation_of_a_run_does(engine: str, tmp_path: Path) -> None:
    require(engine)
    settings = (f"actor_infer.strategy={engine}", *GREEDY)
    folder, _ = started(tmp_path / "evaluation", "evaluate", "examples/models/tiny", *settings)
    run, _ = started(tmp_path / "run", "run", "steps=1", "rollout.prompts_per_step=6", "validation.every=0", *settings)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (first,) = (record for record in records if record["step"] == 0)
    for domain in ("add", "repeat"):
        for metric in ("accuracy", "accuracy_error", "response_tokens", "truncated", "prompts"):
            assert results(folder)[domain][metric] == first[f"domain/{domain}/validation/{metric}"], (domain, metric)


CALCULATOR = (
    "domains.calculator={data: {validation: examples/data/calculator_validation.jsonl}, template: {name: chat}, reward: exact, "
    "sampling: {max_prompt_tokens: 60, max_tokens: 240}, "
    "environment: {name: tools, tools: [roll_lite.examples.domains.turns.calculate], max_turns: 3}}"
)


@pytest.mark.timeout(590)
@pytest.mark.parametrize("engine", ENGINES)
def test_episodes_are_evaluated(engine: str, tmp_path: Path) -> None:
    """A game, which some episodes do not end in five turns, and tools, whose calls sometimes fail."""
    require(engine)
    settings = (f"actor_infer.strategy={engine}", "domains.guess.environment.max_turns=5", CALCULATOR)
    folder, output = started(tmp_path, "evaluate", "examples/models/tiny_chat", *settings, config="tiny_guess")
    got = results(folder)
    assert list(got) == ["overall", "guess", "calculator"]
    samples = [json.loads(line) for line in (folder / "samples/validation_000000.jsonl").read_text().splitlines()]
    for domain in ("guess", "calculator"):
        own = [sample for sample in samples if sample["domain"] == domain and sample["outcome"] == "accepted"]
        facts = [sample["episode"]["metrics"] for sample in own]
        assert got[domain]["samples"] == len(own) > 90
        for name in facts[0]:
            assert got[domain][name] == pytest.approx(sum(one[name] for one in facts) / len(own)), (domain, name)
        assert got[domain]["turns"] == pytest.approx(sum(len(sample["episode"]["rewards"]) for sample in own) / len(own))
        assert got[domain]["max_turns"] == pytest.approx(sum(sample["finish_reason"] == "max_turns" for sample in own) / len(own))
    assert 1 < got["guess"]["turns"] < 5 and got["guess"]["max_turns"] > 0 and "tool_errors" not in got["guess"]
    assert 0 <= got["calculator"]["tool_errors"] < got["calculator"]["tool_calls"]
    assert re.search("reward +turns +tool errors +truncated +max turns +tokens", output)
