"""The model as Hugging Face tensors: who owns which, and gathering them over tensor ranks, one bucket at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from roll_lite.config.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from roll_lite.config.hf_config import HfConfig
from roll_lite.distributed.strategy.megatron.hf_mapping import Binding, Entry, take_apart
from roll_lite.distributed.strategy.megatron.lora import Projection
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan

Read = Callable[[torch.nn.Parameter], torch.Tensor]
"""What is exported of a parameter: its values, or its gradient."""

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Ends of the names of files that hold weights; every other file of the model's folder belongs to its tokenizer or configuration."""


def weights(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.detach()


class HfExporter:
    """Executes an ExportPlan on the ranks that hold the tensors: data-parallel rank 0 of every pipeline stage."""

    def __init__(self, bindings: Sequence[Binding], hf: HfConfig, adapted: Mapping[str, Projection] | None = None) -> None:
        """`adapted`: what is merged into weights, by their names."""
        self._hf = hf
        self._adapted = adapted or {}
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._tensor_ranks = dist.get_process_group_ranks(self._tensor_group)
        self._source = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        exported = [binding for binding in bindings if binding.exported]
        self._places = {name: (binding, number) for binding in exported for number, name in enumerate(binding.hf)}

    @property
    def read_here(self) -> list[Binding]:
        """What this rank has a part in exporting."""
        return list({id(binding): binding for binding, _ in self._places.values()}.values()) if self._source else []

    def plan(self, bucket_bytes: int) -> ExportPlan:
        """Collective over all ranks. Buckets are cut per owner, in the order of the layers; a tensor larger than a bucket gets its own."""
        mine: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        if self._source and dist.get_rank() == self._tensor_ranks[0]:
            for name, (binding, number) in self._places.items():
                cut = take_apart(binding.entry, binding.parameter.detach(), self._hf)[number]
                mine.append((name, self._full_shape(binding.entry, cut), cut.dtype, dist.get_rank()))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        tensors: list[ExportedTensor] = []
        bucket = -1
        for owned in gathered:
            filled = bucket_bytes
            for name, shape, dtype, owner in owned:
                size = torch.Size(shape).numel() * dtype.itemsize
                if filled + size > bucket_bytes:
                    bucket, filled = bucket + 1, 0
                filled += size
                tensors.append(ExportedTensor(name, shape, dtype, owner, bucket))
        return ExportPlan(tuple(tensors))

    def bucket(self, tensors: Sequence[ExportedTensor], read: Read = weights) -> dict[str, torch.Tensor] | None:
        """Full tensors on the owner, None elsewhere. They may lie in the model's own memory, and change when training goes on."""
        owner = tensors[0].owner
        if not self._source or self._tensor_ranks[0] != owner:
            return None
        cuts = self._local_cuts(tensors, read)
        if len(self._tensor_ranks) == 1:
            return {tensor.name: cut for tensor, cut in zip(tensors, cuts, strict=True)}
        return self._gather(tensors, cuts, owner)

    def _local_cuts(self, tensors: Sequence[ExportedTensor], read: Read) -> list[torch.Tensor]:
        parts: dict[int, list[torch.Tensor]] = {}
        cuts = []
        for tensor in tensors:
            binding, number = self._places[tensor.name]
            if id(binding) not in parts:
                parts[id(binding)] = take_apart(binding.entry, read(binding.parameter), self._hf)
            cut = parts[id(binding)][number]
            cuts.append(self._adapted[tensor.name].merged_with(cut) if tensor.name in self._adapted else cut)
        return cuts

    def _gather(self, tensors: Sequence[ExportedTensor], cuts: Sequence[torch.Tensor], owner: int) -> dict[str, torch.Tensor] | None:
        """One collective for the bucket: what is cut travels flat; what every rank has is taken from the owner."""
        entries = [self._places[tensor.name][0].entry for tensor in tensors]
        spread = [cut for cut, entry in zip(cuts, entries, strict=True) if entry.cut is not None]
        pieces: list[torch.Tensor] = []
        if spread:
            flat = torch.cat([cut.reshape(-1) for cut in spread])
            pieces = [torch.empty_like(flat) for _ in self._tensor_ranks] if dist.get_rank() == owner else []
            dist.gather(flat, pieces or None, dst=owner, group=self._tensor_group)
        if dist.get_rank() != owner:
            return None
        sizes = [cut.numel() for cut in spread]
        by_tensor = iter(zip(*(piece.split(sizes) for piece in pieces), strict=True))
        full: dict[str, torch.Tensor] = {}
        for tensor, cut, entry in zip(tensors, cuts, entries, strict=True):
            if entry.cut is None:
                full[tensor.name] = cut
            else:
                joined = torch.cat([piece.view(cut.shape) for piece in next(by_tensor)], dim=entry.cut)
                full[tensor.name] = joined[: tensor.shape[0]]
        return full

    def _full_shape(self, entry: Entry, cut: torch.Tensor) -> tuple[int, ...]:
        shape = list(cut.shape)
        if entry.cut is not None:
            shape[entry.cut] *= len(self._tensor_ranks)
        if entry.vocabulary:
            shape[0] = self._hf.vocab_size
        return tuple(shape)


def save_hf(
    exporter: HfExporter, plan: ExportPlan, source: Path, folder: Path, dtype: torch.dtype, value_model: bool, read: Read = weights
) -> None:
    """Safetensors (one file per bucket, written by its owner), config and tokenizer. Collective; the folder is shared by all nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    buckets = plan.buckets()
    files: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(buckets):
        file = "model.safetensors" if len(buckets) == 1 else f"model-{number + 1:05d}-of-{len(buckets):05d}.safetensors"
        files.update((tensor.name, file) for tensor in tensors)
        total += sum(torch.Size(tensor.shape).numel() * dtype.itemsize for tensor in tensors)
        full = exporter.bucket(tensors, read)
        if full is not None:
            on_host = {name: tensor.contiguous().to("cpu", dtype, copy=True) for name, tensor in full.items()}
            save_file(on_host, folder / file, metadata={"format": "pt"})
    if dist.get_rank() == 0:
        for file_in_source in source.iterdir():
            if file_in_source.is_file() and not file_in_source.name.endswith(NOT_COPIED):
                shutil.copyfile(file_in_source, folder / file_in_source.name)
        (folder / "config.json").write_text(json.dumps(_config(source, dtype, value_model), indent=2) + "\n")
        if len(buckets) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    dist.barrier()


def save_adapters(exporter: HfExporter, plan: ExportPlan, folder: Path, config: Mapping[str, Any]) -> None:
    """In PEFT's format: one file, written by the first rank. Collective."""
    own: dict[str, torch.Tensor] = {}
    for tensors in plan.buckets():
        own |= {name: tensor.contiguous().to("cpu", copy=True) for name, tensor in (exporter.bucket(tensors) or {}).items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, gathered if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor for part in gathered for name, tensor in part.items()}, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    dist.barrier()


def _config(source: Path, dtype: torch.dtype, value_model: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if value_model:
        architecture = config.get("architectures", ["Qwen2ForCausalLM"])[0]
        config["architectures"] = [architecture.replace("ForCausalLM", "ForSequenceClassification")]
        config["id2label"], config["label2id"] = {"0": "value"}, {"value": 0}
    return config
