"""Decoder layers from modules of Megatron and torch or of Transformer Engine, with our value head and attention over packed rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import divide
from torch.nn.attention.varlen import varlen_attn

from roll_lite.distributed.strategy.base import current_device
from roll_lite.distributed.strategy.megatron.experts import Balance, ExpertRouter, Experts, ExpertsLayer, GroupedExperts
from roll_lite.distributed.strategy.megatron.packed_rows import PackedRows
from roll_lite.models.hf_config import HfConfig

GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Argument for grouped-query attention; torch 2.11 neither has nor needs it."""


def has_fused_kernels() -> bool:
    """True if fused GPU kernels are available. Memory plans for GPUs make this True anywhere."""
    return torch.cuda.is_available()


class TorchRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with sequence parallelism, which Megatron's wrapper refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=current_device())
        # Ranks see only parts of the sequence; this mark makes finalize_model_grads sum gradients over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SdpaAttention(MegatronModule):
    """Causal grouped-query attention within packed rows, with an optional sliding window: [tokens, 1, heads, head_dim] -> [tokens, 1, heads
    * head_dim]. Context-parallel ranks gather keys and values."""

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
        self.context_group = pg_collection.cp
        self.looks_back: int | None = None if config.window_size is None else config.window_size[0]
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
        if rows.key_index is not None:
            gathered = (gather_from_sequence_parallel_region(each, group=self.context_group) for each in (key, value))
            key, value = (each.index_select(0, rows.key_index) for each in gathered)
        q, k, v = (part.squeeze(1) for part in (query, key, value))
        packed = self._variable_length if q.is_cuda and q.dtype == torch.bfloat16 else self._run_by_run
        return packed(q, k, v, rows).reshape(len(query), 1, -1)

    def _variable_length(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        """Flash attention. `window_size`: tokens before (-1: all) and after."""
        window = (-1 if self.looks_back is None else self.looks_back, 0)
        key_starts = rows.starts if rows.key_starts is None else rows.key_starts
        sizes = rows.most_tokens, rows.most_keys
        output = varlen_attn(q, k, v, rows.starts, key_starts, *sizes, scale=self.softmax_scale, window_size=window, **GROUPED)
        assert isinstance(output, torch.Tensor)
        return output

    def _run_by_run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        """SDPA over batches of adjacent rows of equal length, without padding or copies."""
        cuts = ([count * size for count, size, _ in rows.runs], [count * keys for count, _, keys in rows.runs])
        outputs = []
        for (count, size, keys), *parts in zip(rows.runs, q.split(cuts[0]), k.split(cuts[1]), v.split(cuts[1]), strict=True):
            query, key, value = (part.view(count, -1, *part.shape[1:]).transpose(1, 2) for part in parts)
            mask = self._before(size, keys, q.device)
            found = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=self.queries_per_key > 1
            )
            outputs.append(found.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)

    def _before(self, size: int, keys: int, device: torch.device) -> torch.Tensor | None:
        """Return the mask [size, keys] of queries at the last `size` of `keys` tokens; None if plain causal attention suffices."""
        windowed = self.looks_back is not None and self.looks_back + 1 < keys
        if size == keys and not windowed:
            return None
        mask = torch.ones(size, keys, dtype=torch.bool, device=device).tril(keys - size)
        return mask.triu(keys - size - self.looks_back) if windowed and self.looks_back is not None else mask


class ValueHead(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return values, [N, hidden] -> [N], in float32: they are regression outputs."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()).squeeze(-1)


# Norms are stored under Transformer Engine's names, so that torch's and Transformer Engine's layers can load each other's checkpoints.
STORED_NAMES = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
STORED_NAMES_WITHOUT_EXPERTS = {**STORED_NAMES, "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


@dataclass(frozen=True)
class LayerParts:
    norm: Any
    normed_column: Any
    """Column-parallel linear layer; with `fused`, including its input's norm."""
    row: Any
    experts: Any
    fused: bool


TORCH = LayerParts(
    norm=TorchRMSNorm,
    normed_column=ColumnParallelLinear,
    row=RowParallelLinear,
    experts=ModuleSpec(SequentialMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
    fused=False,
)
TORCH_ON_GPU = replace(TORCH, experts=ModuleSpec(GroupedExperts, submodules=TORCH.experts.submodules))
"""Layers for GPUs: one kernel computes all experts. Adapters, which hook into each expert's layers, cannot use them."""


def chosen_parts(wanted: Literal["auto", "torch", "transformer_engine"], has_adapters: bool) -> LayerParts:
    """Choose layer classes. "auto": Transformer Engine's if installed, on a GPU, without adapters. ValueError if `wanted` is unusable."""
    reason = _why_unusable(has_adapters)
    if wanted == "transformer_engine" and reason is not None:
        raise ValueError(f"strategy.layers: transformer_engine {reason}; use torch, or auto")
    if wanted != "torch" and reason is None:
        return transformer_engine()
    return TORCH_ON_GPU if has_fused_kernels() and not has_adapters else TORCH


def _why_unusable(has_adapters: bool) -> str | None:
    if find_spec("transformer_engine") is None:
        return "is not installed here (the package transformer-engine)"
    if not torch.cuda.is_available():
        return "needs a GPU, and there is none here"
    return "has norms inside the products that adapters (lora) are put beside" if has_adapters else None


def transformer_engine() -> LayerParts:
    from megatron.core.extensions import transformer_engine as te

    return LayerParts(
        norm=te.TENorm,
        normed_column=te.TELayerNormColumnParallelLinear,
        row=te.TERowParallelLinear,
        experts=ModuleSpec(
            TEGroupedMLP,
            submodules=MLPSubmodules(linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear),
        ),
        fused=True,
    )


def layer_spec(hf: HfConfig, number: int, balance: Balance, parts: LayerParts = TORCH) -> Any:
    head_norm = parts.norm if hf.qk_norm else IdentityOp
    separate_norm = IdentityOp if parts.fused else parts.norm
    attention = SelfAttentionSubmodules(
        linear_qkv=parts.normed_column,
        core_attention=SdpaAttention,
        linear_proj=parts.row,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    has_experts = hf.has_experts(number)
    dense = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=parts.normed_column, linear_fc2=parts.row))
    sparse = ModuleSpec(Experts, submodules=MoESubmodules(experts=parts.experts, router=partial(ExpertRouter, balance=balance)))
    return ModuleSpec(
        module=ExpertsLayer if has_experts else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=separate_norm,
            self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm if has_experts else separate_norm,
            mlp=sparse if has_experts else dense,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if parts.fused else STORED_NAMES if has_experts else STORED_NAMES_WITHOUT_EXPERTS,
        ),
    )
