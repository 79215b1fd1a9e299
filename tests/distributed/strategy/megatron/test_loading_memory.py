"""Loading a model in several files, or a checkpoint: what it takes of memory while it loads."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_cases import parameters_of, started
from megatron_ranks import RankPool
from support_models import make_model, make_tokenizer

from roll_lite.config.schema.models import OptimizerConfig

MB = 1 << 20
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


def anonymous() -> int:
    """Bytes of this process's memory that are no file's: files that are mapped take none of it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most of it between start and end, beyond what there was at the start."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MB)  # what is freed of tensors goes back at once, as that of larger ones does
        self._start, self._most, self._ends = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ends.wait(0.001):
            self._most = max(self._most, anonymous() - self._start)

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.bytes = max(self._most, anonymous() - self._start)


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """New processes: memory that an earlier test has freed would be taken again unseen, or given back in the middle of this one."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 MB in float32, in files of 20 MB."""
    folder = tmp_path_factory.mktemp("large") / "model"
    model = make_model("qwen2", True, 512, 10, 0, 1.0, intermediate_size=2048, num_hidden_layers=10)
    model.save_pretrained(folder, max_shard_size="20MB")
    make_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 5
    return folder


def loaded(path: Path, dtype: str, tensor_parallel: int) -> tuple[int, int]:
    """Bytes at the most, and those of the weights that this rank has."""
    with Peak() as peak:
        strategy = started(path, dtype=dtype, tensor_parallel=tensor_parallel)
    weights = parameters_of(strategy)
    assert all(torch.isfinite(weight).all() for weight in weights)
    return peak.bytes, sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize(
    ("dtype", "ranks_of_a_model"),
    [
        pytest.param("float32", 1, marks=pytest.mark.slow),
        *(pytest.param(*one, marks=(pytest.mark.slow, pytest.mark.nightly)) for one in (("bfloat16", 1), ("float32", 2))),
    ],
)
def test_there_is_no_second_copy_of_the_model(ranks: RankPool, path: Path, dtype: str, ranks_of_a_model: int) -> None:
    """Beyond the weights there are a few tensors at a time: what is read of one, and what it is put together from."""
    for most, weights in ranks(ranks_of_a_model, loaded, path, dtype, ranks_of_a_model):
        assert weights > 50 * MB
        assert 0.9 * weights < most < 1.25 * weights


def resumed(path: Path, folder: Path) -> tuple[int, int]:
    """Bytes at the most while a checkpoint is loaded, and those that this rank has of the optimizer's state."""
    strategy = started(path, OptimizerConfig(lr=1e-3), dtype="bfloat16")
    strategy.save_checkpoint(folder)
    for _ in range(2):  # the first time the state itself gets into memory, where there were zeros that took none
        with Peak() as peak:
            strategy.load_checkpoint(folder)
    weights = sum(parameter.numel() for parameter in parameters_of(strategy))
    return peak.bytes, 12 * weights // dist.get_world_size()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_copy_reads_of_the_optimizers_state_what_it_owns(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    """All four together have 450 MB of it."""
    for most, owned in ranks(4, resumed, path, tmp_path):
        assert owned > 100 * MB
        assert most < owned
