"""What a checkpoint's headers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from roll_lite.distributed.weight_sync.update import checkpoint_shapes


def test_shapes_come_from_every_file_of_a_checkpoint(tmp: Path) -> None:
    save_file({"a.weight": torch.zeros(2, 3)}, tmp / "model-00001-of-00002.safetensors")
    save_file({"lm_head.weight": torch.zeros(4)}, tmp / "model-00002-of-00002.safetensors")
    assert checkpoint_shapes(tmp, tied=False) == {"a.weight": (2, 3), "lm_head.weight": (4,)}
    assert checkpoint_shapes(tmp, tied=True) == {"a.weight": (2, 3)}


def test_a_file_that_was_cut_off_is_named(tmp: Path) -> None:
    file = tmp / "model.safetensors"
    save_file({"a.weight": torch.zeros(64, 64)}, file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"model\.path: {file} cannot be read"):
        checkpoint_shapes(tmp, tied=False)


def test_folder_without_weights(tmp: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: .* holds no safetensors"):
        checkpoint_shapes(tmp, tied=True)
