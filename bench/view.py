"""The viewer's page with a run of a million samples: time to the first content, and to the list after the choice of a filter.

Writes a run of `--steps` x 1,000 samples as runs write them, indexes it once, and shows it in headless Chromium. `first`: from the start of
the navigation, to a server that has just started with that index, until the first curves, or the first rows of samples, are painted. A
filter: from the change of its control until the new list is painted; the last searches all texts for a word that none has. Medians of
`--rounds`. The number of all matches and the choices of the filters follow the list; they are told, too, without a limit. `ratio` is the
smallest of limit / measured: 1 second for the first content, 300 ms for a filter.

    .venv/bin/python bench/view.py [--steps 1000] [--rounds 5] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from roll_lite.observability.view.index import SampleIndex

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # support_chromium
PER_STEP = 1000
DOMAINS = ("add", "make", "math", "code")
WORDS = "the sum of two odd numbers is even because each has remainder one and so we find that the answer equals".split(" ")  # noqa: SIM905
FIRST_S, FILTER_S = 1.0, 0.3
FILTERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "domain, score, step": ({"domain": "math", "score_min": 0.5}, "Step, to", "500"),
    "lowest advantage": ({"kind": "step"}, "Order", "advantage"),
    "longest, wrong": ({"sort": "-response_tokens"}, "Correct", "false"),
    "text, frequent": ({}, "Text", "numbers"),
    "text in a domain": ({"text": "odd numbers is"}, "Domain", "code"),
    "text, not there": ({}, "Text", "zebra"),
}
"""{name: (what is chosen before, label of a control, its new value)}."""
WATCH = """window.bench = (() => {
    const one = selector => document.querySelector(selector);
    const control = label => [...document.querySelectorAll('main select, main input')].find(
        one => (one.ariaLabel || one.closest('label').firstChild.data) === label);
    const painted = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    const when = holds => new Promise(done => {
        const look = () => { if (holds()) { observer.disconnect(); painted().then(() => done(performance.now())); } };
        const observer = new MutationObserver(look);
        observer.observe(document, { childList: true, subtree: true }); });
    const first = when(() => one('.uplot, .list tr[tabindex]')), choices = when(() => control('Domain'));
    async function change(make) {
        const old = one('.list'), began = performance.now(), isNew = () => one('.list') && one('.list') !== old;
        const times = [when(isNew), when(() => isNew() && !one('#found').textContent.includes('…'))];
        make();
        return (await Promise.all(times)).map(time => (time - began) / 1000);
    }
    const choose = (label, value) => change(() => { control(label).value = value; control(label).dispatchEvent(new Event('change')); });
    return { first, choices, control, change, choose };
})()"""
"""Script of the measured page. Times are in seconds since the navigation began, or since the change: until the list, and until the number
of matches, is painted."""


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


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Address of a viewer that has just started."""
    command = [sys.executable, "-u", "-m", "roll_lite.cli", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-2] + "/"
        finally:
            server.terminate()


async def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds to the first content of two views, and of each filter."""
    from support_chromium import browser

    times: dict[str, list[float]] = {}
    choices, counts = list[float](), list[float]()
    async with browser() as tab:
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        for view in ("curves", "samples") * rounds:
            with serving(folder) as address:
                await tab.open(f"{address}#{view}")
                times.setdefault(f"first, {view}", []).append(await tab.value("bench.first.then(ms => ms / 1000)"))
                if view == "samples":
                    choices.append(await tab.value("bench.choices.then(ms => ms / 1000)"))
                await tab.call("Page.navigate", url="about:blank")
        with serving(folder) as address:
            await tab.open(f"{address}#curves")
            for name, (before, label, value) in list(FILTERS.items()) * rounds:
                await tab.value(f"bench.change(() => {{ location.hash = '#samples?{urlencode(before)}'; }})")
                await tab.until(f"bench.control({label!r})")
                listed, counted = await tab.value(f"bench.choose({label!r}, {value!r})")
                times.setdefault(name, []).append(listed)
                counts.append(counted)
            await tab.call("Page.navigate", url="about:blank")
        assert tab.errors == [], tab.errors
    print(f"choices of the filters in {1000 * max(choices):.0f} ms, numbers of matches in up to {1000 * max(counts):.0f} ms")
    return {name: statistics.median(some) for name, some in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few samples, to see that it works")
    arguments = parser.parse_args()
    steps, rounds = (5, 1) if arguments.quick else (arguments.steps, arguments.rounds)
    from support_chromium import CHROMIUM

    if CHROMIUM is None:
        print(json.dumps({"name": "view", "skipped": "chromium is not installed: apt-get install chromium"}))
        return 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bench" / "run"
        write_run(folder, steps)
        began = time.perf_counter()
        index = SampleIndex(folder)
        index.refresh()
        took = time.perf_counter() - began
        index.close()
        print(f"{steps * PER_STEP:,} samples: indexed in {took:.1f} s, {(folder / 'view.duckdb').stat().st_size / 1e6:.0f} MB")
        found = asyncio.run(measure(folder, rounds))
    limits = {name: FIRST_S if name.startswith("first") else FILTER_S for name in found}
    for name, s in found.items():
        print(f"{name:26}{1000 * s:8.0f} ms   limit {1000 * limits[name]:.0f} ms")
    report: dict[str, Any] = {
        "name": "view",
        "ours": round(max(found[name] for name in FILTERS), 4),
        "first_s": round(max(s for name, s in found.items() if name not in FILTERS), 3),
        "peer": FILTER_S,
        "unit": "s",
        "ratio": round(min(limits[name] / s for name, s in found.items()), 2),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
