"""Seconds, tokens, FLOPs and memory of a training rank by phase, and a report when memory runs out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from roll_lite.observability.device_memory import larger, take_peaks

PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "MI300X": 1307.0,
}
"""Dense bfloat16 TFLOP/s by part of the device's name (first match wins), from data sheets, without sparsity."""

REMEDIES = {
    "train": "lower {role}.train_micro_batch_tokens, set {role}.strategy.recompute: full or {role}.optimizer.on_host: true; ",
    "log_probs": "lower {role}.micro_batch_tokens; ",
    "sync_weights": "lower weight_sync.bucket_mb; ",
}
"""{phase: settings to change if GPU memory runs out in it}."""
SHARED = "set offload: true for roles that share the GPU, lower actor_infer.strategy.gpu_memory_utilization, or give {role} more devices"
"""Advice for any phase, appended to the phase's own in REMEDIES."""


@dataclass
class PhaseWork:
    device: str | None
    seconds: float = 0.0
    runs: list[tuple[float, float]] = field(default_factory=list)
    """(start in wall clock time, seconds) of each run of the phase."""
    tokens: float = 0.0
    """Tokens per rank of the data-parallel replica, prompts included; `flops` likewise."""
    flops: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    """Maximum bytes over the phase's runs: GPU memory (`take_peaks`), and "resident" host memory at a run's end."""

    moved: Counter[str] = field(default_factory=Counter)
    """Bytes that loads and offloads moved: "in" (to the device), "out" (to the host), "freed" (on the device)."""

    @property
    def peak_tflops(self) -> float | None:
        return next((peak for name, peak in PEAK_TFLOPS.items() if name in (self.device or "")), None)


RankWork = dict[str, PhaseWork]


class RankPhases:
    """Measures time and memory of this rank's phases (log_probs, train, ...). Phases do not nest."""

    def __init__(self, name: str, snapshots: Path, loaded: Callable[[], Sequence[str]] = tuple) -> None:
        """`name`: ROLE-RANK. `loaded`: returns the state groups on the device. Out of GPU memory, a snapshot goes to
        `snapshots`/`name`.pickle."""
        self._name = name
        self._snapshots = snapshots
        self._loaded = loaded
        self._done: RankWork = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[PhaseWork]:
        """Measure a block's time and memory. The block adds tokens and FLOPs to the yielded object."""
        on_gpu = torch.cuda.is_available()
        work = self._done.setdefault(phase, PhaseWork(torch.cuda.get_device_name() if on_gpu else None))
        take_peaks()
        start, since = time.perf_counter(), time.time()
        try:
            with self.explained(phase), torch.profiler.record_function(phase):
                yield work
        finally:
            work.runs.append((since, time.perf_counter() - start))
            work.seconds += work.runs[-1][1]
            work.memory = larger(work.memory, {"resident": psutil.Process().memory_info().rss, **take_peaks()})

    @contextmanager
    def explained(self, phase: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            reserved = torch.cuda.memory_reserved()
            remedies = f"{REMEDIES.get(phase, '')}{SHARED}".format(role=self._name.rpartition("-")[0])
            raise torch.OutOfMemoryError(
                f"no GPU memory is left in phase {phase}, with {', '.join(self._loaded()) or 'nothing'} loaded. Of {total / 1e9:.2f} GB "
                f"torch has reserved {reserved / 1e9:.2f} here; engines, other roles and CUDA itself have "
                f"{(total - free - reserved) / 1e9:.2f}. Remedies: {remedies}. {self._snapshot()}. {error}"
            ) from error

    def _snapshot(self) -> str:
        file = self._snapshots / f"{self._name}.pickle"
        try:
            self._snapshots.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))
        except (OSError, RuntimeError) as error:
            return f"No snapshot of the memory could be written: {error}"
        return (
            f"A snapshot of the memory is in {file} on this rank's node (view it at https://docs.pytorch.org/memory_viz); with "
            "profile.memory_history=true it says where in the code memory was allocated"
        )

    def take(self) -> RankWork:
        done, self._done = self._done, {}
        return done
