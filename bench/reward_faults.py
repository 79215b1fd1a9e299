"""Samples with 1% planted hangs, endless loops and crashes through a pool of reward workers: how many a second, and how each ends.

    .venv/bin/python bench/reward_faults.py [--samples 1000] [--types math exact ...]

For each local type of reward, a domain with two workers on Ray. Sound samples have to get the score that the function gives them by
itself, planted ones a failure with the right cause; one that ends otherwise ends the bench. A planted sample costs a time-out of one
second or a process, and a new process: 10,000 samples of each type take about ten times as long as the default. Programs that hang or
crash inside the sandbox are `bench/reward_code.py --samples`. How far it is goes to stderr; the last line of stdout is the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from roll_lite.config.schema.domains import RewardConfig  # noqa: E402
from roll_lite.config.schema.run import RayConfig  # noqa: E402
from roll_lite.data.samples import RewardInput, Score  # noqa: E402
from roll_lite.rewards.base import RewardFailed, to_score  # noqa: E402
from roll_lite.rewards.math.reward import MathReward  # noqa: E402
from roll_lite.rewards.registry import reward_type  # noqa: E402

MathReward().warm()  # a function of one's own has no warm-up but its import, and the time limit here is short
WORKERS = 2
FAULT_SECONDS = 1.0
TELL_EVERY_S = 5.0
PLANTED = ("hang", "spin", "crash")
TYPES: dict[str, dict[str, Any]] = {
    "math": {},
    "exact": {},
    "choice": {},
    "instruction": {},
    "length": {"target": 40},
    "repetition": {},
    "format": {"pattern": "answer"},
}
CONSTRAINTS = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 5}],
}


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def faulty(sample: RewardInput, *, kind: str) -> Score:
    """A reward of a known type, with planted faults."""
    fault = sample.columns.get("fault")
    if fault == "hang":
        time.sleep(1000)
    if fault == "spin":
        while True:
            pass
    if fault == "crash":
        os._exit(1)
    return to_score(reward_type(kind)(**TYPES[kind])(sample), kind)


def samples(kind: str, count: int, seed: int = 3) -> list[RewardInput]:
    """Half of them right, 1% planted."""
    chance = random.Random(seed)
    planted = set(chance.sample(range(count), count // 100))
    made = []
    for number in range(count):
        right = chance.random() < 0.5
        value = chance.randint(2, 90_000)
        answer: Any = chance.choice("ABCD") if kind == "choice" else str(value)
        said = answer if right else "E" if kind == "choice" else value + 1
        columns: dict[str, Any] = dict(CONSTRAINTS) if kind == "instruction" else {}
        if number in planted:
            columns["fault"] = chance.choice(PLANTED)
        made.append(RewardInput(kind, "prompt", f"We count {value} and more.\nThe answer is {said}", answer, columns, "stop"))
    return made


def account(kind: str, work: list[RewardInput], results: list[Score | str]) -> Counter[str]:
    """What became of the samples; an assertion where one has the wrong end."""
    ends: Counter[str] = Counter()
    for item, result in zip(work, results, strict=True):
        fault = item.columns.get("fault", "sound")
        if fault == "sound":
            assert isinstance(result, Score) and result.value == faulty(item, kind=kind).value, (item, result)
        else:
            assert isinstance(result, str) and ("process died" if fault == "crash" else "time-out") in result, (item, result)
        ends[fault] += 1
    assert ends.total() == len(work)
    return ends


async def faults(kind: str, count: int, workers: int = WORKERS) -> dict[str, Any]:
    from roll_lite.workers.reward import RewardPool

    settings = RewardConfig(name="bench.reward_faults.faulty", args={"kind": kind}, workers=workers, timeout_s=FAULT_SECONDS)
    pool = RewardPool(kind, settings)
    await pool.start()
    work = samples(kind, count)

    done = 0

    async def one(item: RewardInput) -> Score | str:
        nonlocal done
        try:
            return await pool.score(item)
        except RewardFailed as failure:
            return failure.cause
        finally:
            done += 1

    async def progress() -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            tell(f"{kind}: {done} of {count} samples, {pool.replaced} workers replaced, {time.perf_counter() - started:.0f} s")

    started = time.perf_counter()
    telling = asyncio.create_task(progress())
    try:
        results = list(await asyncio.gather(*map(one, work)))
    finally:
        telling.cancel()
        pool.close()
    seconds = time.perf_counter() - started
    return {"ours": round(count / seconds, 1), "seconds": round(seconds, 1), "replaced": pool.replaced, **account(kind, work, results)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=list(TYPES))
    chosen = parser.parse_args()
    os.chdir(ROOT)
    from roll_lite.distributed.ray_session import ray_session

    types: dict[str, dict[str, Any]] = {}
    with ray_session(RayConfig(), None):
        for kind in chosen.types:
            types[kind] = asyncio.run(faults(kind, chosen.samples))
            tell(f"{kind}: {types[kind]}")
    samples_of_all = chosen.samples * len(types)
    speed = samples_of_all / sum(one["seconds"] for one in types.values())
    ends = {end: sum(one.get(end, 0) for one in types.values()) for end in ("sound", *PLANTED)}
    sums = {"samples": samples_of_all, "accounted": sum(ends.values()), **ends}
    print(json.dumps({"name": "reward_faults", "ours": round(speed, 1), "unit": "samples/s", **sums, "types": types}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
