"""Work of a training rank in the phases of a step: seconds, tokens, model FLOPs, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

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
"""Dense bfloat16 TFLOP/s by a part of the device's name; the first match counts. From the makers' data sheets, without sparsity."""


@dataclass
class PhaseWork:
    seconds: float = 0.0
    tokens: float = 0.0
    """Tokens, prompts included. The ranks that share a data-parallel replica each count an equal part of it; so with `flops`."""
    flops: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by kind, see `memory_in_use`; the most of all times when the phase ran."""


@dataclass(frozen=True)
class RankWork:
    device: str | None
    """Name of the rank's GPU; None on a CPU."""
    phases: dict[str, PhaseWork]

    @property
    def peak_tflops(self) -> float | None:
        """Peak TFLOP/s of the device in bfloat16; None if unknown."""
        return next((peak for name, peak in PEAK_TFLOPS.items() if self.device is not None and name in self.device), None)


class RankPhases:
    """Measures the phases of this rank. They do not nest."""

    def __init__(self) -> None:
        self._done: dict[str, PhaseWork] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[PhaseWork]:
        """Measure time and memory of a block. The block adds its tokens and FLOPs to the object it gets."""
        work = self._done.setdefault(phase, PhaseWork())
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            yield work
        finally:
            work.seconds += time.perf_counter() - start
            work.memory = {kind: max(size, work.memory.get(kind, 0)) for kind, size in memory_in_use().items()}

    def take(self) -> RankWork:
        """Return the work since the last call."""
        done, self._done = self._done, {}
        return RankWork(torch.cuda.get_device_name() if torch.cuda.is_available() else None, done)


def memory_in_use() -> dict[str, int]:
    """Bytes of this process: resident host memory now, and the peaks on its GPU that torch has allocated and reserved."""
    resident = {"resident": psutil.Process().memory_info().rss}
    if not torch.cuda.is_available():
        return resident
    return {**resident, "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
