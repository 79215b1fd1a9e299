"""Latency of a chat completion through an episode's endpoint, against the same request to vLLM's own server.

Both serve the shipped chat model with the same settings of the engine, and are asked in turns by the same client: so many requests at a
time, each a new conversation with a response of at most eight tokens. `ratio` is vLLM's median latency over ours.

    .venv/bin/python bench/endpoint.py [--rounds 4] [--requests 40] [--at-a-time 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
MODEL = "examples/models/tiny_chat"
START_S = 300.0


async def latencies(base_url: str, api_key: str, model: str, requests: int, seed: int) -> list[float]:
    """Seconds of each request, one after the other."""
    found = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        for number in range(requests):
            messages = [{"role": "user", "content": f"{seed % 97}+{number}="}]
            body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 1.0}
            started = time.perf_counter()
            async with client.post(f"{base_url}/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.json()
            found.append(time.perf_counter() - started)
    return found


async def agent(task: Any, endpoint: Any, requests: int, file: str) -> float:
    """Agent that asks so many times, and appends its latencies to a file."""
    found = await latencies(endpoint.base_url, endpoint.api_key, endpoint.model, requests, task.seed)
    with Path(file).open("a", encoding="utf-8") as lines:  # noqa: ASYNC230 (once per episode)
        lines.write(json.dumps(found) + "\n")
    return 1.0


def configuration(requests: int, at_a_time: int, file: Path) -> Any:
    from roll_lite.config.loading import load_config

    call = f"function: bench.endpoint.agent, args: {{requests: {requests}, file: {file}}}"
    environment = f"{{name: endpoint, {call}, max_turns: {requests}, turn_timeout_s: 60}}"
    sampling = "{max_prompt_tokens: 40, max_tokens: 60}"
    data = "{train: examples/data/add_train.jsonl}"
    domain = f"{{data: {data}, template: {{name: chat}}, sampling: {sampling}, environment: {environment}}}"
    return load_config(
        "tiny_base",
        ROOT / "examples" / "configs",
        [
            *("~domains.make", "~domains.repeat", "~domains.add.reward", f"model.path={MODEL}", f"domains.add={domain}"),
            *("rollout.prompts_per_step=1", f"rollout.samples_per_prompt={at_a_time}", "algorithm.advantage={name: reinforce}"),
            f"actor_infer.strategy.max_running_requests={at_a_time}",
        ],
    )


def server(port: int, at_a_time: int) -> subprocess.Popen[bytes]:
    from roll_lite.config.schema.models import JudgeServerConfig
    from roll_lite.distributed.strategy.inference.processes import HOST_PID
    from roll_lite.distributed.strategy.vllm.compat.judge_server import command
    from roll_lite.distributed.strategy.vllm.compat.settings import engine_environment

    strategy = {"name": "vllm", "max_running_requests": at_a_time}
    config = JudgeServerConfig.model_validate({"path": MODEL, "strategy": strategy, "dtype": "float32"})
    environment = os.environ | engine_environment(1, cuda=False).variables() | {HOST_PID: str(os.getpid())}
    return subprocess.Popen(command(config, "127.0.0.1", port, "policy", False), env=environment, stdout=subprocess.DEVNULL)


async def until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as client:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            try:
                await client.get(f"http://127.0.0.1:{port}/health", raise_for_status=True)
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)
            else:
                return


async def asked(port: int, requests: int, at_a_time: int) -> list[float]:
    url = f"http://127.0.0.1:{port}/v1"
    found = await asyncio.gather(*(latencies(url, "key", "policy", requests, 7 * number) for number in range(at_a_time)))
    return [seconds for one in found for seconds in one]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--at-a-time", type=int, default=1)
    chosen = parser.parse_args()
    os.chdir(ROOT)
    from rollout import Ours

    from roll_lite.config.schema.run import RayConfig
    from roll_lite.distributed.ray_session import ray_session

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mine: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, ray_session(RayConfig(), None):
        file = Path(scratch) / "latencies.jsonl"
        ours = Ours(configuration(chosen.requests, chosen.at_a_time, file), Path(scratch) / "samples")
        peer = server(port, chosen.at_a_time)
        try:
            asyncio.run(until_up(port, peer))
            for number in range(chosen.rounds + 1):
                ours.generate()
                own = [seconds for line in file.read_text().splitlines() for seconds in json.loads(line)]
                file.write_text("")
                others = asyncio.run(asked(port, chosen.requests, chosen.at_a_time))
                if number:  # the first round warms both sides up
                    mine += own
                    theirs += others
        finally:
            peer.terminate()
            peer.wait(60)
            ours.close()
    ours_ms, peer_ms = 1e3 * statistics.median(mine), 1e3 * statistics.median(theirs)
    report = {"name": "endpoint", "ours": round(ours_ms, 2), "peer": round(peer_ms, 2), "unit": "ms", "ratio": round(peer_ms / ours_ms, 3)}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
