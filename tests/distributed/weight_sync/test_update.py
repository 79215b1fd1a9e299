"""What a checkpoint's headers say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from roll_lite.distributed.weight_sync.update import checkpoint_shapes


def test_shapes_are_those_of_the_tensors_that_a_trainer_sends(tmp: Path) -> None:
    """Of the files that the index names, without what models compute themselves."""
    files = {
        "model-00001-of-00002": {"a.weight": torch.zeros(2, 3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)},
        "model-00002-of-00002": {"lm_head.weight": torch.zeros(4)},
    }
    for file, tensors in files.items():
        save_file(tensors, tmp / f"{file}.safetensors")
    index = {"weight_map": {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}}
    (tmp / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    save_file({"layers.0.attention.wk.weight": torch.zeros(5)}, tmp / "consolidated.safetensors")  # the weights once more, as Mistral's
    assert checkpoint_shapes(tmp, tied=False) == {"a.weight": (2, 3), "lm_head.weight": (4,)}
    assert checkpoint_shapes(tmp, tied=True) == {"a.weight": (2, 3)}


def test_a_file_that_was_cut_off_is_named(tmp: Path) -> None:
    file = tmp / "model.safetensors"
    save_file({"a.weight": torch.zeros(64, 64)}, file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"model\.path: .*{file} is cut off"):
        checkpoint_shapes(tmp, tied=False)


def test_folder_without_weights(tmp: Path) -> None:
    with pytest.raises(ValueError, match=rf"model\.path: {tmp}: no model.safetensors"):
        checkpoint_shapes(tmp, tied=True)
