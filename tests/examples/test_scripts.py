"""Every script of bench/ and examples/ runs: as small as it can be made, to see that it still does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("bench", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)
SMALL_RUN = ["steps=1", "rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "checkpoint.export_model=false"]
QUICK: dict[str, list[str]] = {
    "bench/advantages.py": ["--rows=8", "--columns=64", "--rounds=1", "--peer-rounds=1", "--threads=1"],
    "bench/checkpoint.py": ["--rounds=1", "--layers=1"],
    "bench/endpoint.py": ["--rounds=1", "--requests=2"],
    "bench/engines.py": ["--rounds=1", "--requests=4", "--engines=vllm"],
    "bench/episodes.py": ["--rounds=1", "--prompts=2", "--samples=2"],
    "bench/logprob_memory.py": ["--rounds=1", "--rows=512", "--vocab=32768", "--hidden=64"],
    "bench/lora_sync.py": ["--rounds=1", "--hidden=128", "--layers=1", "--engines=vllm"],
    "bench/packing.py": ["--pairs=1", "--rows=16", "--longest=64", "--budget=128"],
    "bench/reward_code.py": ["--rounds=1", "--programs=4"],
    "bench/reward_faults.py": ["--samples=500", "--types=exact"],
    "bench/reward_math.py": ["--samples=20", "--per-process=2", "--rounds=1"],
    "bench/rollout.py": ["--rounds=1", "--prompts=3", "--samples=2"],
    "bench/step.py": ["--rounds=1", "--prompts=8", "--samples=4", "--cases=short"],
    "bench/train.py": ["--pairs=1", "--rows=8", "--layouts", "sp2", "ep2", "--cases", "packed"],
    "bench/weight_sync.py": ["--rounds=1", "--engines=1", "--hidden=128", "--layers=2"],
    "examples/models/make_tiny.py": ["--steps=2", "--data={tmp}/data", "--model={tmp}/model"],
    "examples/models/make_tiny_chat.py": ["--steps=2", "--data={tmp}/data", "--model={tmp}/model"],
    "examples/run_recipes.py": ["tiny_raft", *SMALL_RUN, "validation.samples_per_prompt=1", "run_dir={tmp}/runs"],
}
"""Arguments that make a script quick; one that is not listed here is run with --quick."""
SERVERS = ("examples/reward_server.py",)
"""They run until they are ended."""
ELSEWHERE = {
    "examples/start_rlvr_pipeline.py": "tests/integration/test_runs.py",
    "examples/recompute.py": "tests/examples/test_recompute.py",
    "examples/read_dumps.py": "tests/integration/test_replay.py",
    "examples/audit.py": "tests/integration/test_ledger.py",
}
"""Scripts that other tests run."""
FALLS_SHORT = {"examples/run_recipes.py": "tiny_raft"}
"""Scripts that end with 1 where a model has not learned, as it cannot in one step; and what they say of it."""


DEAR = {
    "bench/endpoint.py",
    "bench/engines.py",
    "bench/episodes.py",
    "bench/lora_sync.py",
    "bench/recovery.py",
    "bench/rollout.py",
    "bench/routing_replay.py",
    "bench/step.py",
    "examples/run_recipes.py",
}
"""Scripts that start engines or whole runs, or make an environment of their own for a competitor."""
ALSO_CALLED = {"bench/reward_code.py", "bench/reward_faults.py"}
"""Their measurements are called by tests/rewards/code/test_code.py and tests/workers/test_reward_faults.py."""


def command(script: str, folder: Path) -> list[str]:
    return [sys.executable, script, *(argument.format(tmp=folder) for argument in QUICK.get(script, ["--quick"]))]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=pytest.mark.nightly) if script in DEAR | ALSO_CALLED else script
        for script in SCRIPTS
        if script not in {*SERVERS, *ELSEWHERE}
    ],
)
def test_a_script_runs(script: str, tmp_path: Path) -> None:
    done = subprocess.run(command(script, tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=580, check=False, env=environment())
    if script in FALLS_SHORT:
        assert re.search(rf"{FALLS_SHORT[script]} +\d+\.\d% +\d+\.\d%.* has not risen", done.stdout), done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    if script.startswith("bench/"):
        report = json.loads(done.stdout.splitlines()[-1])
        skipped = report.get("skipped") and not os.environ.get("CI")
        assert report["name"] and (skipped or report["ours"] > 0), "the last line is what the benchmark found"


@pytest.mark.slow
@pytest.mark.parametrize("script", SERVERS)
def test_a_server_comes_up(script: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", script, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment()
    ) as server:
        assert server.stdout is not None
        try:
            assert re.search(r"http://127\.0\.0\.1:\d{2,}", server.stdout.readline())
        finally:
            server.terminate()


def test_every_script_that_is_named_exists() -> None:
    assert {*QUICK, *SERVERS, *ELSEWHERE} <= set(SCRIPTS)
    assert all(script in (ROOT / test).read_text(encoding="utf-8") for script, test in ELSEWHERE.items())
