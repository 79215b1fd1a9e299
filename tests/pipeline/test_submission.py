"""What `roll-lite submit` checks, uploads and asks of a job server, and what it says of one that does not take the run.

The server is a stand-in; tests/integration/test_submitted_run.py has a cluster.
"""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from roll_lite.cli import main

REWARD = "def score(sample, api_key=''):\n    return 1.0\n"
MINE = "defaults: [tiny_grpo, _self_]\ndomains: {add: {reward: {name: house_rules.score}}}\n"


@dataclass
class JobServer:
    """Stand-in for the job server of a Ray cluster."""

    version: tuple[int, Any] = (200, {"version": "4", "ray_version": "2.60.0"})
    taken: tuple[int, str] = (200, "")
    end: dict[str, Any] = field(default_factory=lambda: {"status": "SUCCEEDED", "driver_exit_code": 0})
    interrupts: bool = False
    """Whether Ctrl-C arrives while the log is followed."""
    address: str = ""
    uploaded: list[bytes] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)

    async def tell_version(self, request: web.Request) -> web.Response:
        return web.json_response(self.version[1], status=self.version[0])

    async def take_package(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        self.uploaded.append(await request.read())
        return web.Response()

    async def take_job(self, request: web.Request) -> web.Response:
        self.jobs.append(await request.json())
        status, text = self.taken
        name = self.jobs[-1].get("submission_id") or "raysubmit_1"
        return web.json_response({"job_id": name, "submission_id": name}) if status == 200 else web.Response(status=status, text=text)

    async def show(self, request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/logs/tail"):
            return web.json_response({"type": "SUBMISSION", "entrypoint": "", "submission_id": request.match_info["job"], **self.end})
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str("step 1\n")
        if self.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert (await socket.receive()).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)
        await socket.close()
        return socket

    @contextmanager
    def running(self) -> Iterator[JobServer]:
        app = web.Application()
        app.router.add_get("/api/version", self.tell_version)
        app.router.add_route("*", "/api/packages/{protocol}/{name}", self.take_package)
        app.router.add_post("/api/jobs/", self.take_job)
        app.router.add_get("/api/jobs/{job}{rest:.*}", self.show)
        loop, runner = asyncio.new_event_loop(), web.AppRunner(app, shutdown_timeout=1.0)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        loop.run_until_complete(site.start())
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


@pytest.fixture
def server() -> Iterator[JobServer]:
    with JobServer().running() as one:
        yield one


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a user's configuration and reward."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "house_rules", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # of another cluster
    folder = tmp_path / "mine"
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "mine.yaml").write_text(MINE)
    (folder / "house_rules.py").write_text(REWARD)
    monkeypatch.chdir(folder)
    return folder


def submit(*arguments: str, address: str = "http://127.0.0.1:1") -> int:
    return main(["submit", "--config-name", "mine", "--config-path", "conf", "--address", address, "run_dir=/shared/runs", *arguments])


def test_the_job_gets_the_users_files_and_the_same_settings(
    server: JobServer, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE", "of_here")
    (folder / "runs" / "old").mkdir(parents=True)
    (folder / "runs" / "old" / "model.bin").write_text("large")
    (folder / ".rayignore").write_text("*.parquet\n")
    (folder / "all.parquet").write_text("large")
    secret = "domains.add.reward.args.api_key=it's a $ecret"
    given = ["experiment=${oc.env:JUDGE}", secret, "checkpoint.on_sigterm_s=90.5"]
    assert submit(*given, "--env", "JUDGE", "--name", "first", address=server.address) == 0
    (job,) = server.jobs
    assert job["submission_id"] == "first"
    assert "ecret" not in job["entrypoint"]
    variables = job["runtime_env"]["env_vars"]
    assert variables["JUDGE"] == "of_here"
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "150", "a stopped run has the time that it may take for saving its state"
    show = f"{shlex.quote(sys.executable)} -c 'import sys; print(sys.argv[1:])' "
    line = job["entrypoint"].replace("exec roll-lite ", show)
    seen = subprocess.run(line, shell=True, env=variables, capture_output=True, text=True, check=True).stdout.strip()
    assert seen == str(["run", "--config-name", "mine", "--config-path", "conf", "run_dir=/shared/runs", *given])
    with zipfile.ZipFile(io.BytesIO(server.uploaded[0])) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
    assert files == {"conf/mine.yaml", "house_rules.py", ".rayignore"}
    out = capfd.readouterr().out
    for command in ("logs -f", "status", "stop"):
        assert f"ray job {command} --address {server.address} first\n" in out


def test_files_of_the_cluster_are_looked_for_there(server: JobServer) -> None:
    there = ["model.path=/of/the/cluster", "domains.make.data.train=/of/the/cluster.jsonl", "checkpoint.resume=/of/the/cluster/latest"]
    judge = ["judges={big: {path: /of/the/cluster/judge, devices: 1}}", "domains.make.reward={name: judge, args: {server: big}}"]
    model = ["reward_models={rm: {path: /of/the/cluster/rm, devices: 1}}", "domains.repeat.reward={name: model, args: {model: rm}}"]
    assert submit(*there, *judge, *model, address=server.address) == 0
    assert len(server.jobs) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["stepps=2"], "stepps = 2: unknown key; did you mean 'steps'?"),
        (["domains.add.reward.name=house_rules.nothing"], "house_rules"),
        (["model.path=???"], "model.path: has to be given, for example on the command line: model.path=..."),
        (["run_dir=runs"], 'run_dir = "runs": would be in the job\'s copy of the current folder, which Ray deletes'),
        (["~run_dir"], 'run_dir = "runs": would be in'),
        (["checkpoint.resume=runs/latest"], 'checkpoint.resume = "runs/latest": would be in'),
        (["domains.add.data.train=../add.jsonl"], 'domains.add.data.train = "../add.jsonl": leads out of the current folder'),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(
    given: list[str], said: str, server: JobServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert submit(*given, address=server.address) == 2
    assert said in capfd.readouterr().err
    assert not server.uploaded and not server.jobs


@pytest.mark.parametrize("resume", ["auto", "s3://bucket/runs/first"])
def test_a_home_folder_of_the_cluster_and_a_url_are_no_relative_paths(server: JobServer, resume: str) -> None:
    assert submit("run_dir=~/runs", f"checkpoint.resume={resume}", address=server.address) == 0


def test_a_configuration_elsewhere_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "other.yaml").write_text("defaults: [tiny_grpo, _self_]\n")
    assert main(["submit", "--config-name", "other", "--config-path", "..", "run_dir=/shared/runs"]) == 2
    assert "--config-path" in (said := capfd.readouterr().err) and "change to one that holds it" in said


def test_a_shipped_configuration_needs_no_file(server: JobServer) -> None:
    assert main(["submit", "--config-name", "tiny_grpo", "--address", server.address, "run_dir=/shared/runs"]) == 0
    assert server.jobs[0]["entrypoint"] == "exec roll-lite run --config-name tiny_grpo --config-path . run_dir=/shared/runs"


def test_a_variable_that_is_not_set_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        submit("--env", "OF_NOBODY")
    assert stopped.value.code == 2
    assert "OF_NOBODY is not set here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"version": (401, {})}, "asks for a token: put what `ray get-auth-token` prints on the head node into ~/.ray/auth_token here"),
        ({"version": (404, {})}, "no Ray job server answers at"),
        ({"version": (200, {"ray_version": "2.40.0"})}, "did not take the run: Ray 2.40.0 is not supported: 2.60 up to below"),
        (
            {"taken": (500, "Traceback (most recent call last):\n  File ...\nValueError: Job with submission_id a already exists.\n")},
            "did not take the run: ValueError: Job with submission_id a already exists",
        ),
    ],
    ids=["token", "no ray", "version", "name"],
)
def test_a_server_that_takes_no_run_is_told_in_one_line(answers: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with JobServer(**answers).running() as server:
        assert submit(address=server.address) == 2
        (line,) = [line for line in capfd.readouterr().err.splitlines() if server.address in line]
        assert said in line


def test_no_server_is_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert submit() == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("no Ray job server answers at http://127.0.0.1:1 (--address, http://HOST:PORT): [Errno 111] Connection refused;")
    assert "pip install 'ray[default]'" in line


def test_packages_that_are_missing_here_are_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "roll_lite.pipeline.submission", None)
    assert submit() == 2
    assert 'pip install "roll_lite[jobs]"' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"status": "SUCCEEDED", "driver_exit_code": 0}, 0),
        ({"status": "FAILED", "driver_exit_code": 75}, 75),
        ({"status": "FAILED", "driver_exit_code": None, "message": "no node has it"}, 1),
        ({"status": "STOPPED", "driver_exit_code": None, "message": "stopped"}, 130),
    ],
)
def test_who_follows_gets_the_runs_output_and_exit_code(end: dict[str, Any], code: int, capfd: pytest.CaptureFixture[str]) -> None:
    with JobServer(end=end).running() as server:
        assert submit("--follow", address=server.address) == code
    out, error = capfd.readouterr()
    assert out.endswith("step 1\n")
    assert end.get("message", "") in error


@pytest.mark.usefixtures("signals_arrive")
def test_ctrl_c_ends_only_the_following(capfd: pytest.CaptureFixture[str]) -> None:
    with JobServer(interrupts=True).running() as server:
        assert submit("--follow", address=server.address) == 130
    assert "no longer following raysubmit_1, which goes on" in capfd.readouterr().err
