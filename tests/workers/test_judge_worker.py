"""Judges of the run's own: addresses, arguments, and the real vLLM server with the tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from roll_lite.config.schema.domains import RewardConfig, RewardTermConfig
from roll_lite.config.schema.models import JudgeServerConfig, VllmStrategyConfig
from roll_lite.data.samples import RewardInput
from roll_lite.distributed.cluster import Cluster
from roll_lite.distributed.failures import FleetDown, MemberLost
from roll_lite.distributed.fleet import Fleet, Policy
from roll_lite.distributed.strategy.vllm.compat import judge_server
from roll_lite.distributed.worker import reserve_port
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.registry import build_reward
from roll_lite.workers import judge
from roll_lite.workers.judge import JudgeAddress, JudgeServer, JudgeWorker, with_addresses

TINY = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny"
ARGS = {
    "server": "main",
    "api": "completions",
    "template": "{prompt}{response}",
    "pattern": "^.*?(7|$)",
    "choices": {"7": 1, "": 0},
    "max_tokens": 32,
}


def config(**changes: Any) -> JudgeServerConfig:
    strategy = VllmStrategyConfig(max_model_len=64, max_running_requests=16)
    return JudgeServerConfig(**{"path": TINY, "dtype": "float32", "strategy": strategy, **changes})


def test_rewards_and_terms_get_the_addresses_of_the_judges_that_they_name() -> None:
    address = JudgeAddress.of([JudgeAddress((f"http://h:{port}/v1",), "main") for port in (1, 2)])
    terms = [RewardTermConfig(name="judge", args={"server": "main"}), RewardTermConfig(name="length")]
    reward = with_addresses(RewardConfig(name="judge", args={"server": "main", "asks": 3}, terms=terms), {"main": address})
    known = {"url": ["http://h:1/v1", "http://h:2/v1"], "model": "main"}
    assert reward.args == {"server": "main", "asks": 3, **known}
    assert [term.args for term in reward.terms] == [{"server": "main", **known}, {}]
    other = RewardConfig(name="judge", args={"url": "http://x/v1", "model": "m"})
    assert with_addresses(other, {"main": address}) == other


def test_a_reserved_port_is_the_servers_and_nobody_elses() -> None:
    held = reserve_port("127.0.0.1")
    port = held.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    for _ in range(2):  # and again, after the server has died
        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            server.accept()[0].close()
    held.close()


def test_the_servers_arguments() -> None:
    from roll_lite.distributed.strategy.vllm.compat.judge_server import command

    given = VllmStrategyConfig(engine_args={"reasoning_parser": "qwen3", "hf_overrides": {"a": 1}, "enable_prefix_caching": False})
    words = command(config(strategy=given), "127.0.0.1", 80, "main", cuda=False)
    for flag, value in (("--port", "80"), ("--reasoning-parser", "qwen3"), ("--hf-overrides", '{"a": 1}'), ("--served-model-name", "main")):
        assert words[words.index(flag) + 1] == value
    assert "--enforce-eager" in words and "--no-enable-prefix-caching" in words and "--gpu-memory-utilization" not in words
    on_gpus = command(config(strategy=VllmStrategyConfig(tensor_parallel=2)), "h", 1, "main", cuda=True)
    assert "--gpu-memory-utilization" in on_gpus and "mp" in on_gpus and "--no-enforce-eager" in on_gpus


def test_what_a_judge_does_not_get_as_it_was_set_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from roll_lite.distributed.strategy.vllm.compat.judge_server import command

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    strategy = VllmStrategyConfig(max_model_len=64, max_batched_tokens=16, max_running_requests=16)
    words = command(config(strategy=strategy), "127.0.0.1", 80, "main", cuda=False)
    assert words[words.index("--max-num-batched-tokens") + 1] == "64"
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in told] == ["judges.main"] * 2
    assert "max_batched_tokens is 64 instead of 16" in told[0] and "VLLM_WORKER_MULTIPROC_METHOD=fork is set to 'spawn'" in told[1]


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


async def test_a_server_that_dies_is_started_again_at_its_address_until_its_restarts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet around a process that answers as the real server does where it is asked for its health."""
    monkeypatch.setattr(judge_server, "command", lambda _, host, port, *__: [sys.executable, "-c", HEALTHY, host, str(port)])
    monkeypatch.setattr(judge.ray, "nodes", lambda: [{"Alive": True}])
    server, ends = JudgeServer("main", config(restarts=1)), asyncio.Queue[FleetDown]()
    servers = Fleet("judges.main", [server], Policy(60.0, 1, attempts=1, path="judges.main"), down=ends.put_nowait)
    await servers.start()
    address = server.address
    try:
        async with asyncio.timeout(60):
            for restarts in (0, 1):
                assert servers.replaced == restarts and server.process is not None
                victim = psutil.Process(server.process.pid)
                victim.kill()
                if restarts == 0:
                    while servers.replaced == 0:  # noqa: ASYNC110 (nobody else waits for that)
                        await asyncio.sleep(0.05)
                    assert server.address == address
            end = await ends.get()
        assert str(end) == "the judge's server died (exit code -9) (after 1 restarts within an hour, judges.main.restarts)"
    finally:
        servers.close()
        server.close()


async def test_a_server_keeps_the_address_of_the_lost_one_unless_it_is_on_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge.ray, "nodes", lambda: [{}])
    lost, server = JudgeServer("main", config()), JudgeServer("main", config())
    own, before = server.address, lost.address
    await server.take_over(JudgeAddress(("http://10.0.0.9:80/v1",), "main"))
    assert server.address == own != before
    lost.close()
    await server.take_over(before)
    assert server.address == before
    server.close()


async def test_a_server_that_ends_while_it_starts_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_server, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(judge.ray, "nodes", lambda: [{"Alive": True}])
    server = JudgeServer("main", config())
    with pytest.raises(MemberLost, match="the judge's server ended with exit code 3 while it started; see the root cause above"):
        await Fleet("judges.main", [server], Policy(60.0)).start()
    assert server.process is None
    server.close()


@pytest.mark.usefixtures("ray_local")
async def test_a_server_that_lives_and_does_not_answer_is_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(judge, "SILENCE_SECONDS", 1.0)
    server = JudgeServer("main", config())
    server.process = subprocess.Popen(["sleep", "100"], start_new_session=True)  # noqa: ASYNC220
    process = psutil.Process(server.process.pid)
    assert await server.until_lost() == "the judge's server did not answer for 1 s"
    server.kill()
    server.kill()
    assert not process.is_running()
    server.close()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.usefixtures("ray_local")
async def test_the_real_server_judges_comes_back_after_its_death_and_leaves_nothing(tmp: Path) -> None:
    from roll_lite.distributed.cluster import ClusterSpec, start_cluster
    from roll_lite.distributed.placement import anywhere

    servers = start_cluster(ClusterSpec("judges.main", anywhere(1), log_folder=tmp), JudgeWorker, config(restarts=1))
    try:
        servers.all(JudgeWorker.initialize)
        address = JudgeAddress.of(servers.all(JudgeWorker.address))
        reward = build_reward(with_addresses(RewardConfig(name="judge", args=ARGS), {"main": address})).base
        sample = RewardInput("toy", "45+25=", "70", "70", {}, "stop")
        score = await reward.score(sample)
        assert score.value in (0.0, 1.0)
        assert score.details["extracted"] in ("7", "")

        wrong = build_reward(RewardConfig(name="judge", args={**ARGS, "api": "chat", "url": list(address.urls), "model": "main"})).base
        with pytest.raises(RewardFailed, match=r"/v1/chat/completions answered 400 Bad Request: .*chat template"):
            await wrong.score(sample)
        unknown = build_reward(RewardConfig(name="judge", args={**ARGS, "url": list(address.urls), "model": "other"})).base
        with pytest.raises(RewardFailed, match="answered 404 Not Found: .*`other` does not exist"):
            await unknown.score(sample)

        before = server_process(servers)
        family = [psutil.Process(before), *psutil.Process(before).children(recursive=True)]
        os.kill(before, signal.SIGKILL)
        again = build_reward(with_addresses(RewardConfig(name="judge", args={**ARGS, "template": "{response}"}), {"main": address})).base
        assert (await until_scored(again, sample)) in (0.0, 1.0)
        deadline = time.monotonic() + 10  # it serves a moment before the fleet sees that
        while servers.one(JudgeWorker.restarts) == 0 and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert servers.one(JudgeWorker.restarts) == 1
        after = server_process(servers)
        assert after != before
        assert running(family) == []
        family = [psutil.Process(after), *psutil.Process(after).children(recursive=True)]
    finally:
        servers.shutdown()
    assert running(family) == []


def server_process(servers: Cluster[JudgeWorker]) -> int:
    pid: int = ray.get(servers.actors[0].__ray_call__.remote(lambda worker: worker._server.process.pid))
    return pid


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Of these, half a minute later at most. What has ended but was adopted by a Ray worker stays a zombie until the worker ends."""
    deadline = time.monotonic() + 30
    while (left := [one for one in processes if lives(one)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_scored(reward: Any, sample: RewardInput) -> float:
    import asyncio

    for _ in range(400):
        try:
            return (await reward.score(sample)).value
        except RewardFailed as failure:
            assert "cannot be reached" in failure.cause, failure.cause
            await asyncio.sleep(0.5)
    raise AssertionError("the server did not come back")
