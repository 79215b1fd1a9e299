"""Command `roll-lite doctor`: print what would keep a run from working on this machine or cluster, with remedies."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from roll_lite.config.schema.run import RayConfig
from roll_lite.doctor.packages import ABSENT, LOCK, Diagnosis, wrong_packages
from roll_lite.files import first_line, read_text
from roll_lite.pipeline.sweep import INTERRUPTED, run_forwarding_signals

SAID_LINES = 12
RAY = "`roll-lite docs multi_node` says how a cluster is started and named, how its token is used, and which ports nodes need between them"


def answer(asked: argparse.Namespace) -> int:
    """Print all diagnoses. Return the exit code: 1 after a fault."""
    found = []
    for one in _examine(asked):
        found.append(one)
        if not asked.json and (one.remedy or not one.node):  # the table has what is well on a node
            remedy = one.remedy and f"{'':25} -> {one.remedy}\n"
            sys.stdout.write(f"{one.status:<8} {one.check:<16} {one.node and f'{one.node}: '}{one.value}\n{remedy}")
    states = [one.status for one in found]
    total = f"\n{len(found)} checks: {states.count('fault')} faults, {states.count('warning')} warnings"
    sys.stdout.write(f"{json.dumps([vars(one) for one in found]) if asked.json else total}\n")
    return int("fault" in states)


def _examine(asked: argparse.Namespace) -> Iterator[Diagnosis]:
    here = Path("runs").absolute()
    try:
        from roll_lite.doctor.machine import alone, check_engines, check_machine, check_ports
        from roll_lite.doctor.nodes import check_nodes
    except Exception as error:  # torch or ray, which most of roll_lite imports
        yield from wrong_packages()
        yield Diagnosis("imports", first_line(error), LOCK)
        return
    try:
        if asked.nodes:
            yield from check_nodes(asked.address or "auto", here)
        else:
            yield from check_machine(here)
            yield from check_ports()
            yield Diagnosis("ray", alone(reach_ray, asked.address, limit_s=RayConfig().start_timeout_s))
    except (RuntimeError, OSError, ValueError) as error:
        yield Diagnosis("ray", first_line(error), RAY)
    address = asked.address or ("auto" if asked.nodes else None)
    for name in [one.check for one in check_engines() if not one.remedy and one.value != ABSENT]:
        if asked.engines:
            yield run_tiny("start of", name, address, "steps=1", "mode=rollout_only")
        if asked.smoke:
            yield run_tiny("smoke", name, address, "steps=2")


def reach_ray(address: str | None) -> str:
    """Start Ray as a run does, or attach to a cluster; return a sentence about it."""
    from roll_lite.distributed.ray_session import ray_session

    started = time.monotonic()
    with ray_session(RayConfig(address=address), None) as session:
        if session.started:
            return f"a run's own cluster starts in {time.monotonic() - started:.0f} s"
        token = "lets callers in by token" if os.environ.get("RAY_AUTH_MODE") == "token" else "asks for no token"
        return f"the cluster at {session.address} {token}; --nodes checks its nodes"


def run_tiny(why: str, engine: str, address: str | None, *settings: str) -> Diagnosis:
    """Run the shipped tiny model with an engine and these settings; keep a failed run's folder. `why`: prefix of the check's name."""
    from roll_lite.pipeline.agreement import BOUND  # imports torch

    check, started, folder = f"{why} {engine}", time.monotonic(), Path(tempfile.mkdtemp(prefix="doctor-"))
    given = [
        "placement=colocated",
        "validation=null",
        f"run_dir={folder}",
        f"ray.address={address or 'null'}",
        f"actor_infer.strategy={engine}",
        "limits.start=900",
    ]
    sys.stderr.write(f"{check}: running, which takes minutes on a few CPU cores\n")
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "roll_lite.cli", "run", "--config-name", "tiny_grpo", *given, *settings]
        code = run_forwarding_signals(command, stdout=output, stderr=output)
    if code == INTERRUPTED:
        shutil.rmtree(folder)
        raise KeyboardInterrupt
    if code:
        said = read_text(folder / "output.txt").strip().splitlines()[-SAID_LINES:]
        return Diagnosis(check, "\n".join([f"the run ended with code {code}", *said]), f"its folder is kept: {folder}")
    steps = [step for text in read_text(folder / "latest/metrics.jsonl").splitlines() if "time/step" in (step := json.loads(text))]
    value = f"{time.monotonic() - started:.0f} s in all, {steps[-1]['time/step']:.1f} s for step {len(steps)}"
    if mismatches := [step["mismatch/mean"] for step in steps if "mismatch/mean" in step]:
        value += f"; engine and trainer agree: log-probs differ by {max(mismatches):.1g} nats on average, {BOUND['float32']} is allowed"
    shutil.rmtree(folder)
    return Diagnosis(check, value)
