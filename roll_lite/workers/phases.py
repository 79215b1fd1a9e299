"""Work of a training rank in the phases of a step: seconds, tokens, model FLOPs, and memory. Report of a phase that ran out of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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

REMEDIES = {
    "train": "lower {role}.train_micro_batch_tokens, set {role}.strategy.recompute to selective or full, {role}.optimizer.on_host to true",
    "log_probs": "lower {role}.micro_batch_tokens",
    "sync_weights": "lower weight_sync.bucket_mb",
}
"""Settings to change if a phase runs out of memory."""
SHARED = "set offload: true for roles that share the GPU, lower actor_infer.strategy.gpu_memory_utilization, or give {role} more devices"
"""Settings to change whatever the phase."""


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

    def __init__(self, name: str, snapshots: Path, loaded: Callable[[], Sequence[str]] = tuple) -> None:
        """`name`: ROLE-RANK. `snapshots`: folder for snapshots of the rank's memory. `loaded`: returns the state groups that are on the
        device."""
        self._name = name
        self._snapshots = snapshots
        self._loaded = loaded
        self._done: dict[str, PhaseWork] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[PhaseWork]:
        """Measure time and memory of a block. The block adds its tokens and FLOPs to the object it gets."""
        work = self._done.setdefault(phase, PhaseWork())
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            with self.explained(phase), torch.profiler.record_function(phase):
                yield work
        finally:
            work.seconds += time.perf_counter() - start
            work.memory = {kind: max(size, work.memory.get(kind, 0)) for kind, size in memory_in_use().items()}

    @contextmanager
    def explained(self, phase: str) -> Iterator[None]:
        """Explain an OutOfMemoryError of the block: where the memory is, and which settings to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(self._explanation(phase, error)) from error

    def _explanation(self, phase: str, error: torch.OutOfMemoryError) -> str:
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        sizes = {
            "reserved by torch": reserved,
            "of these allocated": torch.cuda.memory_allocated(),
            "other (engines, other roles, CUDA itself)": total - free - reserved,
            "free": free,
            "in all": total,
        }
        role = self._name.rpartition("-")[0]
        remedies = [text.format(role=role) for text in (REMEDIES.get(phase), SHARED) if text is not None]
        what = ". ".join(str(error).split(". ")[:2])  # torch's own advice follows
        return (
            f"{what}, in phase {phase}, with {', '.join(self._loaded()) or 'nothing'} loaded. GB of the GPU's memory: "
            f"{', '.join(f'{name} {size / 1e9:.2f}' for name, size in sizes.items())}. Remedies: {'; '.join(remedies)}. {self._snapshot()}"
        )

    def _snapshot(self) -> str:
        """Write a snapshot of the memory that torch manages. Returns where it is or, if it could not be written, why."""
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
        """Return the work since the last call."""
        done, self._done = self._done, {}
        return RankWork(torch.cuda.get_device_name() if torch.cuda.is_available() else None, done)


def memory_in_use() -> dict[str, int]:
    """Bytes of this process: resident host memory now, and the peaks on its GPU that torch has allocated and reserved."""
    resident = {"resident": psutil.Process().memory_info().rss}
    if not torch.cuda.is_available():
        return resident
    return {**resident, "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
