"""Parts of decoder layers: torch's, or Transformer Engine's, which fuse a norm into the following product and run all experts in one call.
Attention is ours under both (layers.py): packed rows, windows, context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from roll_lite.distributed.strategy.megatron.experts import Balance, ExpertsLayer, experts_spec
from roll_lite.distributed.strategy.megatron.layers import SdpaAttention, TorchRMSNorm
from roll_lite.models.hf_config import HfConfig

# Norms are stored under Transformer Engine's names: either kind of layers finds what the other saved.
STORED_NAMES = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
STORED_NAMES_WITHOUT_EXPERTS = {**STORED_NAMES, "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


@dataclass(frozen=True)
class LayerParts:
    norm: Any
    normed_column: Any
    """Column-parallel linear whose inputs are normed: by a norm before it, or where `fused` by itself."""
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


def chosen_parts(wanted: Literal["auto", "torch", "transformer_engine"], has_adapters: bool) -> LayerParts:
    """Choose the parts. ValueError if Transformer Engine is asked for and not available."""
    obstacle = _obstacle(has_adapters)
    if wanted == "transformer_engine" and obstacle is not None:
        raise ValueError(f"strategy.layers: transformer_engine {obstacle}; use torch, or auto")
    return TORCH if wanted == "torch" or obstacle is not None else transformer_engine()


def _obstacle(has_adapters: bool) -> str | None:
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
    """Spec of a decoder layer, numbered from 0."""
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
    return ModuleSpec(
        module=ExpertsLayer if has_experts else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=separate_norm,
            self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm if has_experts else separate_norm,
            mlp=experts_spec(parts.experts, balance) if has_experts else dense,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if parts.fused else STORED_NAMES if has_experts else STORED_NAMES_WITHOUT_EXPERTS,
        ),
    )
