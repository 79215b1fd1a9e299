"""Read an engine's weights back as Hugging Face tensors, to compare them with the trainer's.

vLLM packs matrices on CPUs. A product with the identity unpacks them, exactly but for zero's sign and, on some CPUs, subnormal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roll_lite.distributed.strategy.inference.settings import FUSED

_IDENTITY_ROWS = 256
EXPERT = ("gate_proj", "up_proj", "down_proj")

Gather = Callable[[torch.Tensor, int], torch.Tensor]
ReadExperts = Callable[[Any], tuple[int, torch.Tensor, torch.Tensor]]
"""Reads this worker's part of an expert layer: (number of experts on all workers, gate_proj above up_proj [experts, 2 * rows, columns],
down_proj [experts, columns, rows])."""


@dataclass(frozen=True)
class Layers:
    """Layer classes of vLLM or SGLang; `gather(part, dim)` joins shards."""

    linear: Any
    vocabulary: Any
    experts: type[Any]
    read_experts: ReadExperts
    workers: int
    gather: Gather

    def whole(self, part: torch.Tensor, dim: int, copies: int = 1) -> torch.Tensor:
        """Join a tensor's shards (collective). `copies`: workers per shard; RuntimeError if their shards differ."""
        if self.workers == 1:
            return part
        parts = self.gather(part.contiguous(), dim).chunk(self.workers, dim)
        if copies > 1 and any(not torch.equal(one, parts[place // copies * copies]) for place, one in enumerate(parts)):
            raise RuntimeError("weight_sync: workers of an engine that repeat a part of a matrix hold different ones")
        return torch.cat(parts[::copies], dim)


def held_weights(model: nn.Module, layers: Layers, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, unsharded weight) for `names` (None: all). Collective over the engine's workers."""
    parents = {name.rpartition(".")[0] for name in names or ()}
    for path, module in model.named_modules():
        if names is not None and isinstance(module, layers.experts) and not any("experts." in name for name in names):
            continue  # experts on a GPU cannot be read
        held, tensors = _of_module(path, module, model, layers)
        if names is None or not parents.isdisjoint(held):
            yield from (one for one in tensors if names is None or one[0] in names)


def _of_module(path: str, module: nn.Module, model: nn.Module, layers: Layers) -> tuple[list[str], Iterator[tuple[str, torch.Tensor]]]:
    if isinstance(module, layers.linear.LinearBase):
        held = held_layers(path, model)
        return held, _linear(held, module, layers)
    if isinstance(module, layers.vocabulary.VocabParallelEmbedding):
        return [path], _embedding(path, module, model, layers)
    if isinstance(module, layers.experts):
        count, gate_up, down = layers.read_experts(module)
        names = path.removesuffix(".routed_experts")
        held = [f"{names}.{number}.{part}" for number in range(count) for part in EXPERT]
        return held, _experts(names, count, gate_up, down, layers)
    return [path], ((f"{path}.{name}", parameter.detach()) for name, parameter in module.named_parameters(recurse=False))


def held_layers(path: str, model: nn.Module) -> list[str]:
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", FUSED)
    prefix, _, leaf = path.rpartition(".")
    return [f"{prefix}.{part}" if prefix else part for part in packed.get(leaf, [leaf])]


def _linear(names: Sequence[str], module: Any, layers: Layers) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = {"weight": _matrix(module, int(getattr(module, "input_size_per_partition", module.input_size)))}
    if module.bias is not None:
        tensors["bias"] = module.bias.detach()
    for kind, tensor in tensors.items():
        if isinstance(module, layers.linear.RowParallelLinear):
            yield f"{names[0]}.{kind}", layers.whole(tensor, 1) if kind == "weight" else tensor
            continue
        sizes, copies = shares(module, tensor.shape[0], layers)
        if len(sizes) != len(names):
            raise ValueError(f"{type(module).__name__} holds {len(sizes)} matrices, the model names {names}")
        for name, part, copy in zip(names, tensor.split(sizes), copies, strict=True):
            yield f"{name}.{kind}", layers.whole(part, 0, copy) if isinstance(module, layers.linear.ColumnParallelLinear) else part


def _experts(path: str, count: int, gate_up: torch.Tensor, down: torch.Tensor, layers: Layers) -> Iterator[tuple[str, torch.Tensor]]:
    """Join the workers' parts of an expert layer; yield (name, full matrix). A worker with all `count` experts has a slice of each,
    otherwise a block of whole experts."""
    here = len(gate_up)
    for number in range(here):
        for part, tensor, dim in zip(EXPERT, (*gate_up[number].chunk(2), down[number]), (0, 0, 1), strict=True):
            if here == count:
                yield f"{path}.{number}.{part}.weight", layers.whole(tensor, dim)
                continue
            for worker, whole in enumerate(layers.whole(tensor[None], 0)):
                yield f"{path}.{worker * here + number}.{part}.weight", whole


def shares(module: Any, rows: int, layers: Layers) -> tuple[list[int], list[int]]:
    """Return, for each matrix fused in the module, its rows on this worker and how many workers hold the same rows (several for replicated
    key and value heads)."""
    if isinstance(module, layers.linear.QKVParallelLinear):
        keys = module.num_kv_heads * module.head_size
        values = module.num_kv_heads * int(getattr(module, "v_head_size", module.head_size))
        return [rows - keys - values, keys, values], [1, module.num_kv_head_replicas, module.num_kv_head_replicas]
    if isinstance(module, layers.linear.MergedColumnParallelLinear):
        return [size // layers.workers for size in module.output_sizes], [1] * len(module.output_sizes)
    return [rows], [1]


def _embedding(path: str, module: Any, model: nn.Module, layers: Layers) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(module, layers.vocabulary.ParallelLMHead):
        yield f"{path}.weight", layers.whole(module.weight.detach(), 0)[: module.org_vocab_size]
        return
    head = layers.whole(_matrix(module, module.embedding_dim), 0)[: module.org_vocab_size]
    tied_to = next((other for other in model.modules() if other is not module and getattr(other, "weight", None) is module.weight), None)
    if tied_to is None:
        yield f"{path}.weight", head
    elif not torch.equal(head, layers.whole(module.weight.detach(), 0)[: module.org_vocab_size]):
        raise RuntimeError(f"{path} computes with another matrix than the embedding that it is tied to")


def _matrix(module: Any, columns: int) -> torch.Tensor:
    multiply = getattr(module, "cpu_linear", None)
    weight: torch.Tensor = module.weight.detach()
    if multiply is None:
        return weight
    identity = torch.eye(columns, dtype=weight.dtype)
    return torch.cat([multiply(rows.contiguous(), weight, None).t() for rows in identity.split(_IDENTITY_ROWS)], dim=1)
