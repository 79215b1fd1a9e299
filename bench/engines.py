"""Tokens per second of each strategy's streaming path against the same engine's own offline batch call.

Both sides run in one program, in turns, on engines with the same arguments: the strategy gets one request per sample, each of which comes
back as it finishes, with lengths as the model chooses them; the bare engine then gets the very same prompts in one call, with those
lengths prescribed. A random model of about 25M parameters. `ratio` is the worse of the two.

    .venv/bin/python bench/engines.py [--rounds 4] [--requests 128] [--engines vllm sglang]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


BARE_SGLANG = "ROLL_LITE_BENCH_BARE_SGLANG"
if BARE_SGLANG in os.environ:  # the bare engine's process, and those that SGLang spawns from it
    from roll_lite.distributed.strategy.sglang.compat import cpu_stubs

    if not on_gpu():
        cpu_stubs.install()

ENGINES = ("vllm", "sglang")
MAX_MODEL_LEN = 160
MAX_TOKENS = 128
AIM = 0.9
Work = list[tuple[list[int], int]]
"""Prompt and response length of each request."""


def options(requests: int) -> dict[str, Any]:
    return {"max_running_requests": requests, "kv_cache_mb": 512, "enforce_eager": True, "gpu_memory_utilization": 0.4}


def strategy_of(engine: str, model: Any, requests: int) -> Any:
    from roll_lite.config.schema.models import SglangStrategyConfig, VllmStrategyConfig
    from roll_lite.distributed.strategy.base import EngineSpec
    from roll_lite.distributed.strategy.build import build_engine

    config = {"vllm": VllmStrategyConfig, "sglang": SglangStrategyConfig}[engine]
    return build_engine(EngineSpec(model, config(**options(requests)), MAX_MODEL_LEN))


async def streamed(strategy: Any, prompts: Sequence[list[int]], number: int) -> tuple[float, Work]:
    from roll_lite.data.samples import GenerationRequest, Sampling

    sampling = Sampling(temperature=1.0, max_tokens=MAX_TOKENS)
    requests = [GenerationRequest(f"{number}/{i}", tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
    lengths = {}
    started = time.perf_counter()
    for completion in await asyncio.gather(*map(strategy.generate, requests)):
        assert completion.error is None, completion.error
        lengths[completion.request_id] = len(completion.token_ids)
    seconds = time.perf_counter() - started
    return seconds, [(list(request.prompt_ids), lengths[request.request_id]) for request in requests]


def bare_sglang(arguments: dict[str, Any], pipe: Connection) -> None:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**arguments)
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        sampling = [{"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True} for _, length in work]
        started = time.perf_counter()
        outputs = engine.generate(input_ids=[prompt for prompt, _ in work], sampling_params=sampling, return_logprob=True)
        seconds = time.perf_counter() - started
        assert [len(output["output_ids"]) for output in outputs] == [length for _, length in work]
        pipe.send(seconds)
    engine.shutdown()


def start_bare(engine: str, model: Any, requests: int, pipe: Connection) -> Any:
    """The engine alone, with the strategy's arguments but for its weight transfer, in a process of its own."""
    from rollout import bare_engine

    from roll_lite.config.schema.models import SglangStrategyConfig, VllmStrategyConfig
    from roll_lite.distributed.strategy.sglang.compat import settings as sglang
    from roll_lite.distributed.strategy.vllm.compat import settings as vllm

    cuda = on_gpu()
    context = multiprocessing.get_context("spawn")
    if engine == "vllm":
        arguments = vllm.engine_arguments(model, VllmStrategyConfig(**options(requests)), MAX_MODEL_LEN, 1, cuda=cuda)
        for ours in ("worker_extension_cls", "enable_log_requests"):
            arguments.pop(ours)
        process = context.Process(target=bare_engine, args=(str(model.path), arguments, pipe))
        process.start()
        return process
    arguments = sglang.engine_arguments(model, SglangStrategyConfig(**options(requests)), MAX_MODEL_LEN, 1, cuda=cuda)
    before = dict(os.environ)
    os.environ.update(sglang.engine_environment(1, cuda=cuda).variables() | {BARE_SGLANG: "1"})
    try:
        process = context.Process(target=bare_sglang, args=(arguments, pipe))
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return process


async def measure(engine: str, folder: Path, rounds: int, requests: int) -> dict[str, float]:
    from roll_lite.config.schema.models import ModelConfig

    model = ModelConfig(path=folder, dtype="bfloat16" if on_gpu() else "float32")
    pipe, far_end = multiprocessing.get_context("spawn").Pipe()
    bare = start_bare(engine, model, requests, far_end)
    assert pipe.recv() == "ready"
    strategy = strategy_of(engine, model, requests)
    await strategy.initialize()
    prompts = [[3 + (7 * i + j) % 20 for j in range(8)] for i in range(requests)]
    pairs = []
    try:
        for number in range(rounds + 1):
            seconds, work = await streamed(strategy, prompts, number)
            pipe.send(work)
            bare_seconds = await asyncio.to_thread(pipe.recv)
            tokens = sum(length for _, length in work)
            if number:  # the first round warms both sides up
                pairs.append((tokens / seconds, tokens / bare_seconds))
    finally:
        pipe.send(None)
        await strategy.shutdown()
        bare.join(30)
        bare.kill()
    return {
        "ours": statistics.median(mine for mine, _ in pairs),
        "peer": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    chosen = parser.parse_args()
    from rollout import random_model

    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch) / "random")
        for engine in chosen.engines:
            results[engine] = asyncio.run(measure(engine, folder, chosen.rounds, chosen.requests))
            print(engine, {name: round(value, 3) for name, value in results[engine].items()}, f"aim {AIM}", flush=True)
    worse = min(results.values(), key=lambda result: result["ratio"])
    report = {
        "name": "engines",
        "ours": round(worse["ours"], 1),
        "peer": round(worse["peer"], 1),
        "unit": "generated tokens/s",
        "ratio": round(worse["ratio"], 3),
        **{f"{engine}_{name}": round(value, 3) for engine, result in results.items() for name, value in result.items()},
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
