"""Core attention on torch's scaled_dot_product_attention, in place of Transformer Engine and Megatron's unfused one."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import divide


class SdpaAttention(MegatronModule):
    """Causal attention with grouped queries. Rows are padded on the right, so the causal mask alone keeps padding out of sight.

    Megatron hands over [tokens, batch, heads, head_dim] and takes [tokens, batch, heads * head_dim].
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
        assert attention_mask is None and attention_bias is None and packed_seq_params is None, "only padded causal rows come here"
        tokens, batch, heads, head_dim = query.shape
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=self.queries_per_key > 1,
        )
        return output.permute(2, 0, 1, 3).reshape(tokens, batch, heads * head_dim)
