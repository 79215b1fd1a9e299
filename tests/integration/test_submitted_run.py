"""`roll-lite submit` with a cluster's job server: a run with a user's files from begin to end; one that is stopped, and goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ray.dashboard.utils import get_dashboard_dependency_error

from roll_lite.distributed import session_guard

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(590),
    pytest.mark.skipif(get_dashboard_dependency_error() is not None, reason="ray[default] is not installed, which has the job server"),
]
SECONDS = 200.0
BIN = Path(sys.executable).parent
MINE = """
defaults: [tiny_grpo, _self_]
domains: {add: {data: {train: data/add.jsonl}, reward: {name: house_rules.score}}}
validation: {enabled: false}
"""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    return kept | {"PATH": f"{BIN}:{kept['PATH']}", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", **more}


def free_ports(count: int) -> list[int]:
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of the job server of a cluster of one node, which is started as a user would."""
    mark, folder = uuid.uuid4().hex, Path(f"/tmp/t-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    dashboard, agent, client = free_ports(3)
    ports = [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}", "--port=0"]
    start = [BIN / "ray", "start", "--head", *ports, f"--temp-dir={folder}", "--num-cpus=4", "--object-store-memory=200000000"]
    try:
        subprocess.run(start, env=environment(**{session_guard.MARK: mark}), check=True, capture_output=True, timeout=120, cwd="/")
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        session_guard.end_processes(mark, folder, grace_s=0.0)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def submit(server: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Command in a folder of a user with a configuration, data and a reward, none of which the cluster has."""
    mine = folder / "mine"
    (mine / "data").mkdir(parents=True, exist_ok=True)
    (mine / "mine.yaml").write_text(MINE)
    (mine / "house_rules.py").write_text("def score(sample):\n    return 0.25\n")
    (mine / "data/add.jsonl").write_text('{"prompt": "45+25=", "answer": "70"}\n' * 64)
    command = [sys.executable, "-m", "roll_lite.cli", "submit", "--config-name", "mine", f"run_dir={folder}/runs", "--address", server]
    return subprocess.run([*command, *more], cwd=mine, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)


def summary(folder: Path) -> dict[str, object]:
    file = folder / "runs/latest/summary.json"
    return json.loads(file.read_text()) if file.exists() else {"steps": 0}


def test_a_submitted_run_has_its_users_files_and_is_followed_to_its_end(server: str, tmp: Path) -> None:
    done = submit(server, tmp, "steps=2", "--follow", "--name", "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 steps in" in done.stdout
    assert (summary(tmp)["exit"], summary(tmp)["steps"]) == ("completed", 2)
    assert (tmp / "runs/latest/model/model.safetensors").is_file()
    samples = [json.loads(line) for line in (tmp / "runs/latest/samples/step_000001.jsonl").read_text().splitlines()]
    assert {sample["score"] for sample in samples if sample["domain"] == "add"} == {0.25}
    assert not (tmp / "mine/runs").exists()


def test_a_stopped_job_saves_its_state_and_the_same_command_goes_on(server: str, tmp: Path) -> None:
    settings = ["checkpoint.every=1000", "checkpoint.resume=auto"]
    assert submit(server, tmp, *settings, "steps=300", "--name", "stopped").returncode == 0
    deadline = time.monotonic() + SECONDS
    while not summary(tmp)["steps"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    stop = [BIN / "ray", "job", "stop", "--address", server, "stopped"]
    subprocess.run(stop, env=environment(), check=True, capture_output=True, timeout=SECONDS)
    end = summary(tmp)
    (checkpoint,) = (tmp / "runs/latest/checkpoints").iterdir()
    assert (end["exit"], checkpoint.name) == ("interrupted", f"step_{end['steps']:06}")
    folder = (tmp / "runs/latest").resolve()
    done = submit(server, tmp, *settings, f"steps={end['steps'] + 1}", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp / "runs/latest").resolve() == folder and summary(tmp)["exit"] == "completed"
