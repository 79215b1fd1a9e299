"""Programs per second of the `code` reward's sandbox pool against a plain, unprotected `subprocess.run` per program.

Both sides run the same trivial Python programs on two cores, in turns: two sandboxes against two threads that start processes.
`--samples N` also sends N samples with 1% planted hangs and crashes through the reward and accounts for each (10,000: a few minutes).
How far it is goes to stderr; the last line of stdout is the result.

    .venv/bin/python bench/reward_code.py [--rounds 4] [--programs 200] [--samples 10000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
SIDE_BY_SIDE = 2
AIM = 1.0
BATCH = 64
TELL_EVERY_S = 5.0


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def plain(sources: list[str]) -> float:
    def one(source: str) -> bytes:
        return subprocess.run([sys.executable, "-c", source], capture_output=True, check=True).stdout

    started = time.perf_counter()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        printed = list(threads.map(one, sources))
    seconds = time.perf_counter() - started
    assert printed == [f"{number}\n".encode() for number in range(len(sources))]
    return seconds


def pooled(pool: Any, sources: list[str]) -> float:
    from roll_lite.sandbox.pool import Program

    started = time.perf_counter()
    outcomes = pool.run_many([Program({"kind": "script", "source": source}) for source in sources])
    seconds = time.perf_counter() - started
    assert [outcome.stdout for outcome in outcomes] == [f"{number}\n".encode() for number in range(len(sources))]
    return seconds


def latency_ms(pool: Any, programs: int) -> float:
    """Of one program, alone."""
    from roll_lite.sandbox.pool import Program

    times = []
    for _ in range(programs):
        started = time.perf_counter()
        pool.run(Program({"kind": "script", "source": "print(1)"}))
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


PLANTED = (
    "while True: pass",
    "import os; os._exit(0)",
    "import ctypes; ctypes.string_at(0)",
    "import time; time.sleep(99)",
)


def account(samples: int) -> dict[str, float]:
    """Every sample gets a score: 1 where its program is right, 0 where a hang or a crash was planted."""
    from roll_lite.data.samples import RewardInput
    from roll_lite.rewards.base import RewardFailed
    from roll_lite.rewards.code.reward import CodeReward

    items, planted = [], []
    for number in range(samples):
        bad = number % 100 == 7
        source = PLANTED[number // 100 % len(PLANTED)] if bad else f"print(int(input()) + {number})"
        answer = {"stdin": "1\n", "stdout": f"{number + 1}\n"}
        items.append(RewardInput("code", "", f"```python\n{source}\n```", answer, {}, "stop"))
        planted.append(bad)
    counts: Counter[str] = Counter()
    started = told = time.perf_counter()
    for start in range(0, samples, BATCH):
        scores = CodeReward(test_s=0.5, wall_s=1.5, parallel=SIDE_BY_SIDE)(items[start : start + BATCH])
        for score, bad in zip(scores, planted[start : start + BATCH], strict=True):
            right = not isinstance(score, RewardFailed) and score.value == float(not bad)
            counts["failed" if isinstance(score, RewardFailed) else "as planted" if right else "wrong"] += 1
        now, done = time.perf_counter(), sum(counts.values())
        if now - told > TELL_EVERY_S:
            told = now
            tell(f"{done} of {samples} samples, about {(now - started) * (samples - done) / done:.0f} s to go")
    seconds = time.perf_counter() - started
    assert sum(counts.values()) == samples
    return {"samples_per_s": samples / seconds, "wrong": counts["wrong"], "failed": counts["failed"], "accounted": counts["as planted"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--samples", type=int, default=0)
    chosen = parser.parse_args()
    from roll_lite.sandbox.pool import SandboxPool

    sources = [f"print({number})" for number in range(chosen.programs)]
    pool = SandboxPool(SIDE_BY_SIDE)
    tell(pool.start().describe())
    pairs = []
    try:
        pooled(pool, sources)
        for number in range(chosen.rounds):
            pairs.append((len(sources) / pooled(pool, sources), len(sources) / plain(sources)))
            tell(f"round {number + 1} of {chosen.rounds}: {pairs[-1][0]:.0f} programs/s in sandboxes, {pairs[-1][1]:.0f} without")
        latency = latency_ms(pool, chosen.programs)
    finally:
        pool.close()
    report = {
        "name": "reward_code",
        "ours": round(statistics.median(ours for ours, _ in pairs), 1),
        "peer": round(statistics.median(peer for _, peer in pairs), 1),
        "unit": "programs/s",
        "ratio": round(statistics.median(ours / peer for ours, peer in pairs), 3),
        "aim": AIM,
        "latency_ms": round(latency, 2),
    }
    if chosen.samples:
        report |= {f"planted_{name}": round(value, 1) for name, value in account(chosen.samples).items()}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
