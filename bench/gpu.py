"""What one GPU is used for: training, generating, weight updates, and a whole step of a small run, each beside its limit.

- train: TFLOP/s of MegatronStrategy.train_step on packed rows, against those of large matrix products in the same dtype (`ratio` is the
  MFU relative to what the device was seen to do);
- sync: bytes/s of a whole weight update to one receiver, by the transport that `auto` chooses, against a copy of the same bytes;
- rollout: tokens/s of the streaming engine against the engine's own offline call (bench/engines.py);
- step: median seconds of a step of the demo's run after its first, by phase.

Parts run one after the other in processes of their own. Without a GPU it is measured on the CPU, which is said; without arguments
then only the first two, on a small model.

    python bench/gpu.py [--parts train sync rollout step] [--hidden 2048] [--layers 16] [--tokens 16384] [--rounds 5] [--engine vllm]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 512
"""Tokens of the longest row that trains."""
MATRIX = {"cuda": 8192, "cpu": 512}
QUICK = ["--parts", "train", "sync", "--hidden", "128", "--layers", "2", "--tokens", "512", "--rounds", "1"]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_name() -> str:
    return "bfloat16" if device().type == "cuda" else "float32"


def seconds_of(work: Callable[[], Any], rounds: int) -> float:
    """Median; the first round warms up."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        if device().type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def product_flops(rounds: int) -> float:
    """FLOP/s of large matrix products."""
    size = MATRIX[device().type]
    left, right = (torch.randn(size, size, device=device(), dtype=getattr(torch, dtype_name())) for _ in range(2))
    return float(2 * size**3 / seconds_of(lambda: left @ right, rounds))


def train(chosen: argparse.Namespace) -> dict[str, float]:
    from train import OPTIMIZER, make_rows, one_rank, policy_gradient, tail

    from roll_lite.data.microbatch import TokenBudget

    heads = max(1, chosen.hidden // 64)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": LENGTH}
    lengths = tail(max(2, 2 * chosen.tokens // LENGTH), LENGTH, 2.0)
    with one_rank(OPTIMIZER, chosen.hidden, chosen.layers, dtype_name(), **sizes) as (strategy, _):
        rows = make_rows(lengths, prompt=0)
        budget = TokenBudget(chosen.tokens, attention_parity_tokens=strategy.layout.attention_parity_tokens)

        def step() -> None:
            strategy.train_step(rows, policy_gradient, ["log_probs"], strategy.plan(rows.lengths, budget))

        seconds = seconds_of(step, chosen.rounds)
        weights = sum(parameter.numel() for parameter in strategy._model.parameters())
        peak = product_flops(chosen.rounds)
    # Forward and backward: three products of each weight with each token; of attention what a token looks back at.
    flops = 6 * weights * sum(lengths) + 6 * chosen.layers * chosen.hidden * sum(length**2 for length in lengths)
    ours = flops / seconds
    return {"tflops": ours / 1e12, "product_tflops": peak / 1e12, "mfu": ours / peak, "tokens_per_second": sum(lengths) / seconds}


def sync(chosen: argparse.Namespace) -> dict[str, float]:
    from weight_sync import processes

    sizes = argparse.Namespace(hidden=chosen.hidden, layers=chosen.layers, bucket_mb=256, engines=[1])
    with processes(sizes) as bench:
        gigabytes = sum(tensor.nbytes for tensor in bench.export.tensors) / 1e9
        update, copy, _ = bench.measure("auto", 1, chosen.rounds)
    return {"gigabytes_per_second": gigabytes / update, "copy_gigabytes_per_second": gigabytes / copy, "ratio": copy / update}


def rollout(chosen: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "bench/engines.py", f"--rounds={chosen.rounds}", f"--engines={chosen.engine}"]
    report = json.loads(said_by(command).splitlines()[-1])
    return {name: report[name] for name in ("ours", "peer", "ratio")}


def step(chosen: argparse.Namespace) -> dict[str, float]:
    steps = chosen.rounds + 1
    with tempfile.TemporaryDirectory() as folder:
        run = [f"steps={steps}", "checkpoint.export_model=false", "validation.enabled=false", f"model.dtype={dtype_name()}"]
        command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_grpo", f"run_dir={folder}", *run]
        said_by([*command, f"actor_infer.strategy.name={chosen.engine}", "actor_infer.strategy.gpu_memory_utilization=0.4"])
        lines = (Path(folder) / "latest" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    later = [record for record in map(json.loads, lines) if "time/step" in record][1:]
    phases = sorted({name for record in later for name in record if name.startswith("time/")})
    return {phase: statistics.median(record[phase] for record in later if phase in record) for phase in phases}


def said_by(command: list[str]) -> str:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": ":".join(paths)})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


PARTS = {"train": train, "sync": sync, "rollout": rollout, "step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch; a step has about as many (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    chosen = parser.parse_args(QUICK if sys.argv[1:] == ["--quick"] or (len(sys.argv) == 1 and device().type == "cpu") else None)
    name = torch.cuda.get_device_name() if device().type == "cuda" else "CPU, 1 thread (no GPU was found)"
    print(f"measured on: {name}", flush=True)
    found: dict[str, dict[str, float]] = {}
    for part in chosen.parts:
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            found[part] = {key: round(value, 4) for key, value in alone.submit(PARTS[part], chosen).result().items()}
        print(part, found[part], flush=True)
    first = found.get("train", {})
    report = {
        "name": "gpu",
        "device": name,
        "ours": first.get("tflops", 0),
        "peer": first.get("product_tflops", 0),
        "ratio": first.get("mfu", 0),
        "unit": "TFLOP/s",
        "peer_is": f"large matrix products in {dtype_name()}",
        **found,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
