"""Runs whose engines join with nodes that have room for them, and leave with nodes that are drained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import Make, require
from support_hosts import Hosts
from support_hosts import hosts as start_hosts

from tests.chaos.test_lost_nodes import HostedRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three hosts, of which the third has not joined the cluster."""
    with start_hosts(3, cpus=1, running=2) as found:
        yield found


def drain(hosts: Hosts, number: int) -> None:
    """Announce to Ray that a host will leave."""
    code = (
        "import ray, sys, time; client = ray._raylet.GcsClient(address=sys.argv[1]); "
        "nodes = [id for id, node in client.get_all_node_info().items() if node.node_manager_address == sys.argv[2] and node.state == 0]; "
        "assert client.drain_node(nodes[0].hex(), 2, 'test', int(1000 * (time.time() + 600)))[0]"
    )
    command = [sys.executable, "-c", code, f"{hosts.addresses[0]}:6379", hosts.addresses[number]]
    subprocess.run(hosts.on_first(command), env=hosts.environment, check=True, timeout=60)


def continued(folder: Path, first: int) -> int:
    """Count responses that an engine began and others ended."""
    groups = (line for line in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines()) if line["event"] == "group")
    turns = (turn for group in groups for sample in group.get("turns", []) for turn in sample)
    return sum(isinstance(engines, list) and engines[0] == first for engines, *_ in turns)


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "returns"), [("vllm", False), ("vllm", True), ("sglang", False)])
@pytest.mark.usefixtures("signals_arrive")
def test_an_engine_joins_with_a_node_and_leaves_when_the_node_is_drained(hosts: Hosts, engine: Make, returns: bool) -> None:
    """Long responses, a few at a time, so that the engine that leaves has some under way."""
    require(engine)
    run = HostedRun(
        hosts,
        *("placement={nodes: 2, devices_per_node: 1}", "actor_train.devices=[0]", "actor_infer.devices=[1]", "limits.silence=10"),
        *(f"actor_infer.strategy={engine}", "actor_infer.strategy.max_running_requests=4", "actor_infer.most_replicas=2"),
        *(f"domains.{name}.sampling.{key}_tokens=200" for name in ("add", "make", "repeat") for key in ("min", "max")),
    )
    run.until(lambda: run.steps >= 1)
    assert not run.says(r"actor_infer\[1\]")
    hosts.start(2)
    run.until(lambda: run.says(rf"actor_infer\[1\] on {hosts.addresses[2]} joins with the weights of version \d+; 2 engines now"))
    run.trains(2)
    drain(hosts, 2)
    run.until(lambda: run.says(rf"actor_infer\[1\] on {hosts.addresses[2]} leaves, since its node is drained; 1 engines now"))
    run.trains(2)
    if returns:
        hosts.kill(2)
        hosts.start(2)
        run.until(lambda: run.says(r"actor_infer\[1\] on \S+ joins.*actor_infer\[1\] on \S+ joins"))
        run.trains(1)
    folder = run.ends()
    assert not run.says("is lost") and (folder / "logs" / "actor_infer-1.log").exists()
    assert continued(folder, first=1) > 0
