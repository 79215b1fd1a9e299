"""Seconds from the SIGKILL of a run's only engine to the next sample, and from that of its training rank to the next step.

    .venv/bin/python bench/recovery.py [--engine vllm|sglang] [--quick]

A run of the tiny model with one engine and one training rank. The host process of each is killed in the middle of a step, three times
(once with --quick). The start of the successor is included; the training rank also loads a checkpoint and repeats up to nine updates.
`steps_lost` is what a loss cost, in quiet steps of the same run. No
other project starts these again within the run, so there is no peer to run: `ratio` is 30 s, the aim for the engine, over its median.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
AIM_S = 30.0
LIMIT_S = 300.0
OUTPUT = "output.txt"
QUIET_STEPS = 4
SETTINGS = ["validation.enabled=false", "steps=100000", "rollout.prompts_per_step=8", "checkpoint.every=10", "checkpoint.asynchronous=true"]
WORKERS = {"engine": "InferWorker", "trainer": "ActorWorker"}


def steps_of(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [record for record in map(json.loads, lines) if "time/step" in record]


def wait_for_step(run: subprocess.Popen[bytes], folder: Path, step: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + LIMIT_S
    while len(steps := steps_of(folder)) < step:
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no step {step}:\n{(folder.parent / OUTPUT).read_text()[-2000:]}")
        time.sleep(0.05)
    return steps


def next_sample(folder: Path, killed_at: float, steps: range) -> float:
    """Time at which the first response after the kill was complete."""
    lines = [line for step in steps for line in (folder / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()]
    times = [json.loads(line)["generated_at"] for line in lines]
    return min(at for at in times if at is not None and at > killed_at + 1.0)  # what had left the engine may arrive in its first second


def kill_worker(run: subprocess.Popen[bytes], name: str) -> float:
    hosts = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.Error):  # programs of the sandbox come and go
            hosts += [process] if name in " ".join(process.cmdline()) else []
    (host,) = hosts
    killed_at = time.time()
    host.kill()
    return killed_at


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    seconds: dict[str, list[float]] = {"engine": [], "trainer": []}
    lost: dict[str, list[float]] = {"engine": [], "trainer": []}
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_grpo", f"run_dir={place}", *SETTINGS]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (Path(place) / OUTPUT).open("w") as output:
            strategy = f"actor_infer.strategy={chosen.engine}"
            run = subprocess.Popen([*command, strategy], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
        folder = Path(place) / "latest"
        try:
            for who in ["engine", "trainer"] * (1 if chosen.quick else 3):
                before = len(wait_for_step(run, folder, len(steps_of(folder)) + QUIET_STEPS))
                killed_at = kill_worker(run, WORKERS[who])
                wait_for_step(run, folder, before + 1)
                after = time.time()
                steps = wait_for_step(run, folder, before + 3)
                if who == "engine":
                    after = next_sample(folder, killed_at, range(before, before + 3))
                quiet = statistics.median(step["time/step"] for step in steps[before - 3 : before])
                seconds[who].append(after - killed_at)
                lost[who].append((after - killed_at) / quiet)
                print(f"{who}: {seconds[who][-1]:.1f} s", file=sys.stderr, flush=True)
        finally:
            run.send_signal(signal.SIGINT)  # after a SIGTERM it would save a checkpoint
            run.wait(LIMIT_S)
    engine, trainer = (statistics.median(seconds[who]) for who in WORKERS)
    result = {"name": "recovery", "engine": chosen.engine, "ours": round(engine, 1), "unit": "s", "ratio": round(AIM_S / engine, 2)}
    result |= {"trainer": round(trainer, 1), "each": {who: [round(one, 1) for one in each] for who, each in seconds.items()}}
    print(json.dumps(result | {"steps_lost": {who: round(statistics.median(each), 1) for who, each in lost.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
