"""Our own layers in Megatron's model: norm, core attention over packed rows, and the critic's head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import divide
from torch.nn.attention.varlen import varlen_attn

from roll_lite.distributed.strategy.device import current_device


class TorchRMSNorm(torch.nn.RMSNorm):
    """The norm of torch that comes with Megatron refuses sequence parallelism, the fused one needs Apex."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=current_device())
        # Under sequence parallelism each rank sees a part of the sequence: finalize_model_grads adds up what is marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass(frozen=True)
class PackedRows:
    """Rows one behind the other in a single sequence of tokens: which of them see each other, and where in its row each one stands.

    Goes through Megatron's layers in the place of its own PackedSeqParams, of whose formats it declares the one in which rotary
    embeddings come ready for every token: those of `thd` are cut and joined row by row in every layer, waiting for the device each time.
    """

    runs: tuple[tuple[int, int], ...]
    """(rows, tokens of each) of neighbours that are equally long."""
    places: torch.Tensor
    """[tokens] int64: of each token in its row, from 0."""
    starts: torch.Tensor
    """[rows + 1] int32: where each row begins, and where the last one ends."""
    qkv_format = "sbhd"

    @staticmethod
    def of(lengths: torch.Tensor) -> PackedRows:
        """On the host."""
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        sizes, counts = torch.unique_consecutive(lengths, return_counts=True)
        places = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], lengths)
        return PackedRows(tuple(zip(counts.tolist(), sizes.tolist(), strict=True)), places, starts.int())

    @property
    def longest(self) -> int:
        return max(size for _, size in self.runs)


class SdpaAttention(MegatronModule):
    """Causal attention with grouped queries within packed rows, on torch's scaled_dot_product_attention.

    Megatron hands over [tokens, 1, heads, head_dim] and takes [tokens, 1, heads * head_dim].
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)
        tensor_parallel = pg_collection.tp.size()
        self.queries_per_key = divide(config.num_attention_heads, tensor_parallel) // divide(config.num_query_groups, tensor_parallel)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        assert attention_mask is None and attention_bias is None and packed_seq_params is not None, "only packed causal rows come here"
        rows: PackedRows = packed_seq_params
        q, k, v = (part.squeeze(1) for part in (query, key, value))
        packed = self._variable_length if q.is_cuda and q.dtype == torch.bfloat16 else self._run_by_run
        return packed(q, k, v, rows).reshape(len(query), 1, -1)

    def _variable_length(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        """Flash attention; a window of (-1, 0) is the causal one."""
        starts, longest = rows.starts, rows.longest
        output = varlen_attn(q, k, v, starts, starts, longest, longest, scale=self.softmax_scale, window_size=(-1, 0), enable_gqa=True)
        assert isinstance(output, torch.Tensor)
        return output

    def _run_by_run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        """Neighbours of one length are a batch without padding, and no copy."""
        sizes = [count * size for count, size in rows.runs]
        outputs = []
        for (count, size), *parts in zip(rows.runs, *(each.split(sizes) for each in (q, k, v)), strict=True):
            query, key, value = (part.view(count, size, *part.shape[1:]).transpose(1, 2) for part in parts)
            found = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=self.queries_per_key > 1
            )
            outputs.append(found.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)


class ValueHead(torch.nn.Module):
    """One number per position, replicated over tensor ranks."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to [N] float32; the product is taken in float32, values are regressed on."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()).squeeze(-1)
