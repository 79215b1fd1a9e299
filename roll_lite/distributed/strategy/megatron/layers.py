"""Our own layers in Megatron's model: norm, core attention, and the critic's head."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import divide

from roll_lite.distributed.strategy.device import current_device


class TorchRMSNorm(torch.nn.RMSNorm):
    """The norm of torch that comes with Megatron refuses sequence parallelism, the fused one needs Apex."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=current_device())
        # Under sequence parallelism each rank sees a part of the sequence: finalize_model_grads adds up what is marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SdpaAttention(MegatronModule):
    """Causal attention with grouped queries, on torch's scaled_dot_product_attention.

    Rows are padded on the right, so the causal mask alone keeps padding out of sight. Megatron hands over
    [tokens, batch, heads, head_dim] and takes [tokens, batch, heads * head_dim].
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


class ValueHead(torch.nn.Module):
    """One number per position, replicated over tensor ranks."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to [N] float32; the product is taken in float32, values are regressed on."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()).squeeze(-1)
