"""The viewer with a run of a million samples: time to the first content in a server that has just started, and of filters.

Writes a run of `--steps` x 1,000 samples as runs write them, indexes it once, and starts a new server with that index. `first` is the time
from asking for the page to the curves and the first page of samples, as the page asks for them: beside the counts of the filters' choices,
which the list does not wait for. Filters are the medians of `--rounds`
requests, the last of them a search through all texts that finds nothing. The number of all matches, which the page asks for beside the
list, and the counts of the choices are told too, without a limit. `ratio` is the smallest of limit / measured over all of them:
1 second for the first content, 300 ms for a filter.

    .venv/bin/python bench/view.py [--steps 1000] [--rounds 5] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from roll_lite.observability.view.index import SampleIndex

PER_STEP = 1000
DOMAINS = ("add", "make", "math", "code")
WORDS = "the sum of two odd numbers is even because each has remainder one and so we find that the answer equals".split(" ")  # noqa: SIM905
FIRST_S, FILTER_S = 1.0, 0.3
CHOICES = ("domain", "outcome", "finish_reason", "failure", "part")
FILTERS: dict[str, dict[str, Any]] = {
    "domain, score, step": {"domain": "math", "score_min": 0.5, "step_max": 500},
    "lowest advantage": {"sort": "advantage", "kind": "step"},
    "longest, wrong": {"correct": "false", "sort": "-response_tokens"},
    "text, frequent": {"text": "numbers"},
    "text in a domain": {"text": "odd numbers is", "domain": "code"},
    "text, not there": {"text": "zebra"},
}


def write_run(folder: Path, steps: int) -> None:
    rng = random.Random(0)
    for name in ("samples", "credit"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(f"steps: {steps}\ndomains: {{{', '.join(f'{name}: {{}}' for name in DOMAINS)}}}\n")
    metrics = [f"{prefix}metric/{number}" for prefix in ("", *(f"domain/{name}/" for name in DOMAINS)) for number in range(60)]
    metrics += ["reward/mean", "reward/accuracy", "time/generate", "time/train", "time/step"]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, **{name: rng.random() for name in metrics}}) + "\n")
            samples = [record(rng, step, place) for place in range(PER_STEP)]
            credits = [
                {key: one[key] for key in ("step", "group", "index")} | {"reward": one["score"], "advantage": rng.gauss(0, 1)}
                for one in samples
            ]
            for name, lines in (("samples", samples), ("credit", credits)):
                (folder / name / f"step_{step:06d}.jsonl").write_text(
                    "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
                )


def record(rng: random.Random, step: int, place: int) -> dict[str, Any]:
    correct, asked = rng.random() < 0.5, 60.0 * step
    return {
        "step": step,
        "domain": DOMAINS[place // 8 % 4],
        "group": step * PER_STEP // 8 + place // 8,
        "index": place % 8,
        "prompt_uid": rng.randrange(10_000),
        "prompt": f"What is {place} + {step}? Think.",
        "response": " ".join(rng.choices(WORDS, k=40)),
        "score": float(correct),
        "correct": correct,
        "outcome": "accepted",
        "failure": None,
        "finish_reason": "stop",
        "response_tokens": rng.randrange(20, 80),
        "asked_at": asked,
        "generated_at": asked + rng.random(),
        "scored_at": asked + 2,
    }


def seconds(address: str, what: str, **given: Any) -> float:
    began = time.perf_counter()
    with urlopen(f"{address}{what}?{urlencode(given, doseq=True)}") as response:
        response.read()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few samples, to see that it works")
    arguments = parser.parse_args()
    steps, rounds = (5, 1) if arguments.quick else (arguments.steps, arguments.rounds)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bench" / "run"
        write_run(folder, steps)
        began = time.perf_counter()
        index = SampleIndex(folder)
        index.refresh()
        took = time.perf_counter() - began
        index.close()
        print(f"{steps * PER_STEP:,} samples: indexed in {took:.1f} s, {(folder / 'view.duckdb').stat().st_size / 1e6:.0f} MB")
        command = [sys.executable, "-u", "-m", "roll_lite.cli", "view", str(folder), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                found = measure(server.stdout.readline().split()[-2] + "/", rounds)
            finally:
                server.terminate()
    limits = {name: FIRST_S if name == "first" else FILTER_S for name in found}
    for name, s in found.items():
        print(f"{name:26}{1000 * s:8.0f} ms   limit {1000 * limits[name]:.0f} ms")
    worst = max(s for name, s in found.items() if name != "first")
    ratio = min(limits[name] / s for name, s in found.items())
    print(
        json.dumps(
            {
                "name": "view",
                "ours": round(worst, 4),
                "first_s": round(found["first"], 3),
                "peer": FILTER_S,
                "unit": "s",
                "ratio": round(ratio, 2),
            }
        )
    )
    return 0


def measure(address: str, rounds: int) -> dict[str, float]:
    """Seconds to the first content, and of each filter."""
    run = {"run": "bench/run"}
    found = {
        "first": seconds(address, "")
        + seconds(address, "api/runs")
        + seconds(address, "api/series", **run, name=["reward/mean", "domain/math/"])
    }
    with ThreadPoolExecutor(len(CHOICES)) as pool:
        counts = [pool.submit(seconds, address, "api/counts", **run, by=by) for by in CHOICES]
        found["first"] += seconds(address, "api/samples", **run, count=100)
        print(f"counts of the filters' choices in {1000 * max(one.result() for one in counts):.0f} ms")
    for name, given in FILTERS.items():
        found[name] = statistics.median(seconds(address, "api/samples", **run, count=100, **given) for _ in range(rounds))
        print(f"{name}: number of matches in {1000 * seconds(address, 'api/counts', **run, by='kind', **given):.0f} ms")
    return found


if __name__ == "__main__":
    sys.exit(main())
