"""A long run in which a process is killed every half a minute: it loses no sample, leaks nothing, and learns what a quiet run learns."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_runs import ROOT, Run, until_gone

MINUTES = float(os.environ.get("ROLL_LITE_SOAK_MINUTES", "60"))
LOOK_SECONDS = 5.0
COMPARED = range(60, 101)
"""Steps whose accuracy is compared with that of a quiet run."""
SETTINGS = [
    *("rollout.prompts_per_step=16", "checkpoint.every=20", "validation=null", "batches.write=never", "limits.silence=10"),
    *(f"{role}.restarts=1000" for role in ("actor_train", "actor_infer", "rollout")),
]
GROWTH_MB = {"driver": 60.0, "gcs_server": 60.0, "raylet": 30.0}
"""Growth in an hour that Ray's own tables explain."""
ROLE_GROWTH_MB = {"actor_train": 100.0, "actor_infer": 300.0, "rollouts": 50.0, "rewards": 30.0}
"""Growth of a role's median process. A new engine grows by 330 MB within minutes, a trainer by 80, the service by 35, and kills make the
processes of one quarter younger than those of another."""


@pytest.mark.nightly
@pytest.mark.timeout(60 * (2 * MINUTES + 30))
@pytest.mark.usefixtures("signals_arrive")
def test_an_hour_of_kills(tmp_path: Path) -> None:
    with Run(tmp_path / "quiet", "tiny_async", *SETTINGS, f"steps={COMPARED.stop}") as quiet:
        code, output = quiet.finish(900)
        assert code == 0, output
    looks: list[dict[str, float]] = []
    with Run(tmp_path / "chaos", "tiny_async", *SETTINGS, "steps=1000000", "chaos={every_s: 30, seed: 1}") as run:
        run.wait_for_step(2)
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end:
            assert run.process.poll() is None, run.finish()[1]
            looks.append(look(run))
            time.sleep(LOOK_SECONDS)
        processes = run.tree()
        run.process.send_signal(signal.SIGINT)
        code, output = run.finish(120)
    assert code == 130, output
    assert until_gone(processes, 60) == []
    kills = output.count("chaos: kill of")
    assert kills >= MINUTES, output
    steps = [line for line in run.metrics() if "time/step" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert sum(line["rollout/failed"] for line in steps) == 0
    audit = subprocess.run([sys.executable, "examples/audit.py", run.folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert audit.returncode == 0 and "the ledger adds up" in audit.stdout, audit.stdout
    growth = grown(looks)
    print(f"{MINUTES:g} minutes, {kills} kills, {len(steps)} steps; growth: {growth}")
    for name, most in (GROWTH_MB | ROLE_GROWTH_MB).items():
        assert growth[name] < most, growth
    assert growth["processes"] <= 2 and growth["files"] <= 20 and growth["shm_mb"] < 50, growth
    ours, theirs = (statistics.fmean(line["reward/accuracy"] for line in one.metrics() if line["step"] in COMPARED) for one in (run, quiet))
    assert ours == pytest.approx(theirs, abs=0.1)
    assert statistics.fmean(line["reward/accuracy"] for line in steps[-len(COMPARED) :]) > theirs - 0.1
    samples = [json.loads(line) for file in (run.folder / "samples").iterdir() for line in file.open() if '"domain":"make"' not in line]
    assert len(samples) > len(steps) and [one for one in samples if one["correct"] != (one["response"].strip() == one["answer"])] == []


def look(run: Run) -> dict[str, float]:
    """Memory in MB by name and role, and how many processes, open files and MB in shared memory there are. A role's memory is that of its
    median process, without shared pages."""
    found: dict[str, float] = {"shm_mb": psutil.disk_usage("/dev/shm").used / 2**20}
    family = run.tree()
    found["processes"] = len(family)
    found["driver"], found["files"] = family[0].memory_info().rss / 2**20, family[0].num_fds()
    for process in family:
        try:
            name, megabytes = process.name(), process.memory_info().rss / 2**20
        except psutil.Error:
            continue
        if name in GROWTH_MB:
            found[name] = megabytes
    return found | by_role(json.loads((run.folder / "processes.json").read_text()))


def by_role(places: list[dict[str, Any]]) -> dict[str, float]:
    """Median MB of the living processes of each role, with their children. A role whose processes were all killed is left out."""
    found: dict[str, list[float]] = {}
    for place in places:
        with suppress(psutil.Error):
            process = psutil.Process(place["pid"])
            memory = [one.memory_info() for one in (process, *process.children(recursive=True))]
            found.setdefault(place["role"], []).append(sum(one.rss - one.shared for one in memory) / 2**20)
    return {role: statistics.median(each) for role, each in found.items()}


def grown(looks: list[dict[str, float]]) -> dict[str, float]:
    """Median of the last quarter less that of the second: the first warms up."""
    quarter = len(looks) // 4

    def medians(part: list[dict[str, float]]) -> dict[str, float]:
        return {name: statistics.median(one[name] for one in part if name in one) for name in sorted(set().union(*part))}

    before, after = medians(looks[quarter : 2 * quarter]), medians(looks[-quarter:])
    return {name: value - before[name] for name, value in after.items() if name in before}


def test_growth_is_that_of_the_medians() -> None:
    looks: list[dict[str, Any]] = [{"driver": value} for value in (1, 2, 5, 5, 6, 6, 9, 9)]
    assert grown(looks) == {"driver": 4.0}


def test_the_memory_of_a_role_is_that_of_its_median_living_process() -> None:
    own = by_role([{"role": "rewards", "pid": os.getpid()}])["rewards"]
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as small:
        places = [{"role": "rewards", "pid": pid} for pid in (os.getpid(), small.pid, small.pid)]
        assert 0 < by_role(places)["rewards"] < own / 2
    assert by_role([{"role": "rewards", "pid": small.pid}]) == {}
