"""LoRA: trainable A [rank, in] and B [out, rank] beside frozen linear layers, as in PEFT: W x + (alpha / rank) B A x (docs/lora.md).

Tensor parallelism shards B in column-parallel layers, A in row-parallel ones. Adapters of experts are whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from roll_lite.config.schema.models import LoraConfig
from roll_lite.data.stable_hash import derived_seed
from roll_lite.distributed.strategy.megatron.hf_mapping import EXPERT, LAYER, Binding, Entry, join, take_apart
from roll_lite.distributed.strategy.megatron.parallel import cut_group
from roll_lite.models.adapter_files import A, B, adapter_name, target_of
from roll_lite.models.hf_config import HfConfig

if TYPE_CHECKING:
    from roll_lite.distributed.strategy.megatron.hf_export import CutChange
    from roll_lite.distributed.strategy.megatron.model import RollModel


class Projection(torch.nn.Module):
    """Shards of one projection's LoRA matrices on this tensor rank. B starts at zero."""

    def __init__(self, name: str, base: torch.Tensor, entry: Entry, lora: LoraConfig, seed: int) -> None:
        """`base`: this rank's shard of the frozen weight. A's initial values do not depend on the layout."""
        super().__init__()
        rows, columns = base.shape
        group = cut_group(entry.of_experts)
        parts = group.size() if entry.cut == 1 else 1
        whole = torch.empty(lora.rank, columns * parts)
        torch.nn.init.kaiming_uniform_(whole, math.sqrt(5), generator=torch.Generator().manual_seed(derived_seed(seed, name)))
        own = whole.chunk(parts, dim=1)[group.rank() if parts > 1 else 0]
        self.scale = lora.alpha / lora.rank
        self.lora_A = torch.nn.Parameter(own.to(base, copy=True, memory_format=torch.contiguous_format))
        self.lora_B = torch.nn.Parameter(base.new_zeros(rows, lora.rank))

    @torch.no_grad()
    def scaled(self, lora_b: torch.Tensor) -> torch.Tensor:
        """Return B * alpha / rank, for engines that omit this factor."""
        return (lora_b.float() * self.scale).to(lora_b.dtype)

    @torch.no_grad()
    def merged_with(self, base: torch.Tensor) -> torch.Tensor:
        return (base.float() + self.scale * (self.lora_B.float() @ self.lora_A.float())).to(base.dtype)


class Adapter(torch.nn.Module):
    def __init__(
        self, config: Any, entry: Entry, rows: Sequence[int], projections: dict[int, tuple[str, Projection]], hf: HfConfig
    ) -> None:
        """`rows`: output size of each projection. `projections`: {index in `rows`: (name, matrices)} of those with adapters."""
        super().__init__()
        self.active = True
        self._entry, self._hf, self._rows = entry, hf, rows
        self._sequence_parallel = config.sequence_parallel
        self._projections = {place: projection for place, (_, projection) in projections.items()}
        for name, projection in projections.values():
            self.add_module(name, projection)
            for parameter_name, parameter in projection.named_parameters():
                axis = cut_of(parameter_name, entry)
                if entry.of_experts:
                    parameter.allreduce = False  # type: ignore[attr-defined]
                    axis = axis or 0
                # The gradient norm counts sharded weights on every tensor rank, replicated ones on rank 0 only. An expert's adapter is
                # marked as sharded, since no other tensor rank has a copy.
                if axis is not None:
                    set_tensor_model_parallel_attributes(parameter, True, axis, 1)
                else:
                    # Ranks see only parts of the sequence; this mark makes finalize_model_grads sum gradients over ranks.
                    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the addition to the layer's output: [tokens, 1, in] -> [tokens, 1, out]; for an expert [tokens, in] -> [tokens, out]."""
        low = torch.nn.functional.linear(inputs, torch.cat([one.lora_A for one in self._projections.values()]))
        low = self._over_tensor_ranks(low)
        lows = iter(low.chunk(len(self._projections), dim=-1))
        outputs = []
        for place, rows in enumerate(self._rows):
            if (one := self._projections.get(place)) is not None:
                outputs.append(torch.nn.functional.linear(next(lows) * one.scale, one.lora_B))
            else:
                outputs.append(low.new_zeros(()).expand(*low.shape[:-1], rows))
        return join(self._entry, outputs, self._hf, dim=low.dim() - 1)

    def _over_tensor_ranks(self, low: torch.Tensor) -> torch.Tensor:
        """Combine A x over tensor ranks: column-parallel layers gather a sharded sequence, row-parallel ones sum."""
        if self._entry.of_experts:
            return low
        match self._entry.cut, self._sequence_parallel:
            case 0, True:
                return mappings.gather_from_sequence_parallel_region(low)
            case 0, False:
                return mappings.copy_to_tensor_model_parallel_region(low)
            case 1, True:
                return mappings.reduce_scatter_to_sequence_parallel_region(low)
            case _:
                return mappings.reduce_from_tensor_model_parallel_region(low)

    def add(self, _: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return (output[0] + self(inputs[0]), output[1]) if self.active else output

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        own = self.state_dict(keep_vars=True)
        axes = {name: axis for name in own if (axis := cut_of(name, self._entry)) is not None}
        groups = {"tp_group": cut_group(self._entry.of_experts), "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)


class Adapters:
    def __init__(self, chunks: Sequence[RollModel], hf: HfConfig, lora: LoraConfig, seed: int) -> None:
        self._all: list[Adapter] = []
        self.bindings: list[Binding] = []
        self.merging: dict[str, CutChange] = {}
        """{weight name: function that adds the adapter to a shard of the weight}."""
        self.scaling: dict[str, CutChange] = {}
        """{name of a B matrix: function that multiplies it by alpha / rank}."""
        for chunk in chunks:
            chunk.requires_grad_(False)
            for layer in chunk.decoder.layers:
                for entry in LAYER:
                    if entry.present(hf, layer.layer_number - 1) and any(target_of(name) in lora.targets for name in entry.hf):
                        for place, expert in enumerate(layer.mlp.local_expert_indices if entry.of_experts else [None]):
                            self._adapt(layer, entry, (place, expert), hf, lora, seed)

    def _adapt(self, layer: Any, entry: Entry, expert: tuple[int, int | None], hf: HfConfig, lora: LoraConfig, seed: int) -> None:
        names = entry.hf_names(layer.layer_number - 1, expert[1])
        chosen = {place: name for place, name in enumerate(names) if target_of(name) in lora.targets}
        parent, _, own_name = entry.megatron.replace(EXPERT, str(expert[0])).removesuffix(".weight").rpartition(".")
        linear = layer.get_submodule(parent).get_submodule(own_name)
        # The hook needs the input of the matrix product; with a fused norm it would get the norm's input.
        assert isinstance(linear, ColumnParallelLinear | RowParallelLinear), type(linear)
        cuts = take_apart(entry, linear.weight.detach(), hf)
        projections = {}
        for place, name in chosen.items():
            projection = Projection(name, cuts[place], entry, lora, seed)
            projections[place] = (str(target_of(name)), projection)
            self.merging[name] = projection.merged_with
            self.scaling[adapter_name(name, B)] = projection.scaled
            for matrix, parameter in projection.named_parameters():
                peft, own = adapter_name(name, matrix), f"{EXPERT}.{matrix}" if entry.of_experts else matrix
                self.bindings.append(Binding(Entry(own, (peft,), cut_of(matrix, entry)), (peft,), parameter))
        adapter = Adapter(layer.config, entry, [len(cut) for cut in cuts], projections, hf)
        layer.get_submodule(parent).add_module(f"{own_name}_adapter", adapter)
        linear.register_forward_hook(adapter.add)
        self._all.append(adapter)

    @contextmanager
    def off(self) -> Iterator[None]:
        for adapter in self._all:
            adapter.active = False
        try:
            yield
        finally:
            for adapter in self._all:
                adapter.active = True


def cut_of(matrix: str, entry: Entry) -> int | None:
    return entry.cut if matrix.endswith(A if entry.cut == 1 else B) else None
