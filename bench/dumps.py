"""What dumps cost: seconds and bytes per 1,000 samples, written and loaded again, for responses of several lengths.

Written by a thread of the rollout service while the step trains, so that seconds are that process's CPU time, not the step's. What a run
without dumps writes of the same samples, the readable JSON lines, stands beside them. The limit is pyarrow's own time to write the same
columns once they are in its memory; `ratio` is that over ours for 1,024 tokens. Token ids and log-probs are random, which compresses worse
than what a model says.

    .venv/bin/python bench/dumps.py [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow.parquet as pq

from roll_lite.data.dumps import load_dump, write_dump
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import (
    Author,
    FinishReason,
    Prompt,
    Sample,
    SampleGroup,
    SampleId,
    SampleOutcome,
    Score,
    Segment,
    TokenRow,
    Transcript,
    VersionSpan,
)
from roll_lite.workers.rollout_output import rows_of, write_samples
from roll_lite.workers.token_blocks import BLOCK_TOKENS, TokenRecord, token_block

SAMPLES, GROUP, PROMPT, VOCABULARY = 1000, 8, 128, 150_000
LENGTHS = (64, 1024, 8192)


def made(tokens: int, samples: int) -> tuple[list[SampleGroup], dict[int, DataProto]]:
    """Groups, and their token blocks by number."""
    generator = np.random.default_rng(1)
    prompt = tuple(generator.integers(0, VOCABULARY, PROMPT).tolist())
    records = []
    for _ in range(samples):
        log_probs = -generator.exponential(0.5, tokens).astype(np.float32)
        ids = (VOCABULARY * generator.random(tokens) ** 4).astype(np.int64)  # few tokens are frequent
        records.append(TokenRecord.joined([TokenRecord.given(prompt), TokenRecord(ids, np.ones(tokens, bool), log_probs)]))
    size = max(1, BLOCK_TOKENS // (PROMPT + tokens))  # rows of a full block
    parts = [records[start : start + size] for start in range(0, len(records), size)]
    blocks = {number: token_block(part) for number, part in enumerate(parts)}
    places = [TokenRow(number, row, PROMPT + tokens) for number, block in blocks.items() for row in range(len(block))]
    text = "the words of it " * (tokens // 4)
    segments = (Segment(Author.PROMPT, PROMPT), Segment(Author.POLICY, tokens, (VersionSpan(0, 3),)))
    groups: list[SampleGroup] = []
    for number in range(samples // GROUP):
        asked = Prompt("maths", number, "a question of some words " * 20, prompt, "42")
        members = [
            Sample(
                SampleId("maths", number, 0, number, index),
                asked,
                Transcript(segments, places[number * GROUP + index], text, FinishReason.STOP),
                SampleOutcome.ACCEPTED,
                Score(float(index % 2)),
            )
            for index in range(GROUP)
        ]
        groups.append(SampleGroup(number, "maths", tuple(members)))
    return groups, blocks


def seconds(work: Callable[[], object], rounds: int) -> float:
    """CPU time, compression's threads included."""
    measured = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        measured.append(time.process_time() - start)
    return statistics.median(measured)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few samples, one length, one round")
    chosen = parser.parse_args()
    samples, rounds = (5 * GROUP, 1) if chosen.quick else (SAMPLES, chosen.rounds)
    costs: dict[int, tuple[float, float]] = {}
    print(f"{'tokens':>7} {'write s':>9} {'load s':>9} {'MB':>9} {'bytes/token':>12} {'JSON lines s':>13} {'MB':>9}   per 1,000 samples")
    with tempfile.TemporaryDirectory() as folder:
        path, lines = Path(folder) / "step.parquet", Path(folder) / "step.jsonl"
        for tokens in LENGTHS[1:2] if chosen.quick else LENGTHS:
            groups, blocks = made(tokens, samples)
            rows = rows_of(groups, {"maths": 1.0})
            facts = {"step": 1, "config": {}, "tokenizer": "", "stats": {}}
            fetch = lambda references, blocks=blocks: [blocks[number] for number in references]  # noqa: E731
            write_dump(path, groups, rows, fetch, facts)  # warm
            written = seconds(lambda: write_dump(path, groups, rows, fetch, facts), rounds)  # noqa: B023
            loaded = seconds(lambda: load_dump(path), rounds)
            table = pq.read_table(path)
            limit = seconds(lambda: pq.write_table(table, path.with_suffix(".limit"), compression="zstd"), rounds)  # noqa: B023
            readable = seconds(lambda: write_samples(lines, groups, 1), rounds)  # noqa: B023
            scale, size = 1000 / samples, path.stat().st_size
            costs[tokens] = written * scale, limit * scale
            of_tokens = size / samples / (PROMPT + tokens)
            sizes = f"{size * scale / 1e6:9.1f} {of_tokens:12.1f} {readable * scale:13.3f} {lines.stat().st_size * scale / 1e6:9.1f}"
            print(f"{tokens:>7} {written * scale:9.3f} {loaded * scale:9.3f} {sizes}", flush=True)
    ours, peer = costs[1024]
    report = {
        "name": "dumps",
        "ours": round(ours, 3),
        "peer": round(peer, 3),
        "peer_is": "pyarrow's own part of it",
        "unit": "CPU seconds per 1,000 samples of 1,024 tokens",
        "ratio": round(peer / ours, 3),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
