"""An existing Ray cluster of two nodes with (pretended) GPUs: attaching, placing workers, leaving without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_ray_session import running_driver, wait_until

from roll_lite.distributed import session_guard
from roll_lite.observability.report import write_summary

pytestmark = pytest.mark.slow

PLACING = """
import ray
from cluster_workers import Adder, Collective
from roll_lite.config.schema.run import PlacementConfig
from roll_lite.config.schema.run import (RayConfig)
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.placement import Placement, PlacementTimeout
from roll_lite.distributed.ray_session import ray_session

NAMES = ["CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "RANK"]

def where(cluster):
    return [tuple(found.values()) for found in cluster.all(Adder.environment, NAMES)]

with ray_session(RayConfig(), None) as session:
    assert not session.started
    place = Placement({"actor_train": 4, "actor_infer": 4, "critic": [3]}, timeout_s=30)
    nodes = [place.devices[number].node for number in range(4)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3], nodes
    assert nodes[0] == ray.get_runtime_context().get_node_id(), "the driver's node comes first"
    train = start_cluster(ClusterSpec("actor_train", place.slots("actor_train")), Adder)
    assert where(train) == [("0", "0", "0"), ("1", "0", "1"), ("0", "0", "2"), ("1", "0", "3")], where(train)
    infer = start_cluster(ClusterSpec("actor_infer", place.slots("actor_infer", devices_per_worker=2)), Adder)
    assert where(infer) == [("0,1", "0", "0"), ("0,1", "0", "1")], where(infer)
    critic = start_cluster(ClusterSpec("critic", place.slots("critic")), Adder)
    assert where(critic) == [("1", "0", "0")], where(critic)
    try:
        Placement({"reference": 1}, timeout_s=1)
    except PlacementTimeout as error:
        assert "Wanted: 1 of 1 GPU each" in str(error) and "The cluster has 2 nodes with 4 GPUs" in str(error), error
    else:
        raise AssertionError("a fifth GPU was found")
    try:
        place.slots("actor_train", devices_per_worker=4)
    except ValueError as error:
        assert "needs them on one node" in str(error)
    else:
        raise AssertionError("an engine was spread over two nodes")
    (spanning,) = place.slots_by_node("actor_train", devices_per_worker=4)
    assert [slot.gpus for slot in spanning] == [("0", "1")] * 2, spanning
    assert [slot.strategy.placement_group_bundle_index for slot in spanning] == [place.devices[n].bundle for n in (0, 2)]
    for cluster in (train, infer, critic):
        cluster.shutdown()
    across = start_cluster(ClusterSpec("across", [place.slots("actor_train")[i] for i in (0, 2)]), Collective)
    assert across.all(Collective.reduce) == [2.0, 2.0]
    across.shutdown()
    place.release()
    told = PlacementConfig(nodes=2, devices_per_node=2)
    place = Placement({"actor_train": [0, 2], "actor_infer": [3]}, timeout_s=30, layout=told)
    nodes = {number: device.node for number, device in place.devices.items()}
    assert nodes[0] == ray.get_runtime_context().get_node_id() and nodes[0] != nodes[2] == nodes[3], nodes
    pinned = start_cluster(ClusterSpec("pinned", place.slots("actor_train")), Adder)
    assert len(where(pinned)) == 2
    pinned.shutdown()
    place.release()
    for layout in (PlacementConfig(nodes=3, devices_per_node=2), PlacementConfig(nodes=1, devices_per_node=3)):
        try:
            Placement({"actor_train": 3}, timeout_s=1, layout=layout)
        except PlacementTimeout as error:
            assert "the run wants" in str(error) and "the cluster has 2 nodes with 4 GPUs" in str(error), error
        else:
            raise AssertionError("a node was found that is not there")
    told = PlacementConfig(nodes=1, devices_per_node=2)
    place = Placement({"actor_train": 2}, timeout_s=30, layout=told)
    beside = Placement({"actor_train": 2}, timeout_s=30, layout=told)
    (node,), (other,) = ({device.node for device in one.devices.values()} for one in (place, beside))
    assert node != other, "both GPUs of the first node are busy"
    try:
        Placement({"actor_train": 1}, timeout_s=1, layout=told)
    except PlacementTimeout as error:
        assert "the cluster has 2 nodes with 4 GPUs" in str(error) and ", 0 of them free (" in str(error), error
    else:
        raise AssertionError("a fifth GPU was found")
    joining = start_cluster(ClusterSpec("joining", [*place.slots("actor_train")[:1], beside.later_slot(2)], initial_ranks=1), Adder)
    assert len(where(joining)) == 1 and list(joining.lost) == [1]
    asked = joining.actors[1].environment.remote(NAMES)
    assert not ray.wait([asked], timeout=1)[0], "it has no devices yet"
    beside.release()
    assert tuple(ray.get(asked, timeout=60).values()) == ("0,1", "0", "1")
    place.release()
print("placed")
"""

BLOCKS = """
import asyncio, os, time
import ray, torch
from roll_lite.config.schema.run import RayConfig
from roll_lite.data.proto import DataProto
from roll_lite.distributed.ray_session import ray_session
from roll_lite.scheduler.engines import Collected
from roll_lite.workers.infer import RemoteEngine
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote(num_cpus=0)
class Engine:
    def collect(self, most_blocks):
        return Collected([]), DataProto({"reward": torch.ones(1_000_000)})

    def lose_the_node(self):
        os.kill(os.getppid(), 9)

with ray_session(RayConfig(), None):
    here = ray.get_runtime_context().get_node_id()
    (there,) = (node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    engine = Engine.options(scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False)).remote()
    kept = []
    Collected.with_blocks = lambda self, blocks: kept.extend(blocks) or self
    asyncio.run(RemoteEngine("e", engine)._collect())
    time.sleep(2)
    engine.lose_the_node.remote()
    while any(node["Alive"] for node in ray.nodes() if node["NodeID"] == there):
        time.sleep(0.2)
    assert float(ray.get(kept[0], timeout=60).tensor("reward").sum()) == 1_000_000
print("kept")
"""

MOVING = """
import os, time
import ray
from cluster_workers import Adder
from ray.util.placement_group import placement_group_table
from roll_lite.config.schema.run import PlacementConfig, RayConfig
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.place import on_node
from roll_lite.distributed.placement import Placement
from roll_lite.distributed.ray_session import ray_session
from roll_lite.distributed.worker import AsyncWorker

class Engine(AsyncWorker):
    lives_alone = True

    async def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

def of_trainers():
    return [found["CUDA_VISIBLE_DEVICES"] for found in train.all(Adder.environment, ["CUDA_VISIBLE_DEVICES"])]

with ray_session(RayConfig(), None):
    here, jobs, elsewhere = ray.get_runtime_context().get_node_id(), {}, []
    while len(jobs) < 3:  # Ray chooses the node
        job = Placement({"other": 1}, timeout_s=30, layout=PlacementConfig(nodes=1, devices_per_node=1))
        if job.devices[0].node == here:
            jobs[job.devices[0].gpu] = job
        else:
            elsewhere.append(job)
    for job in elsewhere:
        job.release()
    place = Placement({"actor_train": 2, "actor_infer": 2}, timeout_s=30)
    train = start_cluster(ClusterSpec("actor_train", place.slots("actor_train")), Adder)
    infer = start_cluster(ClusterSpec("actor_infer", place.slots("actor_infer", devices_per_worker=2)), Engine)
    assert infer.each(Engine.gpus) == {0: of_trainers()}
    (there,) = {device.node for device in place.devices.values()}
    assert there != here and sorted(jobs) == ["GPU-a", "GPU-b", "GPU-c"], jobs
    for gpu in ("GPU-b", "GPU-c"):
        jobs[gpu].release()
    ray.remote(lambda: os.kill(os.getppid(), 9)).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node(there)).remote()
    while 0 not in infer.lost or there in placement_group_table(place.group)["bundles_to_node_id"].values():
        time.sleep(0.2)
    infer.group.replaceable.add(0)
    infer.group.restart(0)
    train.rebuild()
    moved = of_trainers()
    assert sorted(moved) == ["GPU-b", "GPU-c"], moved
    assert ray.get(infer.actors[0].gpus.remote(), timeout=60) == moved
print("moved")
"""


@contextmanager
def two_nodes(cpus: int, gpus: int, variables: Mapping[str, str] = {"RAY_AUTH_MODE": "disabled"}) -> Iterator[str]:
    """Started as a user would, in a folder of its own; ended by the mark that its processes carry. Its address."""
    mark, folder = uuid.uuid4().hex, Path(f"/tmp/t-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {session_guard.MARK: mark, "RAY_USAGE_STATS_ENABLED": "0", **variables}
    ray = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--num-cpus={cpus}",
        f"--num-gpus={gpus}",
        "--object-store-memory=100000000",
    ]
    try:
        head = [*ray, "--head", "--port=0", f"--temp-dir={folder}", "--include-dashboard=false"]
        subprocess.run(head, env=environment, check=True, capture_output=True, text=True, timeout=120)
        address = (folder / "ray_current_cluster").read_text().strip()
        subprocess.run([*ray, f"--address={address}"], env=environment, check=True, capture_output=True, text=True, timeout=120)
        yield address
    finally:
        session_guard.end_processes(mark, folder, grace_s=0.0)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture(scope="module")
def cluster_address() -> Iterator[str]:
    with two_nodes(cpus=2, gpus=2) as address:
        yield address


def actors_alive(address: str) -> int:
    """Asked from outside, by a driver of its own."""
    code = (
        "import sys, ray; from ray._private.state import actors\n"
        "ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')\n"
        "print(sum(actor['State'] == 'ALIVE' for actor in actors().values()), len(ray.nodes()))"
    )
    run = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=120, check=True)
    alive, nodes = run.stdout.split()
    assert nodes == "2", "the cluster is still whole"
    return int(alive)


def test_roles_are_placed_over_nodes_and_gpus(cluster_address: str, tmp_path: Path) -> None:
    """The cluster wants no token, and the user has one of another cluster."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("1" * 32)
    environment = {**os.environ, "RAY_ADDRESS": cluster_address, "PYTHONPATH": str(Path(__file__).parent), "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", PLACING], env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "placed"), run.stderr


@pytest.mark.nightly
def test_the_users_token_lets_a_run_in(tmp_path: Path) -> None:
    """A cluster asks for the token that its user had where it was started."""
    homes = {who: tmp_path / who for who in ("knows", "knows another", "does not know")}
    for who, home in homes.items():
        (home / ".ray").mkdir(parents=True)
        if who != "does not know":
            (home / ".ray" / "auth_token").write_text(("1" if who == "knows" else "2") * 32)
    code = (
        "import os; from roll_lite.config.schema.run import RayConfig; from roll_lite.distributed.ray_session import ray_session\n"
        "with ray_session(RayConfig(address=os.environ['CLUSTER']), None) as session: print(session.started)"
    )
    without = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    with two_nodes(1, 0, {"HOME": str(homes["knows"]), "RAY_AUTH_MODE": "token"}) as address:
        for who, home in homes.items():
            environment = {**without, "CLUSTER": address, "HOME": str(home)}
            run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert (run.stdout == "False\n") is (run.returncode == 0) is (who == "knows"), run.stderr
            assert who == "knows" or "put what `ray get-auth-token` prints on its head node into ~/.ray/auth_token here" in run.stderr


def test_token_blocks_outlive_the_node_of_their_engine() -> None:
    with two_nodes(cpus=1, gpus=0) as address:
        run = subprocess.run(
            [sys.executable, "-c", BLOCKS],
            env={**os.environ, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert run.returncode == 0 and run.stdout.endswith("kept\n"), run.stderr


def test_devices_that_move_to_another_node_get_its_free_gpus() -> None:
    """Another job has the first GPU there. Ray's GPUs have names there, as where `CUDA_VISIBLE_DEVICES` names them."""
    with two_nodes(cpus=2, gpus=3, variables={"RAY_AUTH_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}) as address:
        environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(Path(__file__).parent)}
        run = subprocess.run([sys.executable, "-c", MOVING], env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "moved"), run.stderr


@pytest.mark.parametrize("how", ["return", "kill"])
def test_a_run_takes_only_its_own_actors_with_it(cluster_address: str, tmp: Path, how: str) -> None:
    """A killed driver's run has failed, though Ray cleans up after it here."""
    (tmp / "run").mkdir()
    summary = write_summary(tmp / "run", domains=[], validation={}, steps=3, wall_s={"total": 1.0}, tokens={}, exit_state="running")
    with running_driver("sleep", tmp, cluster_address) as (bystander, _):
        with running_driver("sleep" if how == "kill" else how, tmp, cluster_address) as (driver, _):
            if how == "kill":
                assert actors_alive(cluster_address) == 2
                driver.kill()
            assert driver.wait(60) == (-9 if how == "kill" else 0)
        wait_until(lambda: actors_alive(cluster_address) == 1, seconds=60)
        time.sleep(1)
        assert bystander.poll() is None and actors_alive(cluster_address) == 1
        assert json.loads(summary.read_text())["exit"] == ("running" if how == "return" else "failed: the driver was killed")
        assert summary.parent.is_dir()
