"""Memory and time of log-probs, entropy and their gradients at a large vocabulary, without logits and with them.

The peer is what one would write by hand: the logits of all rows at once, in float32, log_softmax, gather, the entropy, autograd.
Either side runs in fresh processes that take turns, one step in each, so that a peak is that of its own step.

The last line is a JSON object. `ours` and `peer`: what a step takes at its peak beyond what both sides have anyway, hidden states,
weight and the weight's gradient. On a CPU that is resident memory, on a GPU what PyTorch has allocated. `ratio` above 1 means that ours
takes less, `time_ratio` above 1 that it is faster. Seconds are those of the CPU on a CPU, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from roll_lite.distributed.strategy.megatron.log_probs import log_probs_and_entropy
from roll_lite.distributed.strategy.megatron.vocabulary import Vocabulary

MIB = 1 << 20
Result = tuple[torch.Tensor, torch.Tensor | None]
"""Log-probs and, if asked for, entropy, [N] each."""
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], Result]
"""Of hidden [N, H], weight [V, H], targets [N], temperatures [N]; the last says whether the entropy is asked for."""


def without_logits(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, with_entropy: bool
) -> Result:
    return log_probs_and_entropy(hidden, weight, Vocabulary(len(weight), len(weight), None, targets, temperatures), with_entropy)


def all_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, with_entropy: bool) -> Result:
    logits = torch.nn.functional.linear(hidden, weight)
    log_p = (logits.float() / temperatures[:, None]).log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1) if with_entropy else None
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


SIDES: dict[str, Head] = {"ours": without_logits, "peer": all_logits}


def step(head: Head, hidden: torch.Tensor, weight: torch.Tensor, with_entropy: bool) -> None:
    """Forward and backward of a policy gradient, and of an entropy bonus."""
    targets = torch.arange(len(hidden), device=hidden.device) % len(weight)
    log_probs, entropy = head(hidden, weight, targets, torch.full_like(targets, 0.9, dtype=torch.float32), with_entropy)
    loss = log_probs.sum()
    (loss if entropy is None else loss + 0.01 * entropy.sum()).backward()


def leaf(rows: int, columns: int, like: argparse.Namespace, scale: float) -> torch.Tensor:
    """Filled in place: a copy would count among the peaks."""
    return torch.empty(rows, columns, dtype=getattr(torch, like.dtype), device=like.device).normal_(std=scale).requires_grad_()


def measure(chosen: argparse.Namespace) -> tuple[float, float]:
    """In a process of its own: MiB at the peak, and seconds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    on_gpu = chosen.device == "cuda"
    head = SIDES[chosen.side]
    hidden, weight = leaf(chosen.rows, chosen.hidden, chosen, 1.0), leaf(chosen.vocab, chosen.hidden, chosen, 0.02)
    # What libraries take and do once, on a GPU with the memory of a whole step too, which is then at hand.
    step(head, hidden[:8].detach().requires_grad_(), (weight if on_gpu else weight[:512]).detach().requires_grad_(), chosen.entropy)
    before = memory_now(on_gpu)
    start = clock(on_gpu)
    step(head, hidden, weight, chosen.entropy)
    seconds = clock(on_gpu) - start
    return (memory_peak(on_gpu) - before - weight.numel() * weight.element_size()) / MIB, seconds


def memory_now(on_gpu: bool) -> int:
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def memory_peak(on_gpu: bool) -> int:
    return torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clock(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def in_a_process(side: str) -> tuple[float, float]:
    """MiB and seconds of one step."""
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], f"--side={side}"], stdout=subprocess.PIPE, check=True)
    mib, seconds = json.loads(done.stdout)
    return mib, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--rows", type=int, default=2048, help="positions whose log-probs are taken (default: %(default)s)")
    parser.add_argument("--entropy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns (default: %(default)s)")
    parser.add_argument("--side", choices=SIDES, help="measure this side in this process")
    chosen = parser.parse_args()
    if chosen.side:
        print(json.dumps(measure(chosen)))
        return
    rounds = [{side: in_a_process(side) for side in SIDES} for _ in range(chosen.rounds)]
    mib, seconds = ({side: statistics.median(found[side][number] for found in rounds) for side in SIDES} for number in (0, 1))
    result = {
        "name": "logprob_memory",
        "ours": round(mib["ours"], 1),
        "peer": round(mib["peer"], 1),
        "unit": "MiB",
        "ratio": round(mib["peer"] / mib["ours"], 2),
        "time_ratio": round(statistics.median(found["peer"][1] / found["ours"][1] for found in rounds), 3),
        "ours_s": round(seconds["ours"], 2),
        "peer_s": round(seconds["peer"], 2),
        "counted": "peak of forward and backward beyond hidden states, weight and weight gradient",
        "peer_is": f"{chosen.rows} x {chosen.vocab} logits at once, hidden {chosen.hidden}, {chosen.dtype}, {chosen.device}, "
        f"with{'' if chosen.entropy else 'out'} entropy",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
