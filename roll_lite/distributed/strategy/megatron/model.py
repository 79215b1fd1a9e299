"""Megatron-Core's GPTModel with our attention and value head. The output layer runs only at positions that a loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from roll_lite.config.arithmetic import layers_per_chunk
from roll_lite.config.schema.models import MegatronStrategyConfig
from roll_lite.distributed.strategy.base import current_device
from roll_lite.distributed.strategy.megatron import layers
from roll_lite.distributed.strategy.megatron.experts import Balance, experts_config
from roll_lite.distributed.strategy.megatron.hf_mapping import Binding, bind
from roll_lite.distributed.strategy.megatron.layers import TORCH, LayerParts, ValueHead, layer_spec
from roll_lite.distributed.strategy.megatron.packed_rows import PackedRows
from roll_lite.models.hf_config import HfConfig, RopeConfig

ROTARY_STEP = 256
"""Divisor of rotary embedding lengths: Megatron caches each distinct length."""


COMPILED_VARIANTS = 64
"""Limit of torch.compile, beyond which a fused activation runs uncompiled. Single experts see 0, 1 and many tokens, with and without
gradients: torch's default of 8 is too small."""


def compile_rotary_embedding(backend: str = "inductor") -> None:
    """Compile Megatron's rotary embedding. Unused with `apply_rope_fusion`."""
    rope_utils._apply_rotary_pos_emb_bshd = torch.compile(rope_utils._apply_rotary_pos_emb_bshd, backend=backend)


def transformer_config(hf: HfConfig, strategy: MegatronStrategyConfig, dtype: torch.dtype, deterministic: bool) -> Any:
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=hf.layers,
        hidden_size=hf.hidden,
        ffn_hidden_size=hf.feed_forward,
        num_attention_heads=hf.heads,
        num_query_groups=hf.key_value_heads,
        kv_channels=hf.head_dim,
        layernorm_epsilon=hf.norm_eps,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        qk_layernorm=hf.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=strategy.tensor_parallel,
        pipeline_model_parallel_size=strategy.pipeline_parallel,
        pipeline_model_parallel_layout=_pipeline_layout(layers_per_chunk(strategy, hf.layers)) if strategy.pipeline_parallel > 1 else None,
        virtual_pipeline_model_parallel_size=strategy.virtual_pipeline_parallel if strategy.virtual_pipeline_parallel > 1 else None,
        context_parallel_size=strategy.context_parallel,
        expert_model_parallel_size=strategy.expert_parallel,
        expert_tensor_parallel_size=strategy.expert_tensor_parallel,
        sequence_parallel=strategy.sequence_parallel,
        # Interleaved stages must not batch sends and receives: with two stages, each is the other's predecessor and successor, and would
        # take gradients for activations.
        overlap_p2p_comm=strategy.virtual_pipeline_parallel > 1,
        batch_p2p_comm=strategy.virtual_pipeline_parallel == 1,
        # Micro-batches differ in token count, so stages exchange shapes.
        variable_seq_lengths=strategy.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",  # also for dense models: the default is refused with variable lengths
        **experts_config(hf),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        # Losses are weighted sums over tokens, so gradients are never divided by the number of micro-batches, tokens or ranks.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=layers.has_fused_kernels(),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=layers.chosen_parts(strategy.layers, has_adapters=False).fused,
        persist_layer_norm=False,
        window_size=None if hf.window is None else (hf.window - 1, 0),
        recompute_granularity=None if strategy.recompute == "none" else strategy.recompute,
        recompute_modules=list(strategy.recompute_modules or (["mlp", "moe"] if hf.experts else ["mlp"])),
        recompute_method="uniform" if strategy.recompute == "full" else None,
        recompute_num_layers=1 if strategy.recompute == "full" else None,
        deterministic_mode=deterministic,
    )


def _pipeline_layout(layers: Sequence[int]) -> list[list[str]]:
    parts = [["decoder"] * count for count in layers]
    return [["embedding", *parts[0]], *parts[1:-1], [*parts[-1], "loss"]]


class RollModel(GPTModel):
    """Pipeline stage (or chunk of a stage). The last stage (chunk) returns hidden states [N, hidden] or values [N] at N requested
    positions."""

    def __init__(
        self, config: Any, hf: HfConfig, value_head: bool, balance: Balance, part: int | None = None, parts: LayerParts = TORCH
    ) -> None:
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part)
        first = get_transformer_layer_offset(config, part)
        specs = [layer_spec(hf, first + number, balance, parts) for number in range(get_num_layers_to_build(config, part))]
        tensor_ranks = config.tensor_model_parallel_size
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.norm),
            # Padded to equal shares per tensor rank; the softmax masks the padding.
            vocab_size=-(-hf.vocab_size // tensor_ranks) * tensor_ranks,
            max_sequence_length=hf.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part),
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=hf.tied_embeddings and not value_head,
            position_embedding_type="rope",
            rotary_base=hf.rope.theta,
            seq_len_interpolation_factor=hf.rope.linear_factor,
            vp_stage=part,
        )
        scale_as_llama3(self.rotary_pos_emb, hf.rope)
        self.has_value_head = value_head
        if last and value_head:
            self.output_layer = ValueHead(config)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.device.type != current_device().type:  # expert routers; Megatron moves them only in the first forward pass
                tensor.data = tensor.data.to(current_device())
        _mark_weights(bind([self], hf))

    def forward(self, input_ids: torch.Tensor, rows: PackedRows, positions: torch.Tensor) -> torch.Tensor:
        """Run the stage. `input_ids` [1, tokens]: of this context-parallel rank. `positions` [N]: tokens that need a result."""
        embedded = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        if embedded is not None and self.config.recompute_granularity is not None:
            # Recomputed layers get gradients only if their input requires one; frozen embeddings do not.
            embedded.requires_grad_()
        # `packed_seq` makes Megatron return all positions; otherwise it selects this context-parallel rank's by another split.
        rotary = self.rotary_pos_emb(-(-rows.longest // ROTARY_STEP) * ROTARY_STEP, packed_seq=True).index_select(0, rows.places)
        hidden = self.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=rows)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # Each rank's vocabulary rows give a part of the gradient; the replicated value head gives all of it.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not self.has_value_head)
        chosen = hidden.squeeze(1).index_select(0, positions)
        if self.has_value_head:
            return self.output_layer(chosen)
        # Backward sums partial gradients over ranks; under sequence parallelism the gather above does so.
        return chosen if self.config.sequence_parallel else tensor_parallel.copy_to_tensor_model_parallel_region(chosen)

    @property
    def output_weight(self) -> torch.Tensor:
        """Output weight [V/tp, hidden] on a language model's last stage."""
        tied = self.share_embeddings_and_output_weights
        weight: torch.Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


def scale_as_llama3(rotary: Any, rope: RopeConfig) -> None:
    """Scale RoPE frequencies like Llama 3.1; Megatron-Core would use only the factor."""
    if rope.llama3 is not None:
        rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **rope.llama3)


def _mark_weights(bindings: Sequence[Binding]) -> None:
    for binding in bindings:
        weight: Any = binding.parameter
        # Megatron sets these only when it initializes weights. Without them the gradient norm counts a sharded weight on tensor rank 0
        # alone, and clipping is wrong.
        if binding.entry.cut is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, binding.entry.cut, 1)
        # False: the gradient is reduced over other ranks than a dense weight's. Megatron sets it only under expert parallelism. Without it,
        # gradients would miss other tensor ranks' tokens if expert_tensor_parallel < tensor_parallel, and checkpoints would not load under
        # another expert_parallel.
        if binding.entry.of_experts:
            weight.allreduce = False
