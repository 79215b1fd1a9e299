"""What the schedulers cost: CPU per sample, and memory per request in flight, up to 100,000 requests in flight at a time, through Ray.

The rollout service's own schedulers and router run in an actor; engines are actors that hold every request until all of them are in flight,
and then answer at once. Scores are there at once. What is measured is the service's process: its CPU time from asking for the batch to
having it, over the samples; and how much its memory has grown when all requests are in flight, over their number. `bounded` is the same
as runs have it, where engines are known to take so many requests at a time: of a batch of twice as many samples the others are started as
those before them end. `ratio` is 150 microseconds, the aim, over the CPU per sample at the greatest number, without a bound.

`--turns 8` plays episodes of so many turns instead, 1,000 to 20,000 in flight, each with 50 ms for its environment after a response, and
reports the CPU per turn (aim: 300 microseconds, the same at each number). The environment runs in the service: what messages between its
worker and the service cost is in bench/episodes.py.

    .venv/bin/python bench/scheduler_overhead.py [--quick] [--turns 8]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
AIM_US, AIM_KB, AIM_TURN_US = 150, 4.0, 300
TOOL_S, TOOL_TOKENS = 0.05, 16
GROUP, ENGINES, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 4, 64, 256
LARGEST_ANSWER = 4096
"""Turns in one answer of an engine."""


class HoldingEngine:
    """Has the methods of an InferWorker that the service calls."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.open = asyncio.Event()
        self.flows = False
        """Requests are answered as they come."""

    async def submit(self, requests: list[Any], frozen: bool) -> None:
        self.requests += requests
        if self.flows:
            self.open.set()

    async def held(self) -> int:
        return len(self.requests)

    async def let_go(self, flows: bool) -> None:
        self.flows = flows
        if flows:
            self.open.set()
        else:
            self.open.clear()

    async def collect(self, most_blocks: int) -> tuple[Any, ...]:
        from roll_lite.data.samples import FinishReason, TokenRow, Turn, VersionSpan
        from roll_lite.scheduler.engines import Collected

        await self.open.wait()
        answered, self.requests = self.requests[:LARGEST_ANSWER], self.requests[LARGEST_ANSWER:]
        if not self.requests:
            self.open.clear()
        row, spans = TokenRow(0, 0, PROMPT_TOKENS + RESPONSE_TOKENS), (VersionSpan(0, 1),)
        turns = [Turn(one.request_id, RESPONSE_TOKENS, "42", FinishReason.STOP, spans, tokens=row) for one in answered]
        return Collected(turns), *[None] * most_blocks

    async def abort(self, request_ids: list[str]) -> None:
        """There is none that would be aborted."""


class Prompts:
    asked = 0

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int, /) -> Any:
        from roll_lite.data.samples import Prompt

        self.asked += 1
        return Prompt("toy", index, "6*7=", tuple(range(PROMPT_TOKENS)), "42")


class AllRight:
    capacity = 1

    async def score(self, item: Any) -> Any:
        from roll_lite.data.samples import Score

        return Score(1.0)


class Service:
    """`slots`: requests that an engine takes at a time; None: as many as come. `turns`: of an episode; 1 is a response alone."""

    def __init__(self, engines: list[Any], slots: int | None, turns: int) -> None:
        from roll_lite.workers.rollout import GC_THRESHOLDS

        self.engines, self.slots, self.turns = engines, slots, turns
        self.prompts = Prompts()
        self.service = self.made(self.prompts)
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    def made(self, prompts: Prompts) -> Any:
        from roll_lite.data.prompts import PromptOrder
        from roll_lite.data.samples import Sampling
        from roll_lite.scheduler.domain import Domain
        from roll_lite.scheduler.router import Router
        from roll_lite.scheduler.runner import one_response
        from roll_lite.scheduler.service import RolloutService
        from roll_lite.workers.infer import RemoteEngine

        sampling = Sampling(1.0, self.turns * (RESPONSE_TOKENS + TOOL_TOKENS))
        domain = Domain(
            "toy",
            prompts,
            PromptOrder(1_000_000, 1, "toy"),
            sampling,
            GROUP,
            1.0,
            AllRight(),
            episode=self.play if self.turns > 1 else one_response,
        )
        clients = [RemoteEngine(f"engine {number}", engine) for number, engine in enumerate(self.engines)]
        return RolloutService([domain], Router(clients, timeout_s=3600.0, engine_slots=self.slots), retries=0)

    async def play(self, prompt: Any, conversation: Any) -> None:
        await conversation.respond(prompt.token_ids)
        for turn in range(1, self.turns):
            await asyncio.sleep(TOOL_S)
            await conversation.respond((0,) * TOOL_TOKENS, turn, turn - 1)

    async def warm_up(self) -> None:
        """With a service of its own: batches of one service are all of a size."""
        await self.made(Prompts()).next_batch(ENGINES)

    async def next_batch(self, prompts: int) -> tuple[float, int]:
        """CPU seconds, and samples."""
        before = time.process_time()
        result = await self.service.next_batch(prompts)
        return time.process_time() - before, sum(len(group.samples) for group in result.groups)

    async def memory_kb(self) -> tuple[float, int]:
        """And samples that have been started."""
        import psutil

        gc.collect()
        return float(psutil.Process().memory_info().rss) / 1024, self.prompts.asked * GROUP


def measure(samples: int, bounded: bool, turns: int = 1) -> dict[str, float]:
    """With actors of their own: what one number leaves behind in memory does not count for the next."""
    import ray

    from roll_lite.scheduler.router import READY_SHARE

    slots = int(samples / ENGINES / (1 + READY_SHARE)) if bounded else None
    engines = [ray.remote(HoldingEngine).options(max_concurrency=64).remote() for _ in range(ENGINES)]  # type: ignore[attr-defined]
    service = ray.remote(Service).options(max_concurrency=64).remote(engines, slots, turns)  # type: ignore[attr-defined]
    let_go(engines, flows=True)
    ray.get(service.warm_up.remote())
    let_go(engines, flows=False)
    before, _ = ray.get(service.memory_kb.remote())
    wanted = 2 * samples if bounded else samples
    pending = service.next_batch.remote(wanted // GROUP)
    until_held(engines, ENGINES * (slots + int(slots * READY_SHARE)) if slots else samples)
    in_flight, started = ray.get(service.memory_kb.remote())
    let_go(engines, flows=True)
    seconds, delivered = ray.get(pending)
    assert delivered == wanted and (bounded or started == samples)
    for actor in (*engines, service):
        ray.kill(actor)
    return {"cpu_us": seconds / wanted / turns * 1e6, "kb": (in_flight - before) / started}


def rounded(case: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in case.items()}


def until_held(engines: list[Any], requests: int) -> None:
    import ray

    while sum(ray.get([engine.held.remote() for engine in engines])) < requests:
        time.sleep(0.05)


def let_go(engines: list[Any], flows: bool) -> None:
    import ray

    ray.get([engine.let_go.remote(flows) for engine in engines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small number of requests")
    parser.add_argument("--turns", type=int, default=1, help="turns of an episode")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    from roll_lite.config.schema.run import RayConfig
    from roll_lite.distributed.ray_session import ray_session

    of_turns = chosen.turns > 1
    numbers = (800,) if chosen.quick else (1_000, 5_000, 20_000) if of_turns else (1_000, 10_000, 100_000)
    limits = ("unbounded",) if of_turns else ("unbounded", "bounded")
    aim = AIM_TURN_US if of_turns else AIM_US
    cases: dict[int, dict[str, dict[str, float]]] = {}
    with ray_session(RayConfig(object_store_mb=200 if chosen.quick else 500), None):
        for samples in numbers:
            cases[samples] = {name: rounded(measure(samples, name == "bounded", chosen.turns)) for name in limits}
            print(f"{samples} in flight:", cases[samples], flush=True)
    worst = cases[numbers[-1]]["unbounded"]
    report = {
        "name": "scheduler_overhead",
        "ours": round(worst["cpu_us"], 1),
        "peer": aim,
        "peer_is": "the aim",
        "unit": f"microseconds of the rollout service's CPU per {'turn' if of_turns else 'sample'}",
        "ratio": round(aim / worst["cpu_us"], 3),
        "kb_per_request_in_flight": round(worst["kb"], 2),
        "kb_aim": AIM_KB,
        "cases": cases,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
