"""Seconds for which training stands still at a checkpoint: one that processes write beside the next steps, against one that is waited for.

Weights of 100 MB in float32, and Adam's moments of twice that; checksums are part of both. The last line is a JSON object; `ratio` above 1
means that the asynchronous one has training wait less. `step` and `step_beside` are seconds of a step alone, and beside the writing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from train import OPTIMIZER, make_rows, one_rank, policy_gradient

from roll_lite.data.microbatch import TokenBudget
from roll_lite.distributed.strategy.base import CheckpointWrite
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def measured(strategy: MegatronStrategy, folder: Path, rounds: int) -> dict[str, float]:
    rows = make_rows().slice(0, 2)
    plan = strategy.plan(rows.lengths, TokenBudget(1024, attention_parity_tokens=strategy.layout.attention_parity_tokens))
    seconds: dict[str, list[float]] = {name: [] for name in ("peer", "ours", "step", "step_beside", "written_after")}

    def step() -> None:
        strategy.train_step(rows, policy_gradient, ["log_probs"], plan)

    def waited_for() -> None:
        strategy.save_checkpoint(folder / "peer").finish()

    step()
    for _ in range(rounds):
        seconds["step"].append(timed(step)[0])
        seconds["peer"].append(timed(waited_for)[0])
        start = time.perf_counter()
        waited, running = timed(lambda: strategy.save_checkpoint(folder / "ours", asynchronous=True))
        assert isinstance(running, CheckpointWrite)
        while not running.is_done:
            seconds["step_beside"].append(timed(step)[0])
        seconds["written_after"].append(time.perf_counter() - start)
        seconds["ours"].append(waited + timed(running.finish)[0])
        sizes = [sum(path.stat().st_size for path in (folder / side).rglob("*.distcp")) for side in ("ours", "peer")]
        assert sizes[0] == sizes[1], f"other checkpoints: {sizes}"
        for side in ("ours", "peer"):
            shutil.rmtree(folder / side)
    return {name: round(statistics.median(found), 3) for name, found in seconds.items()} | {"megabytes": round(sizes[0] / 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints of either kind (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of 16 MB each (default: %(default)s)")
    chosen = parser.parse_args()
    with one_rank(OPTIMIZER, hidden=512, layers=chosen.layers) as (strategy, folder):
        found = measured(strategy, folder, chosen.rounds)
    result = {
        "name": "checkpoint",
        **found,
        "unit": "s waited for a checkpoint",
        "ratio": round(found["peer"] / found["ours"], 1),
        "peer_is": "checkpoint.asynchronous: false, 1 process, 1 thread",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
