"""Episodes per second against the same work driven straight at a bare engine by a plain asyncio script.

256 episodes at a time on the shipped tiny model, each of 8 turns, with a tool that takes 50 ms after every response. Ours answers with
lengths as the model chooses them; the bare engine then gets the very same turns, with those lengths prescribed, waits 50 ms after each,
and sends the longer prompt. Reported beside it: the CPU time of the rollout service and of the environment's worker per turn.

    .venv/bin/python bench/episodes.py [--rounds 4] [--prompts 32] [--samples 8]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
TURNS = 8
TOOL_S = 0.05
Turns = list[tuple[list[int], int]]
"""Tokens given before each response, and the response's length."""


async def sums(task: Any, policy: Any) -> float:
    """Environment: a sum in every turn, each after a tool's call."""
    for turn in range(TURNS):
        await policy.respond(f"{task.seed % 40 + turn}+{turn}=")
        await asyncio.sleep(TOOL_S)
    return 1.0


def configuration(prompts: int, samples: int) -> Any:
    from roll_lite.config.loading import load_config

    environment = f"{{name: function, function: bench.episodes.sums, max_turns: {TURNS}, max_turn_tokens: 12, turn_timeout_s: 30}}"
    data = "{train: examples/data/add_train.jsonl}"
    domain = f"{{data: {data}, sampling: {{max_prompt_tokens: 12, max_tokens: 200}}, environment: {environment}}}"
    return load_config(
        "tiny_base",
        ROOT / "examples" / "configs",
        [
            *("~domains.make", "~domains.repeat", f"domains.add={domain}"),
            *(f"rollout.prompts_per_step={prompts}", f"rollout.samples_per_prompt={samples}"),
            f"actor_infer.strategy.max_running_requests={prompts * samples}",
        ],
    )


def turns_of(ids: list[int], mask: list[bool]) -> Turns:
    runs = [(chosen, [token for token, _ in run]) for chosen, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])]
    return [(given, len(response)) for (_, given), (_, response) in zip(runs[0::2], runs[1::2], strict=True)]


class Ours:
    def __init__(self, config: Any, folder: Path) -> None:
        from rollout import Ours as Rollouts

        self._rollouts = Rollouts(config, folder)
        self._config = config

    def play(self) -> tuple[float, dict[str, float], list[Turns]]:
        """Seconds, CPU seconds by process, and the turns of each episode."""
        import numpy as np

        from roll_lite.distributed.dataflow import Batch
        from roll_lite.workers.rollout import RolloutWorker

        service = self._rollouts.rollouts.one(RolloutWorker.place).pid
        before, started = cpu_seconds(service), time.perf_counter()
        batch = self._rollouts.rollouts.one(RolloutWorker.next_batch, self._config.rollout.prompts_per_step, 1)
        seconds = time.perf_counter() - started
        cpu = {name: after - before[name] for name, after in cpu_seconds(service).items()}
        (shard,) = Batch(batch.rows, batch.blocks).shards([np.arange(len(batch.rows))], ["input_ids", "response_mask"])
        columns = shard.materialize()
        ids, masks = columns.ragged("input_ids"), columns.ragged("response_mask")
        return seconds, cpu, [turns_of(ids.row(row).tolist(), masks.row(row).tolist()) for row in range(len(columns))]

    def close(self) -> None:
        self._rollouts.close()


def cpu_seconds(service: int) -> dict[str, float]:
    """CPU seconds of the rollout service and of the environment's worker, a process of the same Ray node. `service`: its pid."""
    found = {}
    for process in [one for one in psutil.process_iter(["cmdline"]) if one.ppid() == psutil.Process(service).ppid()]:
        for name in ("RolloutWorker", "EnvironmentWorker"):
            if name in " ".join(process.info["cmdline"] or ()):
                found[name] = sum(process.cpu_times()[:2])
    return found


def bare_engine(arguments: dict[str, Any], pipe: Connection) -> None:
    """Run an engine in a process of its own, with one task per episode."""
    from roll_lite.distributed.strategy.vllm.compat.settings import engine_environment

    os.environ.update(engine_environment(1, cuda=arguments["enable_sleep_mode"]).variables())
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        loop = asyncio.get_running_loop()
        pipe.send("ready")
        while (work := await loop.run_in_executor(None, pipe.recv)) is not None:
            started = time.perf_counter()
            await asyncio.gather(*(episode(engine, f"{started}/{number}", turns) for number, turns in enumerate(work)))
            pipe.send(time.perf_counter() - started)
        engine.shutdown()

    async def episode(engine: AsyncLLM, name: str, turns: Turns) -> None:
        ids: list[int] = []
        for number, (given, length) in enumerate(turns):
            ids += given
            sampling = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0)
            async for output in engine.generate({"prompt_token_ids": list(ids)}, sampling, f"{name}/{number}"):
                if output.finished:
                    ids += output.outputs[0].token_ids
            await asyncio.sleep(TOOL_S)

    asyncio.run(serve())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    chosen = parser.parse_args()
    os.chdir(ROOT)
    from rollout import bare_arguments

    from roll_lite.config.schema.run import RayConfig
    from roll_lite.distributed.ray_session import ray_session

    config = configuration(chosen.prompts, chosen.samples)
    pipe, far_end = multiprocessing.get_context("spawn").Pipe()
    bare = multiprocessing.get_context("spawn").Process(target=bare_engine, args=(bare_arguments(config), far_end))
    rates: list[tuple[float, float]] = []
    spent: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, ray_session(RayConfig(), None):
        ours = Ours(config, Path(scratch))
        bare.start()
        assert pipe.recv() == "ready"
        try:
            for number in range(chosen.rounds + 1):
                seconds, cpu, work = ours.play()
                pipe.send(work)
                bare_seconds = pipe.recv()
                turns = sum(map(len, work))
                if number:  # the first round warms both sides up
                    rates.append((len(work) / seconds, len(work) / bare_seconds))
                    for name, one in cpu.items():
                        spent.setdefault(name, []).append(1e6 * one / turns)
        finally:
            pipe.send(None)
            bare.join(30)
            ours.close()
    report = {
        "name": "episodes",
        "ours": round(statistics.median(mine for mine, _ in rates), 1),
        "peer": round(statistics.median(theirs for _, theirs in rates), 1),
        "unit": "episodes/s",
        "ratio": round(statistics.median(mine / theirs for mine, theirs in rates), 3),
        "cpu_us_per_turn": {name: round(statistics.median(each)) for name, each in spent.items()},
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
