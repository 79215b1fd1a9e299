from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from roll_lite.distributed.strategy.base import ValueInit
from roll_lite.distributed.strategy.megatron.hf_mapping import VALUE_HEAD, Binding, Entry, join, ranks_of_a_group
from roll_lite.distributed.strategy.megatron.parallel import cut_group
from roll_lite.files import listed
from roll_lite.models.adapter_files import ADAPTER_WEIGHTS
from roll_lite.models.hf_config import HfConfig
from roll_lite.models.model_files import HEAD, head_beside_tied_embeddings, misfit, tensors_without_place, weight_shapes


class HfCheckpoint:
    def __init__(self, folder: Path, key: str, single: str = "model.safetensors") -> None:
        """`key`: YAML path of `folder`, for messages. `single`: file name of an unsplit checkpoint."""
        self.folder = folder
        self.named = f"{key}: {folder}"
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (folder / single).is_file():
            with safe_open(str(folder / single), framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise ValueError(f"{self.named} holds neither {single} nor model.safetensors.index.json")
        self.names = set(self._files)
        self._open: dict[str, Any] = {}

    def slice(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(str(self.folder / file), framework="pt")
        return self._open[file].get_slice(name)

    def check(self, shapes: Mapping[str, Sequence[int]], by: str = "config.json") -> None:
        """Raise ValueError for a wrong shape or dtype. `by`: source of the expected shapes."""
        for name, shape in shapes.items():
            stored = self.slice(name)
            if message := misfit(name, stored.get_dtype(), stored.get_shape(), shape, by):
                raise ValueError(f"{self.named}: {message}")


def load_weights(
    bindings: Sequence[Binding],
    hf: HfConfig,
    folder: Path,
    value_init: ValueInit | None,
    key: str,
) -> None:
    """Load this rank's weights. ValueError for missing, unknown and misshapen tensors. `value_init`: "actor" leaves the value head at zero;
    None: language model. `key`: YAML path of `folder`."""
    checkpoint = HfCheckpoint(folder, key)
    fresh = set(VALUE_HEAD.hf) if value_init == "actor" else set()
    missing = sorted({name for binding in bindings for name in binding.hf} - checkpoint.names - fresh)
    if missing:
        hint = f"; critic.init {value_init!r} needs a checkpoint with a value head" if VALUE_HEAD.hf[0] in missing else ""
        raise ValueError(f"{checkpoint.named} lacks {listed(missing)}{hint}")
    if message := tensors_without_place(checkpoint.names, hf, HEAD if value_init is None else VALUE_HEAD.hf[0]):
        raise ValueError(f"{checkpoint.named} {message}")
    first = cut_group(of_experts=False).rank() == 0
    if hf.tied_embeddings and value_init is None and first and (message := head_beside_tied_embeddings(folder)):
        raise ValueError(f"{key}: {message}")
    shapes = weight_shapes(hf) | {HEAD: (hf.vocab_size, hf.hidden), VALUE_HEAD.hf[0]: (1, hf.hidden)}
    checkpoint.check({name: shapes[name] for binding in bindings for name in binding.hf if name not in fresh})
    with torch.no_grad():
        for binding in bindings:
            if fresh.issuperset(binding.hf):
                continue  # a new value head stays zero
            group = cut_group(binding.entry.of_experts)
            sharing = ranks_of_a_group(binding.entry, hf, group.size())
            cuts = [_read(checkpoint, name, binding.entry, sharing) for name in binding.hf]
            local = join(binding.entry, cuts, hf).chunk(sharing)[group.rank() % sharing]
            parameter: torch.Tensor = binding.parameter
            if binding.entry.vocabulary:
                parameter[local.shape[0] :].zero_()  # rows that only pad the vocabulary
                parameter = parameter[: local.shape[0]]
            assert parameter.shape == local.shape, f"{' + '.join(binding.hf)}: {tuple(local.shape)}, not {tuple(parameter.shape)}"
            parameter.copy_(local, non_blocking=True)


def load_adapters(bindings: Sequence[Binding], folder: Path, wanted: Set[str]) -> None:
    """Load LoRA adapters in PEFT format. `wanted`: the model's adapters. ValueError for missing, unknown and misshapen tensors."""
    checkpoint = HfCheckpoint(folder, "actor_train.lora.path", ADAPTER_WEIGHTS)
    for names, what in ((wanted - checkpoint.names, "lacks"), (checkpoint.names - wanted, "has")):
        if names:
            raise ValueError(f"{checkpoint.named} {what} {listed(sorted(names))}, which do not go with actor_train.lora.targets")
    shapes: dict[str, list[int]] = {}
    for binding in bindings:
        shape = shapes[binding.hf[0]] = list(binding.parameter.shape)
        if binding.entry.cut is not None:
            shape[binding.entry.cut] *= cut_group(binding.entry.of_experts).size()
    checkpoint.check(shapes, by="actor_train.lora.rank and the model")
    with torch.no_grad():
        for binding in bindings:
            binding.parameter.copy_(_read(checkpoint, binding.hf[0], binding.entry))


def _read(checkpoint: HfCheckpoint, name: str, entry: Entry, sharing: int = 1) -> torch.Tensor:
    """Read this rank's shard. `sharing`: ranks that share a key/value head and read the same shard."""
    group = cut_group(entry.of_experts)
    tensor_rank, tensor_size = group.rank() // sharing, group.size() // sharing
    view = checkpoint.slice(name)
    if entry.cut is None:
        return view[:]
    size = view.get_shape()[entry.cut]
    share = -(-size // tensor_size)
    start, stop = min(share * tensor_rank, size), min(share * (tensor_rank + 1), size)
    return view[start:stop] if entry.cut == 0 else view[:, start:stop]
