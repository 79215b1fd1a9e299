"""Load the distributed optimizer's state. Each rank reads the rows of a stored tensor that its shard needs; Megatron-Core 0.16 would read
whole tensors."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

MOMENTS = ("exp_avg", "exp_avg_sq")
BATCH_ENTRIES = 1 << 22
"""Maximum weight entries per read (50 MB with moments); larger weights are read alone."""


@dataclass(frozen=True)
class Owned:
    weight: torch.nn.Parameter
    start: int
    end: int


class ShardReader:
    def __init__(self, state_folder: str, weights: Any) -> None:
        """`weights`: the model's sharded_state_dict, with offsets into full tensors."""
        self._reader = FileSystemReader(state_folder)
        self._stored = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._stored, is_coordinator=True)
        self._places = {place.data: place for place in nested_values(extract_sharded_tensors_and_factories(weights)[0])}

    def load(self, parts: Iterable[Any]) -> None:
        gc.collect()  # torch.load left weights in reference cycles
        for part in parts:
            if isinstance(part, DistributedOptimizer):
                for batch in _batches(part):
                    self._load(part, batch)
                    gc.collect(1)

    @torch.no_grad()
    def _load(self, part: DistributedOptimizer, batch: list[Owned]) -> None:
        wanted: dict[str, list[ShardedTensor]] = defaultdict(list)
        found = [self._tensors(owned, wanted) for owned in batch]
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(wanted, is_loading=True), self._stored, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        for owned, tensors in zip(batch, found, strict=True):
            whole = {name: torch.cat(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in tensors.items()}
            part._set_main_param_and_optimizer_states(owned.weight, whole)

    def _tensors(self, owned: Owned, wanted: dict[str, list[ShardedTensor]]) -> dict[str, list[torch.Tensor]]:
        """Allocate optimizer state for this rank's entries of a weight. Return {state name: flat tensors to join}; add tensors to read to
        `wanted`, {name in the checkpoint: tensors}."""
        place = self._places[owned.weight]
        tensors: dict[str, list[torch.Tensor]] = defaultdict(list)
        for piece in place.build() if isinstance(place, ShardedTensorFactory) else [place]:
            assert piece.data.is_contiguous() and piece.data.untyped_storage().data_ptr() == owned.weight.untyped_storage().data_ptr()
            begin = piece.data.storage_offset() - owned.weight.storage_offset()
            start, end = max(owned.start - begin, 0), min(owned.end - begin, piece.data.numel())
            if start >= end:
                continue
            for name in ("param", *MOMENTS):
                if (key := stored_name(name, piece.key, self._stored.state_dict_metadata)) is not None:
                    rows, own = self._rows(key, piece, start, end)
                    wanted[key].append(rows)
                    tensors[name].append(own)
        return tensors

    def _rows(self, key: str, piece: ShardedTensor, start: int, end: int) -> tuple[ShardedTensor, torch.Tensor]:
        """Allocate the rows of stored tensor `key` holding entries `start` to `end` of `piece`, this rank's flattened shard. Return
        (ShardedTensor of the rows, view of the entries). Vocabulary padding stays 0."""
        width = math.prod(piece.local_shape[1:])
        first, behind = start // width, -(-end // width)
        axes = piece.prepend_axis_num
        offset = (*piece.global_offset[:axes], piece.global_offset[axes] + first, *piece.global_offset[axes + 1 :])
        memory = torch.zeros((*(1,) * axes, behind - first, *piece.local_shape[1:]))
        stored = self._stored.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"it has no {key}")
        rows = ShardedTensor(key, memory, memory.dtype, tuple(memory.shape), tuple(stored.size), offset, None)
        return rows, memory.flatten()[start - first * width : end - first * width]


def _batches(part: DistributedOptimizer) -> Iterator[list[Owned]]:
    batch: list[Owned] = []
    for owned in _owned(part):
        if batch and sum(one.end - one.start for one in [*batch, owned]) > BATCH_ENTRIES:
            yield batch
            batch = []
        batch.append(owned)
    if batch:
        yield batch


def _owned(part: DistributedOptimizer) -> Iterator[Owned]:
    for of_types in part.gbuf_ranges:
        for of_buckets in of_types.values():
            for of_bucket in of_buckets:
                for weight, ranges in of_bucket["param_map"].items():
                    yield Owned(weight, ranges["param"].start, ranges["param"].end)


def stored_name(name: str, weight: str, stored: Any) -> str | None:
    """Return the checkpoint's key of a weight's moment, or of its float32 copy (`name` "param"; None if the model is float32)."""
    if name in MOMENTS:
        return f"optimizer.state.{name}.{weight}"
    return next((found for found in (f"optimizer.state.{main}.{weight}" for main in ("param", "fp32_param")) if found in stored), None)
