"""What a training rank measures of its phases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support_models import make_tiny_model

from roll_lite.config.schema.models import ActorRoleConfig, CriticRoleConfig
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.models.hf_config import read_hf_config
from roll_lite.workers.model import ModelWorker
from roll_lite.workers.phases import PhaseWork, RankPhases, RankWork


class Gpu:
    """Pretends to be the GPU of this process, with torch's peaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        stand_ins: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "get_device_name": lambda: "NVIDIA H100 80GB HBM3",
            "reset_peak_memory_stats": self.reset,
            "max_memory_allocated": lambda: self.peak,
            "max_memory_reserved": lambda: 2 * self.peak,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def reset(self) -> None:
        self.peak = self.allocated


def test_peaks_are_those_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger of two times; what was there before another phase's peak does not count for it."""
    gpu, phases = Gpu(monkeypatch), RankPhases()
    for size in (70, 50):
        with phases.of("train"):
            gpu.allocate(size)
            gpu.allocate(-size)
    with phases.of("log_probs"):
        gpu.allocate(10)
    work = phases.take()
    assert work.device == "NVIDIA H100 80GB HBM3" and list(work.phases) == ["train", "log_probs"]
    peaks = {name: (phase.memory["allocated"], phase.memory["reserved"]) for name, phase in work.phases.items()}
    assert peaks == {"train": (70, 140), "log_probs": (10, 20)}
    assert phases.take().phases == {}, "they are told once"


def test_on_a_cpu_resident_memory_is_told() -> None:
    phases = RankPhases()
    with phases.of("train"):
        held = bytearray(64 << 20)
    work = phases.take()
    assert work.device is None and work.phases["train"].memory.keys() == {"resident"}
    assert len(held) < work.phases["train"].memory["resident"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_time_adds_up_also_over_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    phases = RankPhases()
    with phases.of("train"):
        pass
    with pytest.raises(ValueError, match="broken"), phases.of("train"):
        raise ValueError("broken")
    assert phases.take().phases["train"].seconds == 5.0


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090", None),
        (None, None),
    ],
)
def test_the_peak_follows_from_the_devices_name(device: str | None, peak: float | None) -> None:
    assert RankWork(device, {}).peak_tflops == peak


@pytest.mark.parametrize(("role", "passes"), [(ActorRoleConfig(), 3), (CriticRoleConfig(), 1)])
def test_the_ranks_of_a_replica_share_its_rows(role: Any, passes: int, tmp_path: Path) -> None:
    """Four ranks are two replicas of two: each counts half of its replica's rows of 4 and 6 tokens, of which 5 are the policy's."""
    make_tiny_model(tmp_path / "model")
    layout = SimpleNamespace(data_size=2, world_size=4)
    worker: Any = SimpleNamespace(strategy=SimpleNamespace(layout=layout), spec=SimpleNamespace(config=role))
    worker._architecture = read_hf_config(tmp_path / "model")
    rows = {
        "input_ids": Ragged.from_rows([torch.arange(4), torch.arange(6)]),
        "response_mask": Ragged.from_rows([torch.arange(4) > 1, torch.arange(6) > 2]),
    }
    work = PhaseWork()
    ModelWorker._count(worker, work, DataProto(rows), passes)
    width = 1 if isinstance(role, CriticRoleConfig) else None
    assert work.tokens == 5 and work.flops == passes * worker._architecture.forward_flops([4, 6], 5, width) / 2
