from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

PeaksByPhase = dict[str, dict[str, int]]
"""{phase: {kind of memory: bytes}}, with the kinds of `take_peaks`."""


def take_peaks() -> dict[str, int]:
    """Return this process's peaks since the last call, in bytes: "allocated" and "reserved" by torch. "device" is the GPU's
    memory that all processes use now. Empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "device": total - free}
    torch.cuda.reset_peak_memory_stats()
    return peaks


def larger(known: Mapping[str, int], found: Mapping[str, int]) -> dict[str, int]:
    return {**known, **{kind: max(size, known.get(kind, 0)) for kind, size in found.items()}}


class MemoryPeaks:
    """Memory peaks by phase: maxima over runs and processes."""

    def __init__(self) -> None:
        self._largest: PeaksByPhase = {}

    def add(self, phase: str, found: Mapping[str, int]) -> None:
        if found:
            self._largest[phase] = larger(self._largest.get(phase, {}), found)

    def merge(self, other: PeaksByPhase) -> None:
        for phase, found in other.items():
            self.add(phase, found)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        take_peaks()
        try:
            yield
        finally:
            self.add(phase, take_peaks())

    def take(self) -> PeaksByPhase:
        taken, self._largest = self._largest, {}
        return taken
