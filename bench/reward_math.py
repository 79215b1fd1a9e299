"""Milliseconds and samples per second of the math reward, against one process started per sample, as a peer does.

    .venv/bin/python bench/reward_math.py [--samples 2000] [--per-process 40] [--rounds 3]

Compared are the function alone (median ms of a sample, GSM8K-style responses that all differ), the domain (a pool of two reward workers
on Ray, every sample through it), and a process forked for each sample that makes the same check with everything imported (two at a time,
so that it has both cores as well). `ratio` is samples/s of the domain over that. The forking process has torch imported, as the reward
workers of the frameworks have that work like this: what a fork costs depends on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from roll_lite.config.schema.domains import RewardConfig  # noqa: E402
from roll_lite.config.schema.run import RayConfig  # noqa: E402
from roll_lite.data.samples import RewardInput, Score  # noqa: E402
from roll_lite.rewards.base import RewardFailed  # noqa: E402
from roll_lite.rewards.math.reward import MathReward  # noqa: E402

WORKERS = 2


def samples(count: int, seed: int = 1) -> list[RewardInput]:
    """Worked examples with answers as GSM8K has them, in the ways that models write them; half of them wrong."""
    chance = random.Random(seed)
    endings = ("#### {}", "The answer is {}.", r"So the answer is \boxed{{{}}}.", "<answer>{}</answer>", "She earns ${} in total.")
    made = []
    for _ in range(count):
        first, second = chance.randint(2, 900), chance.randint(2, 90)
        right = first * second
        written = right if chance.random() < 0.5 else right + chance.randint(1, 99)
        text = (
            f"{chance.choice('ABCDEFG')}nn sells {first} clips a month, for {second} months.\nThat makes {first} * {second} = {written}.\n"
        )
        text += chance.choice(endings).format(f"{written:,}" if chance.random() < 0.3 else written)
        made.append(RewardInput("gsm8k", "prompt", text, str(right), {}, "stop"))
    return made


def one_by_one(work: list[RewardInput]) -> tuple[float, float]:
    """Median and mean milliseconds of the function."""
    times = []
    for item in work:
        started = time.perf_counter()
        MathReward()(item)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times), statistics.fmean(times)


def _checked(item: RewardInput, answer: Any) -> None:
    answer.put(MathReward()(item).value)


def process_per_sample(work: list[RewardInput]) -> float:
    """Samples per second."""
    context = multiprocessing.get_context("fork")

    def check(item: RewardInput) -> float:
        answer = context.Queue()
        process = context.Process(target=_checked, args=(item, answer))
        process.start()
        value: float = answer.get(timeout=60)
        process.join()
        return value

    started = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        values = list(pool.map(check, work))
    assert values == [MathReward()(item).value for item in work]
    return len(work) / (time.perf_counter() - started)


async def through_pool(pool: Any, work: list[RewardInput]) -> tuple[float, list[Score | str]]:
    """Samples per second, and what became of each."""

    async def one(item: RewardInput) -> Score | str:
        try:
            return await pool.score(item)
        except RewardFailed as failure:
            return failure.cause

    started = time.perf_counter()
    results = await asyncio.gather(*map(one, work))
    return len(work) / (time.perf_counter() - started), list(results)


def compare(count: int, per_process: int, rounds: int) -> dict[str, Any]:
    import torch  # noqa: F401

    from roll_lite.distributed.ray_session import ray_session
    from roll_lite.workers.reward import RewardPool

    MathReward().warm()
    work = samples(count)
    forked = [process_per_sample(samples(per_process, seed)) for seed in range(rounds)]  # before Ray's threads are here
    median, mean = one_by_one(work)

    async def domain() -> list[float]:
        pool = RewardPool("gsm8k", RewardConfig(name="math", workers=WORKERS))
        await pool.start()
        await through_pool(pool, samples(count, 99))
        speeds = []
        for seed in range(rounds):
            fresh = samples(count, 100 + seed)
            speed, results = await through_pool(pool, fresh)
            assert all(isinstance(result, Score) for result in results)
            speeds.append(speed)
        pool.close()
        return speeds

    with ray_session(RayConfig(), None):
        speed = statistics.median(asyncio.run(domain()))
    peer = statistics.median(forked)
    return {
        "name": "reward_math",
        "ours": round(speed, 1),
        "peer": round(peer, 1),
        "unit": "samples/s",
        "ratio": round(speed / peer, 1),
        "median_ms": round(median, 3),
        "mean_ms": round(mean, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--per-process", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    os.chdir(ROOT)
    print(json.dumps(compare(chosen.samples, chosen.per_process, chosen.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
