"""Runs over hosts that share no disk: what would be lost, or differs between them, is told before anything loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support_hosts import Hosts
from support_hosts import hosts as start_hosts

from roll_lite.pipeline.checkpoint_files import LIST_FILE, finished_checkpoints, read_list

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples/models/tiny"
SETTINGS = [
    *("steps=2", "rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "validation=null", "batches.write=always"),
    *("placement={nodes: 2, devices_per_node: 2}", "actor_infer.devices=[0]"),
]
ON_THREE = [
    *("placement={nodes: 3, devices_per_node: 2}", "actor_train.devices=[0, 1, 2, 3]", "actor_train.strategy.tensor_parallel=2"),
    "actor_infer.devices=[4, 5]",
]
"""Two data-parallel pairs of tensor-parallel ranks on a host each, and two engines on the third host."""
ON_BOTH, ON_THE_OTHER = "actor_train.devices=[1, 2]", "actor_train.devices=[2]"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts(3) as found:
        yield found


def run(hosts: Hosts, run_dir: Path, *settings: str, imports: str = "") -> tuple[int, str, Path]:
    """Exit code, what it said, and the run's folder. `imports`: folder of modules for the configuration."""
    command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_grpo", f"run_dir={run_dir}", *SETTINGS, *settings]
    environment = hosts.environment | {"PYTHONPATH": os.pathsep.join(filter(None, [imports, os.environ.get("PYTHONPATH", "")]))}
    done = subprocess.run(
        hosts.on_first(command), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout, (run_dir / "latest").resolve()


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", [ON_BOTH, pytest.param(ON_THE_OTHER, marks=pytest.mark.nightly)])
def test_a_checkpoint_that_ranks_would_write_to_another_disk_is_refused_at_the_start(hosts: Hosts, trainer: str) -> None:
    code, output, folder = run(hosts, hosts.apart / "runs", trainer, "checkpoint.every=1")
    assert code == 1
    here, there, _ = hosts.addresses
    assert f"run_dir: {folder} is not one folder on all nodes: on {there}, where actor_train runs, it is not there." in output
    assert f"driver on {here}: checkpoints. " in output and "or do without: checkpoint.every=0" in output
    assert not files_below(hosts.apart_there), "no rank has started"


@pytest.mark.nightly
def test_without_checkpoints_everything_is_in_the_drivers_folder(hosts: Hosts) -> None:
    code, output, folder = run(hosts, hosts.apart / "runs", ON_THE_OTHER, "actor_train.lora={export: merged}")
    assert code == 0, output
    assert files_below(folder / "start" / "adapters") == {"adapter_model.safetensors", "adapter_config.json"}
    with safe_open(folder / "model" / "model.safetensors", "pt") as exported, safe_open(TINY / "model.safetensors", "pt") as start:
        assert set(exported.keys()) == set(start.keys())
        assert any(not exported.get_tensor(name).equal(start.get_tensor(name)) for name in start.keys())  # noqa: SIM118
    assert files_below(TINY) <= files_below(folder / "model")
    assert f"run_dir: {hosts.addresses[1]} do not share {folder}" in output
    assert re.search(r"2 nodes, all with python 3\.\d+, torch .*:", output)
    assert re.search(rf"{hosts.addresses[1]} +actor_train .*GiB .*GiB .* s", output), output
    for step in (1, 2):
        assert files_below(folder / "batches" / f"step_{step:06d}") == {"rows_0000.parquet", "mini_batches.parquet", "step.json"}
    there = files_below(hosts.apart_there)
    assert there and all(file.endswith(".log") for file in there)
    assert f"actor_train-0.{hosts.addresses[1]}.log" in {path.name for path in (folder / "logs").iterdir()}, "logs come home"
    assert not list(folder.glob(".probe*"))
    where = {(entry["role"], entry["rank"]): entry["node"] for entry in json.loads((folder / "processes.json").read_text())}
    assert where["actor_train", 0] == hosts.addresses[1] and where["rollouts", 0] == hosts.addresses[0]


def test_a_run_over_three_hosts_writes_whole_checkpoints_where_they_share_the_folder(hosts: Hosts) -> None:
    code, output, folder = run(hosts, hosts.shared / "runs", *ON_THREE, "checkpoint.every=2")
    assert code == 0, output
    (checkpoint,) = finished_checkpoints(folder)
    listed = read_list(checkpoint)
    assert listed is not None and set(listed) | {LIST_FILE} == files_below(checkpoint)
    assert {f"actor_train/rank_0000{rank}.pt" for rank in range(4)} < set(listed)
    where = {(entry["role"], entry["rank"]): entry["node"] for entry in json.loads((folder / "processes.json").read_text())}
    places = [where["actor_train", rank] for rank in range(4)] + [where["actor_infer", engine] for engine in range(2)]
    assert places == [address for address in hosts.addresses for _ in range(2)]
    assert all(
        line["mismatch/mean"] < 1e-4 for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "time/step" in line
    )
    assert (folder / "model" / "model.safetensors").is_file()
    shutil.copytree(checkpoint, hosts.apart / "step_000002")
    code, output, _ = run(hosts, hosts.shared / "runs", *ON_THREE, "steps=3", f"checkpoint.resume={hosts.apart / 'step_000002'}")
    assert code == 1
    assert f"checkpoint.resume: {hosts.apart / 'step_000002'} on node {hosts.addresses[1]}, where actor_train loads it" in output


@pytest.mark.nightly
def test_with_a_store_ranks_on_both_hosts_save_and_go_on_without_a_shared_folder(hosts: Hosts) -> None:
    settings = [ON_BOTH, "checkpoint.every=1", "checkpoint.export_model=false", f"checkpoint.store=file://{hosts.shared}/store"]
    code, output, folder = run(hosts, hosts.apart / "runs", *settings)
    assert code == 0, output
    home = hosts.shared / "store" / folder.parent.name / folder.name
    whole = {f"actor_train/rank_0000{rank}.pt" for rank in (0, 1)}
    for own in (hosts.apart, hosts.apart_there):
        assert not whole <= files_below(own / "runs" / folder.parent.name / folder.name / "checkpoints" / "step_000002")
        shutil.rmtree(own / "runs")
    code, output, _ = run(hosts, hosts.apart / "runs", *settings, "steps=3", "checkpoint.resume=auto", "checkpoint.asynchronous=true")
    assert code == 0 and "resumed after step 2 from file://" in output, output
    assert [one.name for one in finished_checkpoints(home)] == ["step_000002", "step_000003"]
    for checkpoint in finished_checkpoints(home):
        listed = read_list(checkpoint)
        assert listed is not None and set(listed) | {LIST_FILE} == files_below(checkpoint) and whole < set(listed)


def test_other_weights_or_code_of_a_user_under_the_same_path_are_refused(hosts: Hosts) -> None:
    for place, least in ((hosts.apart, 2), (hosts.apart_there, 1)):
        shutil.copytree(ROOT / "examples/models/tiny", place / "model")
        (place / "users_filter.py").write_text(f"def keep(group):\n    return len(group) > {least}\n")
    weights = hosts.apart_there / "model" / "model.safetensors"
    weights.chmod(0o644)
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, weights, {"format": "pt"})
    settings = [ON_THE_OTHER, f"model.path={hosts.apart / 'model'}", "rollout.filter={name: users_filter.keep}"]
    code, output, _ = run(hosts, hosts.shared / "runs", *settings, imports=str(hosts.apart))
    assert code == 1
    here, there, _ = hosts.addresses
    assert (
        f"model.path: {hosts.apart / 'model'} on node {there}, where actor_train loads it, is not what it is on the driver's node {here}"
        in output
    )
    assert " and sha256 " in output and "config.json" not in output
    assert f"users_filter.keep: {hosts.apart / 'users_filter.py'} on node {there}" in output and "users_filter.py: sha256 " in output
