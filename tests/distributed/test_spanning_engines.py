"""Engines whose workers lie on two Ray nodes: what they answer, their weights, their end."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import Make, require
from test_ray_cluster import two_nodes

from tests.integration.test_runs import SMALL, Run

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("spanning_engine.py")

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture
def address() -> Iterator[str]:
    with two_nodes(cpus=4, gpus=0) as address:
        yield address


@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_an_engine_on_two_nodes(address: str, make: Make, tmp: Path) -> None:
    """Greedy output equals Hugging Face's before and after an update and after an offload; with its further node the engine is lost."""
    require(make)
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS / "contracts"), str(TESTS.parent)])
    command = [sys.executable, str(PROGRAM), make, str(tmp / "model"), f"infer-{uuid.uuid4().hex[:6]}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    told = run.stdout.splitlines() or [""]  # Ray tells of actors that were killed in others
    assert (run.returncode, told[-1]) == (0, "spans two nodes"), run.stdout + run.stderr


def test_a_run_whose_engine_spans_two_nodes(address: str, tmp: Path) -> None:
    """It takes turns with the trainer on the first node's device; every update is checked against what the trainer has."""
    require("vllm")
    settings = [
        "placement={nodes: 2, devices_per_node: 1}",
        "actor_train.offload=true",
        "actor_infer.offload=true",
        "actor_infer.devices=2",
        "actor_infer.strategy.tensor_parallel=2",
        "weight_sync.verify=full",
        "steps=3",
    ]
    run = Run(tmp, "tiny_grpo", *SMALL, *settings, environment={"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"})
    code, output = run.finish(400)
    assert code == 0, output
    steps = [record for record in run.metrics() if "time/step" in record]
    assert [record["sync/version"] for record in steps] == [0, 1, 2]
    assert all(record["mismatch/max"] < 1e-4 for record in steps), "log-probs of rollouts are the trainer's"
