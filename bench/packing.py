"""Seconds of MegatronStrategy.train_step on packed rows, against the same step on the same rows padded to the longest of them.

Lengths are log-normal, the longest eight times the mean. Both sides keep within the same number of tokens per micro-batch, take turns step
by step, and must come to the same loss and gradient norm. The last line is a JSON object; `ratio` above 1 means that packing is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from train import OPTIMIZER, VOCAB, one_rank, policy_gradient, tail, turns

from roll_lite.data.microbatch import RowsAtATime, TokenBudget
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.base import TrainResult

PROMPT, SPREAD = 8, 8.0
"""Tokens of every prompt; the longest row by the mean."""


def batch_of(lengths: list[int], width: int | None = None) -> DataProto:
    """`width`: with padding up to it, which does not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    advantages = [torch.randn(length - 1, generator=generator) / 1000 for length in lengths]
    masks = [torch.arange(length) >= PROMPT for length in lengths]

    def wide(row: torch.Tensor, to: int) -> torch.Tensor:
        return torch.nn.functional.pad(row, (0, to - len(row))) if width else row

    return DataProto(
        {
            "temperature": torch.ones(len(lengths)),
            "input_ids": Ragged.from_rows([wide(row, width or 0) for row in tokens]),
            "response_mask": Ragged.from_rows([wide(row, width or 0) for row in masks]),
            "advantages": Ragged.from_rows([wide(row, (width or 1) - 1) for row in advantages]),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="how often the two take turns (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=128, help="samples of a step (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch (default: %(default)s)")
    chosen = parser.parse_args()
    lengths = tail(chosen.rows, chosen.longest, SPREAD, shortest=PROMPT + 1)
    packed, padded = batch_of(lengths), batch_of(lengths, chosen.longest)
    results: dict[str, TrainResult] = {}
    frozen = OPTIMIZER.model_copy(update={"lr": 0.0, "min_lr": 0.0})  # every step starts from the same weights
    with one_rank(frozen) as (strategy, _):
        by_tokens = TokenBudget(chosen.budget, attention_parity_tokens=strategy.layout.attention_parity_tokens)
        by_rows = RowsAtATime(max(chosen.budget // chosen.longest, 1))

        def step_packed() -> None:
            results["packed"] = strategy.train_step(packed, policy_gradient, ["log_probs"], strategy.plan(packed.lengths, by_tokens))

        def step_padded() -> None:
            results["padded"] = strategy.train_step(padded, policy_gradient, ["log_probs"], strategy.plan(padded.lengths, by_rows))

        pairs = turns(step_packed, step_padded, chosen.pairs)
    mine, theirs = results["packed"], results["padded"]
    if not math.isclose(mine.grad_norm, theirs.grad_norm, rel_tol=1e-5) or not math.isclose(mine.loss, theirs.loss, rel_tol=1e-4):
        raise SystemExit(f"different numbers: loss {mine.loss} and {theirs.loss}, gradient norm {mine.grad_norm} and {theirs.grad_norm}")
    result = {
        "name": "packing",
        "ours": round(statistics.median(seconds for seconds, _ in pairs), 3),
        "peer": round(statistics.median(seconds for _, seconds in pairs), 3),
        "unit": "s/step",
        "ratio": round(statistics.median(slow / fast for fast, slow in pairs), 2),
        "tokens": sum(lengths),
        "padded_tokens": len(lengths) * chosen.longest,
        "peer_is": "the same step on padded rows, 1 process, 1 thread, float32, 5M parameters",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
