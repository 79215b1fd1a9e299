from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save

from roll_lite.data.proto import save_tensors
from roll_lite.distributed.strategy.megatron.hf_mapping import Binding, Entry, ranks_of_a_group, take_apart
from roll_lite.distributed.strategy.megatron.parallel import cut_group
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, bucket_limit
from roll_lite.files import write_json
from roll_lite.models.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from roll_lite.models.hf_config import HfConfig
from roll_lite.models.hf_fields import architecture

Read = Callable[[torch.nn.Parameter], torch.Tensor]
CutChange = Callable[[torch.Tensor], torch.Tensor]
"""Changes a rank's shard before export (e.g. merges an adapter), not in place."""
Write = Callable[[Path, bytes], None]
OF_TORCH = {"format": "pt"}
FILE_BYTES = 4 << 30
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Name endings of weight files. A model folder's other files are copied."""


def read_parameter(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.detach()


@dataclass(frozen=True)
class _Source:
    group: dist.ProcessGroup
    ranks: Sequence[int]
    """Global ranks of the tensor-parallel group; the first gathers."""
    takes_part: bool

    @staticmethod
    def of_layers() -> _Source:
        group = cut_group(of_experts=False)
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return _Source(group, dist.get_process_group_ranks(group), first)

    @staticmethod
    def of_experts() -> _Source:
        group = cut_group(of_experts=True)
        return _Source(group, dist.get_process_group_ranks(group), parallel_state.get_expert_data_parallel_rank() == 0)

    @property
    def owns(self) -> bool:
        return self.takes_part and dist.get_rank() == self.ranks[0]


_Described = tuple[str, tuple[int, ...], torch.dtype, int]
"""(name, full shape, dtype, owner) of a tensor. The owner gathers it."""


def _in_buckets(tensors: Sequence[_Described], bucket_bytes: int) -> list[list[_Described]]:
    """Group tensors into buckets of one dtype (a bucket is gathered as one tensor), of at most `bucket_bytes` or one tensor."""
    buckets: list[list[_Described]] = []
    filled = bucket_bytes
    for tensor in tensors:
        size = _nbytes(tensor)
        if filled + size > bucket_bytes or buckets[-1][-1][2] != tensor[2]:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += size
    return buckets


def _nbytes(tensor: _Described) -> int:
    _, shape, dtype, _ = tensor
    return torch.Size(shape).numel() * dtype.itemsize


def _in_turns(owned: Sequence[Sequence[_Described]], bucket_bytes: int, expert_owners: int = 1) -> list[list[_Described]]:
    """Order buckets for sending: one of each owner in turn, so that an owner gathers while engines load another's bucket. With several
    `expert_owners`, buckets are smaller (see `bucket_limit`), and expert buckets end with a layer."""
    of_experts = [tensors for tensors in owned if tensors and _layer(tensors[0])]
    share = max((sum(_nbytes(one) for one in tensors if _layer(one) == _layer(tensors[0])) for tensors in of_experts), default=0)
    limit = whole_layers = bucket_bytes
    if share and expert_owners > 1:
        limit = bucket_limit(bucket_bytes, expert_owners, share)
        whole_layers = limit // share * share or limit
    buckets = [_in_buckets(tensors, whole_layers if tensors and _layer(tensors[0]) else limit) for tensors in owned]
    return [bucket for turn in zip_longest(*buckets) for bucket in turn if bucket is not None]


def _layer(expert: _Described) -> str:
    prefix, experts, _ = expert[0].partition(".experts.")
    return prefix if experts else ""


class HfExporter:
    def __init__(self, bindings: Sequence[Binding], hf: HfConfig, changes: Mapping[str, CutChange] | None = None) -> None:
        self._hf = hf
        self._changes = changes or {}
        self._sources = {False: _Source.of_layers(), True: _Source.of_experts()}
        self._tensor_group = self._sources[False].group
        exported = [binding for binding in bindings if binding.exported]
        self._places = {name: (binding, number) for binding in exported for number, name in enumerate(binding.hf)}

    @property
    def read_here(self) -> list[Binding]:
        bindings = {id(binding): binding for binding, _ in self._places.values()}.values()
        return [binding for binding in bindings if self._sources[binding.entry.of_experts].takes_part]

    def plan(self, bucket_bytes: int, for_engines: bool = False) -> ExportPlan:
        """Plan the export in buckets (collective). A bucket's owner gathers it. Experts have separate buckets."""
        mine: dict[bool, list[_Described]] = {False: [], True: []}
        for name, (binding, number) in self._places.items():
            if self._sources[binding.entry.of_experts].owns:
                cut = self._cuts(binding.entry, self._like_joined(binding.entry, binding.parameter))[number]
                mine[binding.entry.of_experts].append((name, self._full_shape(binding.entry, cut), cut.dtype, dist.get_rank()))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(mine.values()))
        expert_owners = parallel_state.get_expert_model_parallel_world_size() if for_engines else 1
        buckets = enumerate(_in_turns([owned for rank in everyone for owned in rank], bucket_bytes, expert_owners))
        return ExportPlan(tuple(ExportedTensor(*tensor, number) for number, bucket in buckets for tensor in bucket))

    def bucket(self, tensors: Sequence[ExportedTensor], read: Read = read_parameter) -> dict[str, torch.Tensor] | None:
        """Gather a bucket (collective over the owner's tensor group): full tensors by name on the owner, None elsewhere."""
        if tensors[0].name not in self._places:
            return None
        source = self._sources[self._places[tensors[0].name][0].entry.of_experts]
        if not source.takes_part or source.ranks[0] != tensors[0].owner:
            return None
        cuts = self._local_cuts(tensors, read)
        if len(source.ranks) == 1:
            return {tensor.name: cut for tensor, cut in zip(tensors, cuts, strict=True)}
        return self._gather(tensors, cuts, source)

    def _local_cuts(self, tensors: Sequence[ExportedTensor], read: Read) -> list[torch.Tensor]:
        parts: dict[int, list[torch.Tensor]] = {}
        cuts = []
        for tensor in tensors:
            binding, number = self._places[tensor.name]
            if id(binding) not in parts:
                parts[id(binding)] = self._cuts(binding.entry, self._join_shared(binding.entry, read(binding.parameter)))
            cut = parts[id(binding)][number]
            change = self._changes.get(tensor.name)
            cuts.append(cut if change is None else change(cut))
        return cuts

    def _cuts(self, entry: Entry, joined: torch.Tensor) -> list[torch.Tensor]:
        """Split a parameter into this rank's shards of its Hugging Face tensors (such as q, k and v). `joined`: the parameter, joined over
        ranks that share a key/value head."""
        sharing = ranks_of_a_group(entry, self._hf, self._tensor_group.size())
        return [cut.chunk(sharing)[self._tensor_group.rank() % sharing] for cut in take_apart(entry, joined, self._hf)]

    def _join_shared(self, entry: Entry, local: torch.Tensor) -> torch.Tensor:
        """Join the Megatron tensors of ranks that share a key/value head (collective); `local` if none do."""
        sharing = ranks_of_a_group(entry, self._hf, self._tensor_group.size())
        if sharing == 1:
            return local
        pieces = [torch.empty_like(local) for _ in range(self._tensor_group.size())]
        dist.all_gather(pieces, local.contiguous(), group=self._tensor_group)
        first = self._tensor_group.rank() // sharing * sharing
        return torch.cat(pieces[first : first + sharing])

    def _like_joined(self, entry: Entry, local: torch.Tensor) -> torch.Tensor:
        sharing = ranks_of_a_group(entry, self._hf, self._tensor_group.size())
        return torch.empty(sharing * len(local), *local.shape[1:], dtype=local.dtype, device="meta")

    def _gather(self, tensors: Sequence[ExportedTensor], cuts: Sequence[torch.Tensor], source: _Source) -> dict[str, torch.Tensor] | None:
        entries = [self._places[tensor.name][0].entry for tensor in tensors]
        spread = [cut for cut, entry in zip(cuts, entries, strict=True) if entry.cut is not None]
        pieces: list[torch.Tensor] = []
        if spread:
            flat = torch.cat([cut.reshape(-1) for cut in spread])
            pieces = [torch.empty_like(flat) for _ in source.ranks] if source.owns else []
            dist.gather(flat, pieces or None, dst=source.ranks[0], group=source.group)
        if not source.owns:
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
            shape[entry.cut] *= len(self._sources[entry.of_experts].ranks)
        if entry.vocabulary:
            shape[0] = self._hf.vocab_size
        return tuple(shape)


def write_hf(
    exporter: HfExporter,
    source: Path,
    folder: Path,
    dtype: torch.dtype,
    value_model: bool,
    read: Read = read_parameter,
    write: Write | None = None,
) -> list[Path]:
    """Write a Hugging Face folder (collective); return this rank's files. `source`: the model's folder. `read` returns a parameter's
    values; `write` writes a file."""
    folder.mkdir(parents=True, exist_ok=True)
    buckets = exporter.plan(FILE_BYTES).buckets()
    files: dict[str, str] = {}
    own: list[Path] = []
    total = 0
    for number, tensors in enumerate(buckets):
        file = "model.safetensors" if len(buckets) == 1 else f"model-{number + 1:05d}-of-{len(buckets):05d}.safetensors"
        files.update((tensor.name, file) for tensor in tensors)
        total += sum(torch.Size(tensor.shape).numel() * dtype.itemsize for tensor in tensors)
        full = exporter.bucket(tensors, read)
        if full is not None:
            on_host = {name: tensor.contiguous().to("cpu", dtype, copy=True) for name, tensor in full.items()}
            if write is None:
                save_tensors(on_host, folder / file, OF_TORCH)
            else:
                write(folder / file, save(on_host, metadata=OF_TORCH))
            own.append(folder / file)
    if dist.get_rank() == 0:
        for file_in_source in source.iterdir():
            if file_in_source.is_file() and not file_in_source.name.endswith(NOT_COPIED):
                own.append(Path(shutil.copyfile(file_in_source, folder / file_in_source.name)))
        write_json(folder / "config.json", _config(source, dtype, value_model))
        if len(buckets) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": files}
            own.append(folder / "model.safetensors.index.json")
            write_json(own[-1], index)
    dist.barrier()
    return own


def save_adapters(exporter: HfExporter, folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """Write LoRA adapters in PEFT format (collective); return this rank's files. `config`: contents of adapter_config.json."""
    own: dict[str, torch.Tensor] = {}
    for tensors in exporter.plan(FILE_BYTES).buckets():
        own |= {name: tensor.contiguous().to("cpu", copy=True) for name, tensor in (exporter.bucket(tensors) or {}).items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, gathered if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors({name: tensor for part in gathered for name, tensor in part.items()}, folder / ADAPTER_WEIGHTS, OF_TORCH)
        write_json(folder / ADAPTER_CONFIG, config)
    dist.barrier()
    return [folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG] if dist.get_rank() == 0 else []


def _config(source: Path, dtype: torch.dtype, value_model: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if value_model:
        config["architectures"] = [architecture(config["model_type"], "ForSequenceClassification")]
        config["id2label"], config["label2id"] = {"0": "value"}, {"value": 0}
    return config
