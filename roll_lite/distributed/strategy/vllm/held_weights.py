"""The model's weights as Hugging Face tensors again: what the engine computes with, not what it was sent.

vLLM fuses projections, shards them over workers and, on a CPU, packs matrices into an opaque layout and drops the
original. A packed matrix is read back by multiplying the identity with it, through the very kernel that inference uses:
each output is one product with 1 and sums of zeros, which is exact (but for the sign of zero and, on some CPUs, for
numbers below the smallest normal one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

_IDENTITY_ROWS = 256


def held_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, full size. All workers of an engine iterate together."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        prefix, _, leaf = path.rpartition(".")
        if isinstance(module, LinearBase):
            names = [f"{prefix}.{part}" if prefix else part for part in packed.get(leaf, [leaf])]
            yield from _linear(names, module)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _embedding(path, module, model)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}", parameter.detach()


def _linear(names: Sequence[str], module: LinearBase) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = {"weight": _matrix(module, _columns(module))}
    if module.bias is not None:
        tensors["bias"] = module.bias.detach()
    for kind, tensor in tensors.items():
        if isinstance(module, RowParallelLinear):
            yield f"{names[0]}.{kind}", _gather(tensor, 1) if kind == "weight" else tensor
            continue
        sizes, copies = _parts(module, tensor.shape[0])
        if len(sizes) != len(names):
            raise ValueError(f"{type(module).__name__} holds {len(sizes)} matrices, the model names {names}")
        for name, part, copy in zip(names, tensor.split(sizes), copies, strict=True):
            yield f"{name}.{kind}", _gather(part, 0, copy) if isinstance(module, ColumnParallelLinear) else part


def _columns(module: LinearBase) -> int:
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _parts(module: LinearBase, rows: int) -> tuple[list[int], list[int]]:
    """Rows of each fused matrix on this worker, and on how many workers each is repeated."""
    if isinstance(module, QKVParallelLinear):
        sizes = [module.num_heads * module.head_size, module.num_kv_heads * module.head_size, module.num_kv_heads * module.v_head_size]
        return sizes, [1, module.num_kv_head_replicas, module.num_kv_head_replicas]
    if isinstance(module, MergedColumnParallelLinear):
        return [size // module.tp_size for size in module.output_sizes], [1] * len(module.output_sizes)
    return [rows], [1]


def _embedding(path: str, module: VocabParallelEmbedding, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(module, ParallelLMHead):
        yield f"{path}.weight", _gather(module.weight.detach(), 0)[: module.org_vocab_size]
        return
    head = _gather(_matrix(module, module.embedding_dim), 0)[: module.org_vocab_size]
    tied_to = next((other for other in model.modules() if other is not module and getattr(other, "weight", None) is module.weight), None)
    if tied_to is None:
        yield f"{path}.weight", head
    elif not torch.equal(head, _gather(module.weight.detach(), 0)[: module.org_vocab_size]):
        raise RuntimeError(f"{path} computes with another matrix than the embedding that it is tied to")


def _matrix(module: nn.Module, columns: int) -> torch.Tensor:
    """[rows, columns] of a layer's weight on this worker."""
    multiply = getattr(module, "cpu_linear", None)
    weight: torch.Tensor = module.get_parameter("weight").detach()
    if multiply is None:
        return weight
    identity = torch.eye(columns, dtype=weight.dtype)
    return torch.cat([multiply(rows.contiguous(), weight, None).t() for rows in identity.split(_IDENTITY_ROWS)], dim=1)


def _gather(part: torch.Tensor, dim: int, copies: int = 1) -> torch.Tensor:
    workers = get_tensor_model_parallel_world_size()
    if workers == 1:
        return part
    gathered = tensor_model_parallel_all_gather(part.contiguous(), dim)
    return torch.cat(gathered.chunk(workers, dim)[::copies], dim)
