"""Bytes per second of a whole weight update, from a trainer to one, two and four engines on this machine, against copying them once.

The trainer is a MegatronStrategy with a model of half a gigabyte in a process of its own; each receiver is a process that does what a
worker of an engine does at least: it takes every bucket from its WeightReceiver and copies it into a model of its own. So an update is
everything from gathering the first tensor to the last one in place; what an engine does beyond that (packing matrices for its kernels) is
its own. The transports take turns round by round with a plain copy of the same bytes in the trainer's process.

`ratio` is that of shared memory to one engine: its bytes per second / those of the copy. `growth` is the time for so many engines over that
for one. `phases` are the seconds of the last update of each: of the trainer gather, copy and wait, of the slowest engine receive and load.
By gloo one engine receives, and the others on the machine read in its memory.
All processes compute with one thread, so more engines than free cores have to take turns.

    .venv/bin/python bench/weight_sync.py [--rounds 3] [--engines 1 2 4] [--hidden 1024] [--layers 6] [--bucket-mb 64]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from roll_lite.distributed.strategy.base import current_device
from roll_lite.distributed.weight_sync.memory import wait_for_device

TRANSPORTS = ("shared_memory", "gloo")
HOST = "127.0.0.1"
TIMEOUT_S = 120.0
VOCAB = 32_000


class Remote:
    """An object in a process of its own: `call` starts a method of it, `result` waits for what it returns."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, starts_others: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=not starts_others)
        self.process.start()

    def call(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.close()
        self.process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = make(*arguments)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            served.leave()
            os._exit(0)
        pipe.send(getattr(served, method)(*given))


class Trainer:
    """One rank with a random model."""

    def __init__(self, hidden: int, layers: int, bucket_mb: int, lora: Any = None) -> None:
        from train import one_rank

        from roll_lite.distributed.weight_sync.endpoints import WeightSender

        heads = hidden // 64
        self.scope = ExitStack()
        shape = {"vocab_size": VOCAB, "num_attention_heads": heads, "num_key_value_heads": heads}
        strategy, self.folder = self.scope.enter_context(one_rank(None, hidden, layers, lora=lora, **shape))
        self.sender = WeightSender(strategy, rank=0)
        self.export = self.sender.export_plan(bucket_mb << 20)
        self.port = self.sender.host(HOST, TIMEOUT_S)

    def described(self) -> tuple[Any, int]:
        return self.export, self.port

    def join(self, plan: Any, membership: Any) -> None:
        self.sender.connect(plan, membership)
        device = current_device()
        self.source = [torch.ones(tensor.shape, dtype=tensor.dtype, device=device) for tensor in self.export.tensors]
        self.copy = [torch.empty_like(tensor) for tensor in self.source]

    def send(self) -> dict[str, float]:
        self.sender.send()
        return dict(self.sender.seconds)

    def checksums(self) -> dict[str, str]:
        return self.sender.checksums([tensor.name for tensor in self.export.tensors])

    def leave(self) -> None:
        self.sender.leave()
        self.scope.close()

    def plain_copy(self) -> float:
        started = time.perf_counter()
        for ours, theirs in zip(self.source, self.copy, strict=True):
            theirs.copy_(ours)
        wait_for_device(theirs)
        return time.perf_counter() - started


class Engine:
    """One worker, whose model is a dictionary."""

    def __init__(self, export: Any) -> None:
        from roll_lite.distributed.weight_sync.endpoints import WeightReceiver

        torch.set_num_threads(1)
        self.receiver = WeightReceiver()
        self.model = {tensor.name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=current_device()) for tensor in export.tensors}

    def join(self, membership: Any, number: int) -> None:
        self.receiver.connect(membership, number)

    def leave(self) -> None:
        self.receiver.leave()

    def take(self, buckets: Any) -> dict[str, float]:
        for routes, following in zip(buckets, [*buckets[1:], []], strict=True):
            self.receiver.load(routes, lambda again: None, self._load, following)
        return self.receiver.finish(lambda: None)

    def checksums(self) -> dict[str, str]:
        from roll_lite.distributed.weight_sync.update import checksum

        return {name: checksum(tensor) for name, tensor in self.model.items()}

    def _load(self, arrived: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in arrived:
            self.model[name].copy_(tensor)


class Bench:
    def __init__(self, trainer: Remote, engines: list[Remote], export: Any, port: int) -> None:
        self.trainer, self.engines, self.export, self.port = trainer, engines, export, port
        self.epoch = 0

    def measure(self, transport: str, count: int, rounds: int) -> tuple[float, float, dict[str, float]]:
        """Seconds of an update to so many engines, and of a plain copy: medians; seconds by phase."""
        from roll_lite.distributed.weight_sync.group import largest
        from roll_lite.distributed.weight_sync.plan import by_bucket, plan_transfers

        engines = self.engines[:count]
        self.epoch += 1
        plan = plan_transfers(self.export, dict.fromkeys(range(count), 1))
        membership = plan.membership(self.epoch, transport, HOST, self.port, TIMEOUT_S)
        self.trainer.call("join", plan, membership)
        for number, engine in enumerate(engines):
            engine.call("join", membership.plain(), plan.first_member(number))
        for one in (self.trainer, *engines):
            one.result()
        buckets = [[route.plain() for route in routes] for routes in by_bucket(plan.routes)]
        seconds, copies = [], []
        for _ in range(rounds + 1):
            self.trainer.call("plain_copy")
            copies.append(self.trainer.result())
            started = time.perf_counter()
            for engine in engines:
                engine.call("take", buckets)
            self.trainer.call("send")
            phases = largest(one.result() for one in (self.trainer, *engines))
            seconds.append(time.perf_counter() - started)
        for one in (self.trainer, *engines):
            one.call("checksums")
        sent, *held = [one.result() for one in (self.trainer, *engines)]
        assert all(each == sent for each in held), f"{transport}: an engine does not hold what was sent"
        # The first round touches all memory for the first time.
        return statistics.median(seconds[1:]), statistics.median(copies[1:]), {name: round(value, 3) for name, value in phases.items()}


@contextmanager
def processes(chosen: argparse.Namespace) -> Iterator[Bench]:
    trainer = Remote(Trainer, chosen.hidden, chosen.layers, chosen.bucket_mb)
    trainer.call("described")
    export, port = trainer.result()
    engines = [Remote(Engine, export) for _ in range(max(chosen.engines))]
    try:
        yield Bench(trainer, engines, export, port)
    finally:
        for one in (trainer, *engines):
            one.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--bucket-mb", type=int, default=64)
    chosen = parser.parse_args()
    found: dict[str, dict[int, float]] = {name: {} for name in TRANSPORTS}
    copies = []
    phases: dict[str, dict[int, dict[str, float]]] = {name: {} for name in TRANSPORTS}
    with processes(chosen) as bench:
        nbytes = sum(tensor.nbytes for tensor in bench.export.tensors)
        for transport in TRANSPORTS:
            for count in chosen.engines:
                found[transport][count], copy, phases[transport][count] = bench.measure(transport, count, chosen.rounds)
                copies.append(copy)
                print(f"{transport}, {count} engines: {found[transport][count]:.3f} s, a copy: {copy:.3f} s", flush=True)
    first = chosen.engines[0]
    gigabytes = nbytes / 1e9
    report = {
        "name": "weight_sync",
        "ours": round(gigabytes / found["shared_memory"][first], 3),
        "peer": round(gigabytes / statistics.median(copies), 3),
        "peer_is": "a copy of the same bytes, 1 thread",
        "unit": "GB/s of a whole update",
        "ratio": round(statistics.median(copies) / found["shared_memory"][first], 3),
        "gloo_ratio": round(statistics.median(copies) / found["gloo"][first], 3),
        "megabytes": round(nbytes / 1e6),
        "seconds": {name: {count: round(value, 3) for count, value in of.items()} for name, of in found.items()},
        "phases": phases,
        "growth": {name: {count: round(value / of[first], 2) for count, value in of.items()} for name, of in found.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
