"""What one GPU is used for: training, generating, weight updates, and a whole step of a small run, each beside its limit.

- train: TFLOP/s of MegatronStrategy.train_step on packed rows, against those of large matrix products in the same dtype (`of_products`)
  and against the data sheet's where the device is known (`mfu`); FLOPs as `actor/mfu` counts them, without what is recomputed;
- head: milliseconds of the output layer's log-probs, forward and backward, against its three matrix products, by the logits of a block;
- offload: seconds until all of a trainer's state is on the host, and back on the device, the first time (which pins memory) and later;
- sync: bytes/s of a whole weight update to one receiver, by the transport that `auto` chooses (CUDA IPC on a GPU), against a copy of the
  same bytes;
- ipc: bytes/s of a copy by CUDA IPC alone, and what stays of 1 GB that two processes have read, of which one was killed while it did;
- nccl: memory and broadcast of a communicator of one rank, and seconds until an abort ends one whose other rank never comes;
- rollout: tokens/s of the streaming engine against the engine's own offline call (bench/engines.py);
- step: median seconds of a step of the demo's run after its first, by phase.

The first three are of one tensor rank of Qwen2.5-7B on two (`7b_tp2`): half of its heads, of its MLP and of its 152,064 words, with random
weights, Qwen3's norms of queries and keys (whose config names a head's size), and no exchange with the other rank. State is not sharded
over data ranks, so that there are 20 of 28 layers (98 GiB with a step, by the count of `roll-lite plan`), or 10 (55 GiB) on a GPU with less
than 120 GB. Parts run one after the other in processes of their own. Without a GPU it is measured on the CPU, which is said; without
arguments then only what needs no engine, on a small model. Parts that want a GPU or an engine which is not there are skipped, and say so.

    python bench/gpu.py [--parts train head offload sync ipc nccl rollout step] [--shape 7b_tp2] [--layers 20] [--tokens 16384] [--micro 2]
                        [--recompute none] [--rounds 5] [--engine vllm]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
MATRIX = {"cuda": 8192, "cpu": 512}
ENGINE_PARTS, GPU_PARTS = ("rollout", "step"), ("ipc", "nccl")
QUICK = ["--parts", "train", "head", "offload", "sync", *GPU_PARTS, "--shape", "small", "--tokens", "512", "--rounds", "1"]
SHAPES: dict[str, dict[str, int]] = {
    "7b_tp2": {
        "hidden_size": 3584,
        "intermediate_size": 9472,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 76_032,
        "num_hidden_layers": 20,
    },
    "small": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4096,
        "num_hidden_layers": 2,
    },
}
LONGEST = {"7b_tp2": 4096, "small": 128}
"""Tokens of the longest row that trains."""
SYNCED = {"cuda": (2048, 16), "cpu": (128, 2)}
"""Hidden size and layers of the model that `sync` sends."""
LARGE_GPU = 120e9
"""Bytes of memory that all layers take."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_name() -> str:
    return "bfloat16" if device().type == "cuda" else "float32"


def wait() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], rounds: int) -> float:
    """Median; the first round warms up."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device(), dtype=getattr(torch, dtype_name()))


def product_flops(rounds: int) -> float:
    """FLOP/s of large matrix products."""
    size = MATRIX[device().type]
    left, right = random_tensor(size, size), random_tensor(size, size)
    return float(2 * size**3 / seconds_of(lambda: left @ right, rounds))


@contextmanager
def one_rank(chosen: argparse.Namespace) -> Iterator[Any]:
    """A strategy of the chosen shape, whose random weights are made on the device."""
    from roll_lite.config.schema.models import MegatronStrategyConfig, ModelConfig, OptimizerConfig
    from roll_lite.distributed.strategy.base import ModelSpec
    from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

    class RandomWeights(MegatronStrategy):
        @torch.no_grad()
        def _load_weights(self, bindings: Any, *_: Any) -> None:
            for binding in bindings:
                binding.parameter.fill_(1.0) if binding.parameter.dim() == 1 else binding.parameter.normal_(0, 0.02)

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}
        shape = SHAPES[chosen.shape] | {"num_hidden_layers": layers_of(chosen)}
        (folder / "config.json").write_text(json.dumps(kind | shape | {"tie_word_embeddings": False, "hidden_act": "silu"}))
        backend = "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
        model = ModelConfig(path=folder, dtype=dtype_name())  # type: ignore[arg-type]
        layout = MegatronStrategyConfig(recompute=chosen.recompute)
        strategy = RandomWeights(ModelSpec(model, layout, "model.path", OptimizerConfig(lr=1e-6)))
        strategy.initialize()
        yield strategy
        dist.destroy_process_group()


def layers_of(chosen: argparse.Namespace) -> int:
    layers = SHAPES[chosen.shape]["num_hidden_layers"]
    if chosen.layers is not None:
        return int(chosen.layers)
    small = device().type == "cuda" and torch.cuda.get_device_properties(0).total_memory < LARGE_GPU
    return layers // 2 if small else layers


def work_of(strategy: Any, chosen: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[], Any], list[int], int]:
    """A training step and a forward pass over the same rows, the rows' lengths, and the number of micro-batches."""
    from train import make_rows, policy_gradient, tail

    from roll_lite.data.microbatch import TokenBudget

    longest = LONGEST[chosen.shape]
    lengths = tail(max(2, 2 * chosen.micro * chosen.tokens // longest), longest, 2.0)
    rows = make_rows(lengths, prompt=0)
    plan = strategy.plan(rows.lengths, TokenBudget(chosen.tokens, attention_parity_tokens=strategy.layout.attention_parity_tokens))

    def step() -> None:
        strategy.train_step(rows, policy_gradient, ["log_probs"], plan)

    return step, lambda: strategy.forward(rows, ["log_probs"], plan), lengths, plan.count


def train(chosen: argparse.Namespace) -> dict[str, float]:
    from roll_lite.workers.phases import PhaseWork

    with one_rank(chosen) as strategy:
        step, forward, lengths, micro_batches = work_of(strategy, chosen)
        seconds, passed = seconds_of(step, chosen.rounds), seconds_of(forward, 1)
        peak = torch.cuda.max_memory_allocated() if device().type == "cuda" else 0
        flops = strategy._hf.flops(lengths, sum(lengths) - len(lengths), 3)
    ours, products = flops / seconds, product_flops(chosen.rounds)
    sheet = PhaseWork(torch.cuda.get_device_name()).peak_tflops if device().type == "cuda" else None
    return {
        "tflops": ours / 1e12,
        "product_tflops": products / 1e12,
        "of_products": ours / products,
        **({"mfu": ours / 1e12 / sheet, "peak_gib": peak / 2**30} if sheet else {}),
        "tokens_per_second": sum(lengths) / seconds,
        "seconds": seconds,
        "forward_seconds": passed,
        "layers": layers_of(chosen),
        "micro_batches": micro_batches,
    }


def head(chosen: argparse.Namespace) -> dict[str, float]:
    from roll_lite.distributed.strategy.megatron.log_probs import log_probs_and_entropy
    from roll_lite.distributed.strategy.megatron.vocabulary import BLOCK_LOGITS, Vocabulary

    words, hidden_size, rows = SHAPES[chosen.shape]["vocab_size"], SHAPES[chosen.shape]["hidden_size"], chosen.tokens
    hidden, weight = random_tensor(rows, hidden_size).requires_grad_(), random_tensor(words, hidden_size).mul_(0.02).requires_grad_()
    targets, temperatures = torch.randint(0, words, (rows,), device=device()), torch.ones(rows, device=device())

    def ours(logits: int) -> None:
        vocabulary = Vocabulary(words, words, None, targets, temperatures, block_words=max(256, logits // rows))
        log_probs_and_entropy(hidden, weight, vocabulary)[0].sum().backward()
        hidden.grad = weight.grad = None

    usual = BLOCK_LOGITS[device().type]
    found = {f"ms_{logits >> 20}m_logits": 1e3 * seconds_of(partial(ours, logits), chosen.rounds) for logits in (usual, 4 * usual)}
    gradient = random_tensor(rows, words)
    with torch.no_grad():
        products = seconds_of(lambda: (hidden @ weight.t(), gradient @ weight, gradient.t() @ hidden), chosen.rounds)
    return {"products_ms": 1e3 * products, **found}


def offload(chosen: argparse.Namespace) -> dict[str, float]:
    from roll_lite.distributed.strategy.base import StateGroup

    out, back, moved = [], [], {}
    with one_rank(chosen) as strategy:
        step, *_ = work_of(strategy, chosen)
        for _ in range(chosen.rounds + 1):
            step()
            wait()
            start = time.perf_counter()
            moved = strategy.offload(StateGroup)
            out.append(time.perf_counter() - start)
            stays = torch.cuda.memory_allocated() if device().type == "cuda" else 0
            start = time.perf_counter()
            strategy.load(StateGroup)
            wait()
            back.append(time.perf_counter() - start)
    gigabytes, usual, returned = moved["out"] / 1e9, statistics.median(out[1:]), statistics.median(back[1:])
    return {
        "gigabytes": gigabytes,
        "first_seconds": out[0],
        "seconds": usual,
        "back_seconds": returned,
        "gigabytes_per_second": gigabytes / usual,
        "back_gigabytes_per_second": gigabytes / returned,
        "stays_gigabytes": stays / 1e9,
    }


def sync(chosen: argparse.Namespace) -> dict[str, float]:
    from weight_sync import processes

    hidden, layers = SYNCED[device().type]
    sizes = argparse.Namespace(hidden=hidden, layers=layers, bucket_mb=256, engines=[1])
    with processes(sizes) as bench:
        gigabytes = sum(tensor.nbytes for tensor in bench.export.tensors) / 1e9
        update, copy, phases = bench.measure("auto", 1, chosen.rounds)
    return {
        "gigabytes_per_second": gigabytes / update,
        "copy_gigabytes_per_second": gigabytes / copy,
        "ratio": copy / update,
        "gigabytes": gigabytes,
        **{f"{phase}_seconds": seconds for phase, seconds in phases.items()},
    }


def ipc(_: argparse.Namespace) -> dict[str, float]:
    from roll_lite.distributed.weight_sync.group import Home
    from roll_lite.distributed.weight_sync.memory import (
        ExportedMemory,
        ExportedSegment,
        free_abandoned_exports,
        name_of_export,
        wait_for_device,
    )

    before, home, homes, found = free_bytes(), Home.here(), [], {}
    segment = ExportedSegment(1 << 30, 2)
    segment.whole.fill_(7)
    wait_for_device(segment.whole)
    for place in range(2):
        process, told = started(read_export, segment.handle, place)
        seconds, right = told.recv()
        process.join()
        assert right and process.exitcode == (-signal.SIGKILL if place else 0)
        homes.append(replace(home, process=process.pid or 0))
        found["gigabytes_per_second"] = segment.whole.nbytes / 1e9 / seconds
    names = [name_of_export(segment.handle, place) for place in range(2)]
    exported = [ExportedMemory(*given) for given in zip(homes, segment.exports, names, strict=True)]
    del segment
    free_abandoned_exports(exported, homes[:1], lambda _: True)
    exported.clear()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return found | {"stays_gigabytes": (before - free_bytes()) / 1e9}


def read_export(told: Connection, handle: str, place: int) -> None:
    """In a process of its own; the second one dies with the memory open."""
    from roll_lite.distributed.weight_sync.memory import open_exported

    tensor = open_exported(handle, place)
    copy = torch.empty_like(tensor)
    told.send((seconds_of(partial(copy.copy_, tensor), 5), bool((copy == 7).all())))
    if place:
        os.kill(os.getpid(), signal.SIGKILL)
    del tensor
    torch.cuda.ipc_collect()


def nccl(_: argparse.Namespace) -> dict[str, float]:
    before, tensor = free_bytes(), torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    group = communicator(1)
    seconds = seconds_of(lambda: broadcast(group, tensor), 5)
    taken = before - free_bytes() - tensor.nbytes
    group.abort()
    process, told = started(abort_in_the_making)
    aborted = told.recv()
    process.join()
    return {"communicator_megabytes": taken / 1e6, "gigabytes_per_second": tensor.nbytes / 1e9 / seconds, **aborted}


def communicator(size: int) -> Any:
    """As an update's: torch's watchdog does not end the process."""
    from torch.distributed import PrefixStore, ProcessGroupNCCL, TCPStore  # type: ignore[attr-defined]

    from roll_lite.files import changed_environment

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=300)
    with changed_environment({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
        return ProcessGroupNCCL(PrefixStore("gpu", TCPStore("127.0.0.1", 0, is_master=True)), 0, size, options)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()  # type: ignore[attr-defined]
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def abort_in_the_making(told: Connection) -> None:
    """In a process of its own: seconds until an abort returns, and until the thread that makes the communicator does; at most 20 each."""
    group, tensor = communicator(2), torch.ones(1, device="cuda")
    making = threading.Thread(target=broadcast, args=(group, tensor), daemon=True)
    making.start()
    time.sleep(5)
    found = {}
    for name, thread in (("abort_seconds", threading.Thread(target=group.abort, daemon=True)), ("maker_seconds", making)):
        start = time.perf_counter()
        if thread is not making:
            thread.start()
        thread.join(20)
        found[name] = time.perf_counter() - start
    told.send(found)
    os._exit(0)  # threads may be stuck


def started(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process, and what it tells."""
    context = get_context("spawn")
    told, tells = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(tells, *arguments))
    process.start()
    tells.close()
    return process, told


def free_bytes() -> int:
    wait()
    return int(torch.cuda.mem_get_info()[0])


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


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "train": train,
    "head": head,
    "offload": offload,
    "sync": sync,
    "ipc": ipc,
    "nccl": nccl,
    "rollout": rollout,
    "step": step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", choices=SHAPES, default="7b_tp2")
    parser.add_argument("--layers", type=int, help="(default: the shape's, half of them where memory is short)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches of a step, about (default: %(default)s)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    chosen = parser.parse_args(QUICK if sys.argv[1:] == ["--quick"] or (len(sys.argv) == 1 and device().type == "cpu") else None)
    name = torch.cuda.get_device_name() if device().type == "cuda" else "CPU, 1 thread (no GPU was found)"
    print(f"measured on: {name}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for part in chosen.parts:
        if part in ENGINE_PARTS and find_spec(chosen.engine) is None:
            found[part] = {"skipped": f"{chosen.engine} is not installed"}
        elif part in GPU_PARTS and device().type == "cpu":
            found[part] = {"skipped": "there is no GPU"}
        else:
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                found[part] = {key: round(value, 4) for key, value in alone.submit(PARTS[part], chosen).result().items()}
        print(part, found[part], flush=True)
    first = found.get("train", {})
    report = {
        "name": "gpu",
        "device": name,
        "shape": chosen.shape,
        "ours": first.get("tflops", 0),
        "peer": first.get("product_tflops", 0),
        "ratio": first.get("of_products", 0),
        "unit": "TFLOP/s",
        "peer_is": f"large matrix products in {dtype_name()}",
        **found,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
