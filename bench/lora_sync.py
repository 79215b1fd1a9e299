"""What it takes to send adapters alone, against weights with the adapters merged: the bytes and seconds of an update, and what the engine
then makes of it.

For each make of engine two of them, and two Megatron trainers of the same model with adapters beside all linear layers, one pair for each
way; all four processes compute with one thread. Updates take turns, and so do batches of requests: what an adapter costs is tokens per
second. `ratio` is seconds of an update with merged weights / of one with adapters alone, the smaller one of the makes'; `speed` is tokens
per second with adapters alone / with merged weights.

    .venv/bin/python bench/lora_sync.py [--rounds 5] [--hidden 512] [--layers 8] [--rank 16] [--engines vllm sglang]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import weight_sync
from weight_sync import HOST, TIMEOUT_S, Remote

MAX_TOKENS = 48
REQUESTS = 32
Way = Literal["merged", "adapter"]
WAYS: tuple[Way, ...] = ("merged", "adapter")


def adapters(rank: int, way: Way) -> Any:
    from roll_lite.config.schema.models import LoraConfig

    return LoraConfig(rank=rank, alpha=2 * rank, engines=way)


class Trainer(weight_sync.Trainer):
    """One rank with a random model and adapters."""

    def __init__(self, hidden: int, layers: int, rank: int, way: Way) -> None:
        super().__init__(hidden, layers, 64, adapters(rank, way))

    def model(self) -> Path:
        return self.folder / "model"


class Engine:
    """A strategy on an event loop of its own, which goes on between calls."""

    def __init__(self, make: str, model: Path, rank: int, way: Way) -> None:
        from roll_lite.config.schema.models import ModelConfig, SglangStrategyConfig, VllmStrategyConfig
        from roll_lite.distributed.strategy.base import EngineSpec
        from roll_lite.distributed.strategy.build import build_engine

        config = {"vllm": VllmStrategyConfig, "sglang": SglangStrategyConfig}[make](kv_cache_mb=256, gpu_memory_utilization=0.3)
        lora = adapters(rank, way) if way == "adapter" else None
        self.strategy = build_engine(EngineSpec(ModelConfig(path=model, dtype="float32"), config, 160, lora=lora))
        self.version = 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._await(self.strategy.initialize())

    def _await(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()

    def join(self, first_member: int, membership: Any) -> None:
        self._await(self.strategy.connect_weights(first_member, membership))

    def take(self, routes: Any) -> None:
        self.version += 1
        self._await(self.strategy.update_weights(routes, self.version))

    def generate(self) -> float:
        """Seconds for REQUESTS x MAX_TOKENS tokens."""
        started = time.perf_counter()
        self._await(self._generate())
        return time.perf_counter() - started

    async def _generate(self) -> None:
        from roll_lite.data.samples import GenerationRequest, Sampling

        sampling = Sampling(1.0, MAX_TOKENS, min_tokens=MAX_TOKENS)
        requests = [GenerationRequest(f"{time.perf_counter()}/{number}", (1 + number, 2, 3, 4), sampling) for number in range(REQUESTS)]
        for completion in await asyncio.gather(*map(self.strategy.generate, requests)):
            assert completion.error is None and len(completion.token_ids) == MAX_TOKENS, completion

    def leave(self) -> None:
        self._await(self.strategy.shutdown())


@contextmanager
def connected(make: str, way: Way, chosen: argparse.Namespace) -> Iterator[tuple[Remote, Remote, Any]]:
    """A trainer and an engine that have met, and the plan between them."""
    from roll_lite.distributed.weight_sync.plan import plan_transfers

    trainer = Remote(Trainer, chosen.hidden, chosen.layers, chosen.rank, way)
    trainer.call("described")
    export, port = trainer.result()
    trainer.call("model")
    model = trainer.result()
    engine = Remote(Engine, make, model, chosen.rank, way, starts_others=True)
    try:
        plan = plan_transfers(export, {0: 1})
        membership = plan.membership(1, "auto", HOST, port, TIMEOUT_S)
        trainer.call("join", plan, membership)
        engine.call("join", plan.first_member(0), membership)
        trainer.result(), engine.result()
        yield trainer, engine, plan
    finally:
        engine.end()
        trainer.end()


def update(trainer: Remote, engine: Remote, plan: Any) -> float:
    started = time.perf_counter()
    engine.call("take", plan.routes)
    trainer.call("send")
    trainer.result(), engine.result()
    return time.perf_counter() - started


def measure(make: str, chosen: argparse.Namespace) -> dict[str, dict[Way, float]]:
    """Megabytes and median seconds of an update, and tokens per second, of either way."""
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    generating: dict[Way, list[float]] = {way: [] for way in WAYS}
    with connected(make, "merged", chosen) as merged, connected(make, "adapter", chosen) as alone:
        pairs = dict(zip(WAYS, (merged, alone), strict=True))
        for _ in range(chosen.rounds + 1):
            for way, (trainer, engine, plan) in pairs.items():
                seconds[way].append(update(trainer, engine, plan))
                engine.call("generate")
                generating[way].append(engine.result())
        megabytes = {way: round(plan.nbytes / 1e6, 2) for way, (_, _, plan) in pairs.items()}
    # The first round touches all memory, and compiles, for the first time.
    tokens = {way: round(REQUESTS * MAX_TOKENS / statistics.median(generating[way][1:]), 1) for way in WAYS}
    return {"megabytes": megabytes, "seconds": {way: round(statistics.median(seconds[way][1:]), 4) for way in WAYS}, "tokens_per_s": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--engines", nargs="+", default=["vllm", "sglang"], choices=["vllm", "sglang"])
    chosen = parser.parse_args()
    found = {}
    for make in chosen.engines:
        found[make] = measure(make, chosen)
        print(f"{make}: {found[make]}", flush=True)
    ratios = {make: one["seconds"]["merged"] / one["seconds"]["adapter"] for make, one in found.items()}
    worst = min(ratios, key=lambda make: ratios[make])
    report = {
        "name": "lora_sync",
        "ours": found[worst]["seconds"]["adapter"],
        "peer": found[worst]["seconds"]["merged"],
        "peer_is": "an update with merged weights, the same engine",
        "unit": "seconds of an update",
        "ratio": round(ratios[worst], 2),
        "speed": {make: round(one["tokens_per_s"]["adapter"] / one["tokens_per_s"]["merged"], 2) for make, one in found.items()},
        "engines": found,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
