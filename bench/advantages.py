"""Milliseconds of every advantage estimator at 512 x 32k ragged tokens, against a Python loop over the columns of a [B, T] tensor.

Ours is the whole of `assign_credit`: from reward and mask (and values) to [B, T] advantages, whitening where it is part of the
estimator. The peer is what the field's projects do, written out here: one round of tensor operations per column. The slowest
token-level estimator is then measured in turns with its loop, which must give the same numbers.
The last line is a JSON object; `ratio` is loop / ours for that one, `worst_ms` is the slowest estimator of all, to stay below 100.

    .venv/bin/python bench/advantages.py [--rows 512] [--columns 32768] [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.data.microbatch import MicroBatch
from roll_lite.workers.credit import Credit, assign_credit

LIMIT_MS = 100
AIM = 50
GROUP = 8

Peer = Callable[[MicroBatch], torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    advantage: dict[str, Any]
    gaps: bool = False
    whiten: bool = False
    peer: Peer | None = None
    """The loop over columns, for token-level estimators."""


def peer_rewards(rows: MicroBatch) -> torch.Tensor:
    last = (rows.mask * torch.arange(rows.mask.shape[1])).argmax(1)
    return torch.zeros(rows.mask.shape).scatter_(1, last[:, None], rows.columns["reward"][:, None]) * rows.mask


def peer_gae(rows: MicroBatch, lam: float | torch.Tensor, lam_critic: float | None = None) -> torch.Tensor:
    """As verl writes it: a masked column leaves what was carried as it is. With a lambda of its own for the critic, a second loop."""
    mask, values, rewards, gamma = rows.mask.float(), rows.columns["values"], peer_rewards(rows), 1.0
    for one in (lam_critic, lam) if lam_critic is not None else (lam,):
        nextvalues: float | torch.Tensor = 0.0
        lastgaelam: float | torch.Tensor = 0.0
        advantages_reversed = []
        for t in reversed(range(mask.shape[1])):
            delta = rewards[:, t] + gamma * nextvalues - values[:, t]
            lastgaelam_ = delta + gamma * one * lastgaelam
            nextvalues = values[:, t] * mask[:, t] + (1 - mask[:, t]) * nextvalues
            lastgaelam = lastgaelam_ * mask[:, t] + (1 - mask[:, t]) * lastgaelam
            advantages_reversed.append(lastgaelam)
        advantages = torch.stack(advantages_reversed[::-1], dim=1)
        _returns = advantages + values
    return advantages * mask


def peer_adaptive(rows: MicroBatch) -> torch.Tensor:
    return peer_gae(rows, (1 - 1 / (0.05 * rows.mask.sum(1))).clamp(min=0), 1.0)


def peer_returns(rows: MicroBatch) -> torch.Tensor:
    """As verl writes it, except that verl starts anew at a gap, which cuts the tokens before it off from the reward."""
    mask, rewards = rows.mask.float(), peer_rewards(rows)
    returns, running = torch.zeros(mask.shape), torch.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        running = (rewards[:, t] + 0.999 * running) * mask[:, t] + (1 - mask[:, t]) * running
        returns[:, t] = running
    return returns * mask


def peer_whitened(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mean = (advantages * mask).sum() / mask.sum()
    var = ((advantages - mean).square() * mask).sum() / (mask.sum() - 1)
    return (advantages - mean) * torch.rsqrt(var + 1e-8) * mask


def peer_group_baseline(rows: MicroBatch) -> torch.Tensor:
    means = rows.columns["reward"].view(-1, GROUP).mean(1).repeat_interleave(GROUP)
    centered = MicroBatch({**rows.columns, "reward": rows.columns["reward"] - means}, rows.mask)
    return peer_whitened(peer_returns(centered), rows.mask)


CASES = (
    Case("gae", {"name": "gae"}, peer=lambda rows: peer_gae(rows, 0.95)),
    Case("gae, gaps", {"name": "gae"}, gaps=True, peer=lambda rows: peer_gae(rows, 0.95)),
    Case("gae, whitened", {"name": "gae"}, gaps=True, whiten=True, peer=lambda rows: peer_whitened(peer_gae(rows, 0.95), rows.mask)),
    Case("gae, decoupled", {"name": "gae", "lam_critic": 1.0}, gaps=True, peer=lambda rows: peer_gae(rows, 0.95, 1.0)),
    Case("gae, adaptive", {"name": "gae", "lam_critic": 1.0, "length_adaptive": 0.05}, gaps=True, peer=peer_adaptive),
    Case("grpo", {"name": "grpo"}),
    Case("dr. grpo", {"name": "grpo", "normalize_std": False}),
    Case("rloo", {"name": "rloo"}),
    Case("opo", {"name": "opo"}),
    Case("gpg", {"name": "gpg"}),
    Case("remax", {"name": "remax"}),
    Case("reinforce", {"name": "reinforce", "gamma": 0.999}, gaps=True, peer=peer_returns),
    Case(
        "reinforce++",
        {"name": "reinforce_plus_plus", "gamma": 0.999},
        gaps=True,
        peer=lambda rows: peer_whitened(peer_returns(rows), rows.mask),
    ),
    Case("reinforce++ baseline", {"name": "reinforce_plus_plus", "gamma": 0.999, "baseline": "group"}, gaps=True, peer=peer_group_baseline),
)


def make_rows(rows: int, columns: int, gaps: bool) -> MicroBatch:
    """Responses of any length up to all columns; with gaps, a tool's output of 100 tokens after every 400."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, columns // 16, (rows,), generator=generator)
    ends = prompts + 1 + (torch.rand(rows, generator=generator) * (columns - prompts - 1)).long()
    place = torch.arange(columns)
    mask = (place >= prompts[:, None]) & (place < ends[:, None])
    if gaps:
        mask &= (place - prompts[:, None]) % 500 < 400
    row_columns = {
        "reward": torch.rand(rows, generator=generator),
        "group": torch.arange(rows) // GROUP,
        "train_weight": torch.ones(rows),
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "baseline_score": torch.rand(rows, generator=generator),
    }
    return MicroBatch({**row_columns, "values": torch.randn(rows, columns, generator=generator)}, mask)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    batches = {gaps: make_rows(chosen.rows, chosen.columns, gaps) for gaps in (False, True)}

    def ours(case: Case) -> Credit:
        algorithm = AlgorithmConfig.model_validate({"advantage": case.advantage, "whiten_advantages": case.whiten})
        return assign_credit(batches[case.gaps], 0, algorithm, 0.0, lambda rows: [rows])

    for case in CASES:
        ours(case)  # compiles
    seconds: dict[str, list[float]] = {case.name: [] for case in CASES}
    for _ in range(chosen.rounds):
        for case in CASES:
            seconds[case.name].append(timed(lambda case=case: ours(case))[0])
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{'estimator':<24}{'median ms':>12}{'best ms':>12}", flush=True)
    for name, times in seconds.items():
        print(f"{name:<24}{medians[name] * 1e3:>12.1f}{min(times) * 1e3:>12.1f}", flush=True)

    slowest = max((case for case in CASES if case.peer), key=lambda case: medians[case.name])
    pairs = []
    for _ in range(chosen.peer_rounds):
        loop_time, loop = timed(lambda: slowest.peer(batches[slowest.gaps]))  # type: ignore[misc]
        our_times: list[float] = []
        for _ in range(chosen.rounds):
            our_time, credit = timed(lambda: ours(slowest))
            our_times.append(our_time)
        torch.testing.assert_close(credit.advantages, loop, rtol=1e-3, atol=1e-3)
        pairs.append((statistics.median(our_times), loop_time))
    report = {
        "name": "advantages",
        "ours": round(statistics.median(mine for mine, _ in pairs) * 1e3, 1),
        "peer": round(statistics.median(theirs for _, theirs in pairs) * 1e3, 1),
        "unit": "ms",
        "ratio": round(statistics.median(theirs / mine for mine, theirs in pairs), 1),
        "aim": AIM,
        "estimator": slowest.name,
        "worst": max(medians, key=lambda name: medians[name]),
        "worst_ms": round(max(medians.values()) * 1e3, 1),
        "limit_ms": LIMIT_MS,
        "peer_is": f"a loop over the columns, torch, {chosen.threads} threads, {chosen.rows} x {chosen.columns} tokens",
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
