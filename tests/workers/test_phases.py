"""What a training rank measures of its phases."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support_models import make_tiny_model

from roll_lite.config.schema.models import ActorRoleConfig, CriticRoleConfig, ModelConfig
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.models.hf_config import read_hf_config
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.model import ModelRole, ModelWorker, TrainShare
from roll_lite.workers.phases import PhaseWork, RankPhases


class Gpu:
    """Pretends to be the GPU of this process, with torch's peaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        self.elsewhere = 79_000_000_000
        """What other processes use."""
        stand_ins: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "get_device_name": lambda: "NVIDIA H100 80GB HBM3",
            "reset_peak_memory_stats": self.reset,
            "max_memory_allocated": lambda: self.peak,
            "max_memory_reserved": lambda: 2 * self.peak,
            "memory_reserved": lambda: 60_000_000_000,
            "mem_get_info": lambda: (80_000_000_000 - self.elsewhere - self.allocated, 80_000_000_000),
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
    gpu, phases = Gpu(monkeypatch), RankPhases("actor_train-1", Path("none"))
    for size in (70, 50):
        with phases.of("train"):
            gpu.allocate(size)
            gpu.allocate(-size)
    with phases.of("log_probs"):
        gpu.allocate(10)
    work = phases.take()
    assert [(name, phase.device) for name, phase in work.items()] == [(name, "NVIDIA H100 80GB HBM3") for name in ("train", "log_probs")]
    peaks = {name: [phase.memory[kind] for kind in ("allocated", "reserved", "device")] for name, phase in work.items()}
    assert peaks == {"train": [70, 140, gpu.elsewhere], "log_probs": [10, 20, gpu.elsewhere + 10]}
    assert phases.take() == {}, "they are told once"


def test_on_a_cpu_resident_memory_is_told() -> None:
    phases = RankPhases("actor_train-1", Path("none"))
    with phases.of("train"):
        held = bytearray(64 << 20)
    work = phases.take()["train"]
    assert work.device is None and work.memory.keys() == {"resident"}
    assert len(held) < work.memory["resident"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_time_adds_up_also_over_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    phases = RankPhases("actor_train-1", Path("none"))
    with phases.of("train"):
        pass
    with pytest.raises(ValueError, match="broken"), phases.of("train"):
        raise ValueError("broken")
    assert phases.take()["train"].seconds == 5.0


TORCHS_TEXT = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.00 GiB is free."


def failing(strategy: Any, tmp_path: Path) -> Any:
    """An actor's rank 1 with this strategy, without process groups."""
    worker: Any = ActorWorker.__new__(ActorWorker)
    role = ModelRole(ModelConfig(path=tmp_path), ActorRoleConfig(), 1, 1, False)
    worker.spec, worker.strategy = role, strategy
    worker.phases = RankPhases("actor_train-1", tmp_path / "out_of_memory", lambda: strategy.loaded)
    return worker


def run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError(TORCHS_TEXT)


ROWS = DataProto({"sample": torch.tensor([0]), "input_ids": Ragged.from_rows([torch.arange(4)])})
STRATEGY = SimpleNamespace(
    plan=lambda *_: None,
    set_schedule=lambda _: None,
    forward=run_out,
    load=run_out,
    train_step=run_out,
    loaded=[StateGroup.WEIGHTS, StateGroup.GRADIENTS],
    layout=SimpleNamespace(attention_parity_tokens=1.0),
)


def train(worker: Any) -> None:
    share: Any = SimpleNamespace(materialize=lambda: ROWS)
    mini_batch = MiniBatch(0, np.array([0]), np.ones(1, dtype=np.float32))
    list(worker._train(TrainShare(share, [mini_batch], 0), SimpleNamespace(outputs=("log_probs",))))


@pytest.mark.parametrize(
    ("phase", "work", "settings"),
    [
        ("train", train, ["actor_train.train_micro_batch_tokens", "actor_train.strategy.recompute", "actor_train.optimizer.on_host"]),
        ("log_probs", lambda worker: worker.forward_pass(ROWS, ["old_log_probs"]), ["actor_train.micro_batch_tokens"]),
        ("load", lambda worker: worker.load([StateGroup.OPTIMIZER]), []),
    ],
)
def test_a_rank_out_of_memory_says_what_to_change(
    phase: str, work: Callable[[Any], object], settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: {"segments": [1, 2]})
    with pytest.raises(torch.OutOfMemoryError) as raised:
        work(failing(STRATEGY, tmp_path))
    told = str(raised.value)
    numbers = "Of 80.00 GB torch has reserved 60.00 here; engines, other roles and CUDA itself have 19.00. "
    assert told.startswith(f"no GPU memory is left in phase {phase}, with weights, gradients loaded. {numbers}") and told.endswith(
        TORCHS_TEXT
    )
    assert all(text in told for text in ("offload: true", "gpu_memory_utilization", "profile.memory_history=true", *settings))
    file = tmp_path / "out_of_memory/actor_train-1.pickle"
    assert str(file) in told and pickle.loads(file.read_bytes()) == {"segments": [1, 2]}
    assert str(pickle.loads(pickle.dumps(raised.value))) == told, "it reaches the driver"


def test_a_snapshot_that_cannot_be_written_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    (tmp_path / "out_of_memory").write_text("a file")
    with pytest.raises(torch.OutOfMemoryError, match=r"in phase load.*No snapshot of the memory could be written: .*File exists"):
        failing(STRATEGY, tmp_path).load([StateGroup.OPTIMIZER])


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
    assert PhaseWork(device).peak_tflops == peak


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
    work = PhaseWork(None)
    ModelWorker._count(worker, work, DataProto(rows), passes)
    outputs = 0 if isinstance(role, CriticRoleConfig) else 5
    assert work.tokens == 5 and work.flops == worker._architecture.flops([4, 6], outputs, passes) / 2
