"""Whole runs in which engines are killed or stopped, or raise: new ones take their places, get the weights, and serve."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Make, require

from tests.integration.test_lost_engines import GROUPS, SAMPLES, SETTINGS, hosts, told, victim_of
from tests.integration.test_runs import ROOT, Run, until_gone

NIGHTLY = pytest.mark.nightly
RAISES = Path(__file__).parent / "engine_raises"
RETURNED = r"actor_infer\[(\d)\] serves again, (\d+) s after its loss, with the weights of version (\d+)"


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with ExitStack() as runs:

        def begin(make: Make, *overrides: str, environment: dict[str, str] | None = None) -> Run:
            require(make)
            settings = [setting for setting in SETTINGS if "restarts" not in setting]
            overrides = (*settings, f"actor_infer.strategy={make}", *overrides)
            run = runs.enter_context(Run(tmp_path, "tiny_grpo", *overrides, environment=environment))
            run.wait_for_step(2)
            return run

        yield begin


def wait_until(run: Run, holds: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert run.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def steps_of(run: Run) -> list[dict[str, Any]]:
    return [record for record in run.metrics() if "time/step" in record]


def whole(run: Run) -> list[dict[str, Any]]:
    """Steps of a finished run. Asserts that no sample is missing, engines compute with the trainer's weights, and the ledger adds up."""
    steps = steps_of(run)
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    for record in steps:
        assert (record["rollout/samples"], record["rollout/failed"]) == (GROUPS * SAMPLES, 0)
        assert record["mismatch/max"] < 1e-4
    audit = subprocess.run([sys.executable, "examples/audit.py", run.folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert audit.returncode == 0 and "the ledger adds up" in audit.stdout, audit.stdout
    assert sum(record["rollout/engines_lost"] for record in steps) == sum(record.get("rollout/engines_returned", 0) for record in steps)
    return steps


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "how", "of_engine"),
    [
        pytest.param("vllm", "kill", False, id="vllm-its host is killed"),
        pytest.param("vllm", "suspend", True, id="vllm-it is stopped", marks=NIGHTLY),
        pytest.param("sglang", "kill", True, id="sglang-it is killed", marks=NIGHTLY),
    ],
)
def test_a_step_waits_for_the_successor_of_the_only_engine(begun: Any, make: Make, how: str, of_engine: bool) -> None:
    run = begun(make, "actor_infer.devices=1", "steps=8")
    processes = run.tree()
    getattr(victim_of(run, of_engine), how)()
    code, output = run.finish(400)
    assert code == 0, output
    assert len(told(output)) == 1
    ((number, _, version),) = re.findall(RETURNED, output)
    assert number == "0" and int(version) >= 1
    steps = whole(run)
    assert len(steps) == 8 and sum(record["rollout/engines_lost"] for record in steps) == 1
    assert until_gone(processes, 60) == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["vllm", "sglang"])
@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.usefixtures("signals_arrive")
def test_an_engine_that_raises_while_it_generates_is_replaced(begun: Any, make: Make, engines: int, tmp_path: Path) -> None:
    path = os.pathsep.join([str(RAISES), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"RAISES_MARK": str(tmp_path / "raised"), "RAISES_IN_PASS": "90", "PYTHONPATH": path}
    run = begun(make, f"actor_infer.devices={engines}", "steps=100000", environment=environment)
    wait_until(run, lambda: any(step.get("rollout/engines_returned") for step in steps_of(run)), 200)
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish(120)
    assert code == 130 and (tmp_path / "raised").exists(), output
    assert len(told(output)) == 1 and len(re.findall(RETURNED, output)) == 1 and "Unhandled error" not in output, output
    assert sum(record["rollout/engines_lost"] for record in whole(run)) == 1
    logs = "".join(log.read_text(errors="replace") for log in run.folder.glob("logs/actor_infer*"))
    assert "ArithmeticError: a kernel failed" in logs, "the cause is in the engine's log"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", ["vllm", "sglang"])
@pytest.mark.usefixtures("signals_arrive")
def test_two_engines_return_one_after_the_other(begun: Any, make: Make) -> None:
    run = begun(make, "steps=100000")
    for number in range(2):
        before = {host.pid for host in hosts(run.tree())}
        victim_of(run, of_engine=number == 0).kill()
        returned = number + 1
        wait_until(run, lambda: sum(step.get("rollout/engines_returned", 0) for step in steps_of(run)) == returned)  # noqa: B023
        assert len({host.pid for host in hosts(run.tree())} - before) == 1
    wait_for = len(steps_of(run)) + 3
    wait_until(run, lambda: len(steps_of(run)) >= wait_for)
    run.process.send_signal(2)
    code, output = run.finish(120)
    assert code == 130, output
    assert len(re.findall(RETURNED, output)) == 2
    whole(run)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_engine_that_keeps_dying_is_given_up(begun: Any) -> None:
    run = begun("vllm", "actor_infer.devices=1", "actor_infer.restarts=1", "steps=100000")
    hosts(run.tree())[0].kill()
    wait_until(run, lambda: any(step.get("rollout/engines_returned") for step in steps_of(run)))
    hosts(run.tree())[0].kill()
    code, output = run.finish(120)
    assert code == 1, output
    assert "after 1 restarts within an hour, actor_infer.restarts" in output.replace("\n", " ")
    assert "actor_infer" in run.summary()["exit"]
