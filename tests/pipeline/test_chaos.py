"""Chaos mode: the plan follows its seed, and its faults reach real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from cluster_workers import Adder

from roll_lite.config.schema.run import ChaosConfig
from roll_lite.distributed.cluster import ClusterSpec, RankFailed, start_cluster
from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.rank_group import WATCH
from roll_lite.pipeline import chaos as module
from roll_lite.pipeline.chaos import Chaos, check_cuts, faults, strike

strike_here: Any = strike._function  # type: ignore[attr-defined]


@pytest.fixture
def processes() -> Iterator[list[psutil.Process]]:
    """One with a child."""
    code = "import subprocess; subprocess.run(['sleep', '100'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        parent = psutil.Process(process.pid)
        while not (children := parent.children()):
            time.sleep(0.01)
        yield [parent, *children]
        for one in [*children, parent]:
            with suppress(psutil.Error):
                one.kill()


@pytest.mark.parametrize(("draw", "victim"), [(0.1, 0), (0.9, 1)])
def test_a_process_or_one_that_it_started_is_struck(processes: list[psutil.Process], draw: float, victim: int) -> None:
    strike_here(Place("node", processes[0].pid), "stop", draw, 0.0)
    deadline = time.monotonic() + 10
    while processes[victim].status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    assert processes[1 - victim].status() != psutil.STATUS_STOPPED
    processes[victim].resume()
    before = time.monotonic()
    strike_here(Place("node", processes[0].pid), "slow", draw, 0.5)
    assert time.monotonic() - before >= 0.5
    while processes[victim].status() == psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "it runs on afterwards"
    strike_here(Place("node", processes[0].pid), "kill", draw, 0.0)
    assert processes[victim].wait(10) is not None or not processes[victim].is_running()
    strike_here(Place("node", 2**22 + 1), "kill", draw, 0.0)  # it has ended


def test_the_plan_follows_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, struck = 0.0, list[Any]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "on", lambda node, task: SimpleNamespace(remote=lambda *what: struck.append(what)))
    names = {"actor_infer": 2, "actor_train": 1, "judges.main": 1, "replay": 1}
    groups = [
        SimpleNamespace(
            name=name,
            started=True,
            lost={1: "dead"} if name == "actor_infer" else {},
            pulses=[SimpleNamespace(place=Place("ab" * 28, rank)) for rank in range(ranks)],
        )
        for name, ranks in names.items()
    ]
    monkeypatch.setattr(module.WATCH, "groups", groups)

    def plan(**settings: Any) -> list[str]:
        nonlocal now
        now, said = 0.0, list[str]()
        chaos = Chaos(ChaosConfig(every_s=10.0, **settings), said.append)
        for second in range(1000):
            now = float(second)
            chaos.tick()
        return said

    first = plan(targets=["actor_infer", "actor_train", "judges"], actions={"kill": 1.0, "slow": 1.0})
    assert 60 < len(first) < 140 and first == plan(targets=["actor_infer", "actor_train", "judges"], actions={"kill": 1.0, "slow": 1.0})
    assert {line.split(",")[0] for line in first} == {
        f"chaos: {action} of {role} rank 0" for action in ("kill", "slow") for role in ("actor_infer", "actor_train", "judges.main")
    }
    assert plan(targets=["critic"]) == [] and len(plan(most=3)) == 3
    assert plan(seed=1) != plan(seed=0)


def test_time_and_kind_of_faults_do_not_depend_on_who_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "on", lambda node, task: SimpleNamespace(remote=lambda *what: None))
    pulses = [SimpleNamespace(place=Place("ab" * 28, rank)) for rank in range(3)]
    group = SimpleNamespace(name="actor_infer", started=True, lost={}, pulses=pulses)
    monkeypatch.setattr(module.WATCH, "groups", [group])

    def plan(lost: Callable[[float], Sequence[int]]) -> list[tuple[float, str]]:
        nonlocal now
        now, said = 0.0, list[tuple[float, str]]()
        chaos = Chaos(ChaosConfig(every_s=10.0, actions={"kill": 1.0, "slow": 1.0}), lambda text: said.append((now, text.split()[1])))
        for second in range(400):
            now = float(second)
            group.lost = dict.fromkeys(lost(now), "dead")
            chaos.tick()
        return said

    quiet = plan(lambda now: [])
    assert plan(lambda now: [0] if int(now) % 3 else [1, 2]) == quiet and {action for _, action in quiet} == {"kill", "slow"}
    assert plan(lambda now: range(3) if now < 200 else []) == [fault for fault in quiet if fault[0] >= 200]


def test_a_table_that_ray_does_not_give_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered() -> None:
        raise ray.exceptions.RaySystemError("the head is busy")

    now, said = 0.0, list[str]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "member_places", unanswered)
    chaos = Chaos(ChaosConfig(targets=["rewards"]), said.append)
    now = 1000.0
    chaos.tick()
    assert said == []


def test_only_nodes_without_driver_and_head_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now, struck = 0.0, list[Any]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "nodes_never_cut", lambda: {"driver", "head"})
    monkeypatch.setattr(module, "on", lambda node, task: SimpleNamespace(remote=lambda *what: struck.append((node, what[1], what[3]))))
    pulses = [SimpleNamespace(place=Place(node, 1, f"10.0.0.{number}")) for number, node in enumerate(("driver", "head", "third"))]
    monkeypatch.setattr(module.WATCH, "groups", [SimpleNamespace(name="actor_infer", started=True, lost={}, pulses=pulses)])
    said: list[str] = []
    chaos = Chaos(ChaosConfig(actions={"cut": 1.0, "kill": 1.0}, every_s=1.0, cut_s=7.0), said.append)
    for second in range(100):
        now = float(second)
        chaos.tick()
    assert {one for one in struck if one[1] == "cut"} == {
        ("third", "cut", 7.0)
    } and "chaos: cut of actor_infer rank 2, its node 10.0.0.2 for 7 s" in said
    assert {node for node, action, _ in struck if action == "kill"} == {"driver", "head", "third"}


def test_nodes_that_cannot_be_cut_off_are_told_with_the_remedy(ray_local: object, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert module.nodes_never_cut() == {here}
    check_cuts(None, [])
    check_cuts(ChaosConfig(), [])
    cuts = ChaosConfig(actions={"cut": 1.0})
    with pytest.raises(ValueError, match="chaos.actions: cut: the driver's node is never cut off, and the run has no other"):
        check_cuts(cuts, [])
    why: Any = module.why_uncut._function  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "TRY_CUT", "no-such-program rule")
    assert "no-such-program: not found" in why()
    task = SimpleNamespace(remote=lambda: ray.put("sh: 1: ip: not found"))
    monkeypatch.setattr(module, "on", lambda node, _: task)
    with pytest.raises(
        ValueError, match=r"node \S+ cannot be cut off \(sh: 1: ip: not found\). Install iproute2 there and start its Ray as root"
    ):
        check_cuts(cuts, [here])


class RewardWorker:
    def place(self) -> Place:
        return Place.here()


def test_reward_workers_are_known_and_killed_though_the_service_starts_them(ray_local: object) -> None:
    before = {place.pid for _, _, place in module.member_places()}
    workers = [ray.remote(RewardWorker).options(num_cpus=0).remote() for _ in range(2)]
    places = [ray.get(worker.place.remote()) for worker in workers]
    found = {(role, place.address, place.pid) for role, _, place in module.member_places() if place.pid not in before}
    assert found == {("rewards", place.address, place.pid) for place in places}
    said: list[str] = []
    chaos = Chaos(ChaosConfig(every_s=1e-3, targets=["rewards"], most=1 + len(before)), said.append)
    deadline = time.monotonic() + 30
    while all(psutil.pid_exists(place.pid) for place in places):
        time.sleep(0.1)
        chaos.tick()
        assert time.monotonic() < deadline
    assert all(line.startswith("chaos: kill of rewards rank") for line in said)


def test_a_rank_is_killed_while_the_driver_waits(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(1)), Adder)
    cluster.all(Adder.place)
    said: list[str] = []
    with (
        faults(ChaosConfig(every_s=0.5, most=1), said.append),
        pytest.raises(RankFailed, match="actor_train rank 0 failed in sleep: its process"),
    ):
        cluster.all(Adder.sleep, 60.0)
    assert len(said) == 1 and "chaos" not in WATCH.errands
