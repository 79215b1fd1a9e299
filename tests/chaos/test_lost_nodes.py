"""Runs over three hosts of which one is switched off, or cut off, and comes back: the run waits or goes on, and no sample is lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_hosts import Hosts
from support_hosts import hosts as start_hosts

from tests.integration.test_lost_engines import NOTICED_S
from tests.integration.test_runs import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

SETTINGS = [
    *("steps=100000", "rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "validation=null", "batches.write=never"),
    *("placement={nodes: 3, devices_per_node: 1}", "checkpoint.every=5", "limits.silence=10"),
]
ENGINES_APART = ("actor_train.devices=[0]", "actor_infer.devices=[1, 2]")
TRAINER_APART = ("actor_train.devices=[2]", "actor_infer.devices=[0, 1]")
RETURNED = r"actor_infer\[1\] on \S+ serves again"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Ray gives a silent node up after about 9 s instead of about a minute."""
    for name, value in {"period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    with start_hosts(3) as found:
        yield found


class HostedRun:
    """A run whose driver is on the first host."""

    def __init__(self, hosts: Hosts, *settings: str) -> None:
        self.hosts = hosts
        self.run_dir = hosts.shared / "runs"
        script = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_grpo", f"run_dir={self.run_dir}"]
        self.said = hosts.shared.parent / "run.txt"
        with self.said.open("w") as output:
            self.process = subprocess.Popen(
                hosts.on_first([*script, *SETTINGS, *settings]), cwd=ROOT, env=hosts.environment, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def steps(self) -> int:
        file = self.run_dir / "latest" / "metrics.jsonl"
        return file.read_text().count("time/step") if file.exists() else 0

    def until(self, holds: Any, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.2)

    def trains(self, steps: int) -> None:
        wanted = self.steps + steps
        self.until(lambda: self.steps >= wanted)

    def says(self, pattern: str) -> bool:
        return re.search(pattern, self.said.read_text().replace("\n", " ")) is not None

    def cut_host(self) -> int:
        """Wait until a host is cut off; returns its number."""
        self.until(lambda: "its node" in self.said.read_text())
        (address,) = re.findall(r"chaos: cut of .*, its node (\S+) for", self.said.read_text())
        return list(self.hosts.addresses).index(address)

    def heals(self, number: int) -> None:
        """Wait until a cut host is back, and Ray has ended on it, as it does on hosts that it gave up. Then start Ray there again."""
        self.until(lambda: "blackhole" not in self.hosts.rules(number))
        self.until(lambda: not self.hosts.has_ray(number))
        self.hosts.kill(number)
        self.hosts.start(number)

    def ends(self, lost_engines: int | None = None) -> Path:
        """End it as Ctrl-C does, and check its ledger and that each lost engine was noticed in time."""
        subprocess.run(["kill", "-INT", str(self.process.pid)], check=True)
        self.process.wait(120)
        folder = (self.run_dir / "latest").resolve()
        audit = subprocess.run([sys.executable, "examples/audit.py", folder], cwd=ROOT, capture_output=True, text=True, check=False)
        assert audit.returncode == 0 and "the ledger adds up" in audit.stdout, audit.stdout
        steps = [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "time/step" in line]
        silences = [line["rollout/engine_silent_seconds"] for line in steps if "rollout/engine_silent_seconds" in line]
        assert lost_engines is None or len(silences) == sum(line["rollout/engines_lost"] for line in steps) == lost_engines
        assert all(0 < seconds <= NOTICED_S for seconds in silences), silences
        return folder


def cut(target: str, seconds: float, most: int = 1) -> str:
    return f"chaos={{every_s: 4, actions: {{cut: 1}}, targets: [{target}], cut_s: {seconds:g}, most: {most}}}"


@pytest.mark.usefixtures("signals_arrive")
def test_a_short_cut_loses_nothing(hosts: Hosts) -> None:
    run = HostedRun(hosts, "actor_train.devices=[1]", "actor_infer.devices=[0, 2]", cut("actor_train, actor_infer", 2, most=3))
    run.until(lambda: run.said.read_text().count("chaos: cut of ") == 3)
    run.trains(3)
    assert {f"its node {address} for 2 s" in run.said.read_text() for address in hosts.addresses} == {False, True}
    run.ends()
    assert not run.says("is lost")


@pytest.mark.usefixtures("signals_arrive")
def test_an_engine_is_back_after_a_long_cut_of_its_node(hosts: Hosts) -> None:
    run = HostedRun(hosts, "actor_train.devices=[0]", "actor_infer.devices=[0, 2]", cut("actor_infer", 20))
    number = run.cut_host()
    run.until(lambda: run.says(rf"actor_infer\[1\] on {hosts.addresses[number]} is lost"))
    run.trains(2)
    assert not run.says(RETURNED)
    run.heals(number)
    run.until(lambda: run.says(RETURNED))
    run.trains(2)
    run.ends(lost_engines=1)


@pytest.mark.usefixtures("signals_arrive")
def test_a_trainer_on_a_node_that_is_cut_off_is_named_and_starts_again(hosts: Hosts) -> None:
    run = HostedRun(hosts, *TRAINER_APART, cut("actor_train", 20))
    number = run.cut_host()
    run.until(lambda: run.says(rf"actor_train rank 0 on {hosts.addresses[number]} is lost"), seconds=30)
    run.heals(number)
    run.until(lambda: run.says("actor_train is back at step"))
    run.trains(2)
    run.ends()


@pytest.mark.parametrize("how", ["switched off", "cut off"])
@pytest.mark.usefixtures("signals_arrive")
def test_a_lost_engine_node_costs_its_engine_until_it_is_back(hosts: Hosts, how: str) -> None:
    run = HostedRun(hosts, *ENGINES_APART)
    run.until(lambda: run.steps >= 2)
    if how == "switched off":
        hosts.kill(2)
    else:
        hosts.set_link(2, "down")
    run.until(lambda: run.says(rf"actor_infer\[1\] on {hosts.addresses[2]} is lost"))
    run.trains(3)
    assert not run.says(RETURNED)
    if how == "cut off":
        hosts.set_link(2, "up")
        hosts.kill(2)  # its raylet has been declared dead, and ends
    hosts.start(2)
    run.until(lambda: run.says(RETURNED))
    run.trains(2)
    run.ends(lost_engines=1)


@pytest.mark.usefixtures("signals_arrive")
@pytest.mark.parametrize("copies", [0, 1])
def test_a_lost_trainers_node_is_waited_for(hosts: Hosts, copies: int) -> None:
    """A copy in memory is lost with the node: its ranks load the checkpoint."""
    run = HostedRun(hosts, *TRAINER_APART, f"checkpoint.in_memory_every={copies}")
    run.until(lambda: run.steps >= 6)
    hosts.kill(2)
    run.until(lambda: run.says(rf"actor_train rank 0 on {hosts.addresses[2]} is lost"))
    hosts.start(2)
    run.until(lambda: run.says("actor_train is back at step"))
    assert run.says(r"lost in load_copy: Object\w+Error.* starts again from step \d+, and") == bool(copies)
    run.trains(2)
    run.ends()


@pytest.mark.usefixtures("signals_arrive")
def test_an_engine_on_a_node_that_is_back_with_another_model_does_not_serve(hosts: Hosts) -> None:
    for folder in (hosts.apart, hosts.apart_there):
        shutil.copytree(ROOT / "examples/models/tiny", folder / "model")
    run = HostedRun(hosts, *ENGINES_APART, f"model.path={hosts.apart / 'model'}")
    run.until(lambda: run.steps >= 2)
    hosts.kill(2)
    run.until(lambda: run.says(rf"actor_infer\[1\] on {hosts.addresses[2]} is lost"))
    with (hosts.apart_there / "model" / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\0")
    hosts.start(2)
    differs = rf"model\.path: {hosts.apart / 'model'} on node {hosts.addresses[2]}, where actor_infer loads it, is not what it is on"
    run.until(lambda: run.says(rf"actor_infer\[1\].* is not started again: .*{differs}"))
    run.trains(2)
    assert not run.says(RETURNED)
    run.ends(lost_engines=1)
