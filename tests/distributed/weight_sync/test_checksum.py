from __future__ import annotations

import pytest
import torch

from roll_lite.distributed.weight_sync import update as module
from roll_lite.distributed.weight_sync.update import SAMPLED, checksum, sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_changed_bit_shows(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 13).to(dtype).reshape(3, 4)
    changed = tensor.clone()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    changed.view(integers)[2, 3] ^= 1
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(changed)


def test_layout_in_memory_does_not_matter() -> None:
    tensor = torch.randn(6, 8)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.cat([tensor, tensor])[6:]) == checksum(tensor)


def test_shape_dtype_and_order_matter() -> None:
    tensor = torch.arange(6.0)
    sums = {checksum(t) for t in (tensor, tensor.reshape(2, 3), tensor.bfloat16(), tensor.flip(0))}
    assert len(sums) == 4


def test_negative_zero_counts_as_zero() -> None:
    assert checksum(torch.tensor([0.0, 1.0])) == checksum(torch.tensor([-0.0, 1.0]))
    assert checksum(torch.tensor([0.0, 1.0])) != checksum(torch.tensor([0.0, -1.0]))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = checksum(tensor)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert checksum(tensor) == whole


def test_scalars_and_empty_tensors() -> None:
    assert checksum(torch.tensor(1.5)) != checksum(torch.tensor(2.5))
    assert checksum(torch.empty(0)) != checksum(torch.empty(0, 3))


def test_samples_of_successive_versions_hold_every_tensor_once() -> None:
    names = [f"layer {number}" for number in range(50)]
    samples = [sample(names, version) for version in range(7, 7 + SAMPLED)]
    assert sorted(name for one in samples for name in one) == sorted(names)
    assert {len(one) for one in samples} == {3, 4}
