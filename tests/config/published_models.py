"""config.json files as they are published, by the families that can be trained. The numbers are those of the models."""

from __future__ import annotations

from typing import Any


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


QWEN2_5_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN2_5_0_5B = QWEN2_5_7B | {
    "bos_token_id": 151643,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "vocab_size": 151936,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
LLAMA_2_7B: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3_1_8B = LLAMA_2_7B | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "vocab_size": 128256,
}
LLAMA_3_2_1B = LLAMA_3_1_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0},
    "tie_word_embeddings": True,
}
QWEN2_AS_TRANSFORMERS_5_SAVES_IT = {
    key: value for key, value in QWEN2_5_0_5B.items() if key not in ("rope_theta", "torch_dtype", "use_mrope")
} | {
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 24,
    "pad_token_id": None,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None,
    "transformers_version": "5.19.0",
}
SMOLLM2 = LLAMA_2_7B | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
DEEPSEEK_CODER = LLAMA_2_7B | {
    "bos_token_id": 32013,
    "eos_token_id": 32014,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
    "rope_theta": 100000,
    "vocab_size": 32256,
}

MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}

TRAINABLE: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": QWEN2_5_0_5B,
    "Qwen2.5-7B": QWEN2_5_7B,
    "Qwen2.5-Math-7B": QWEN2_5_7B | {"max_position_embeddings": 4096, "rope_theta": 10000, "sliding_window": 4096, "use_mrope": False},
    "DeepSeek-R1-Distill-Qwen-1.5B": QWEN2_5_7B
    | {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "use_mrope": False},
    "a fine-tune of Unsloth": QWEN2_5_7B | {"pad_token_id": 151654, "unsloth_fixed": True, "unsloth_version": "2025.3.4"},
    "saved by transformers 5": QWEN2_AS_TRANSFORMERS_5_SAVES_IT,
    "saved by transformers 4.5x": QWEN2_5_0_5B | {"layer_types": ["full_attention"] * 24, "rope_scaling": None, "sliding_window": None},
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-0.6B": QWEN3_8B | {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28, "tie_word_embeddings": True},
    "Qwen3 without head_dim": without(QWEN3_8B, "head_dim"),
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-MoE as transformers 5 saves it": without(QWEN3_30B_A3B, "num_experts") | {"num_local_experts": 128},
    "Qwen3-MoE with some dense layers": QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 4], "norm_topk_prob": False},
    "Llama-2-7b": LLAMA_2_7B,
    "Llama-2-7b-chat": LLAMA_2_7B | {"max_length": 4096},
    "vicuna-7b": LLAMA_2_7B | {"max_sequence_length": 4096, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6, "do_sample": True},
    "llama-7b": {
        key: value for key, value in LLAMA_2_7B.items() if key not in ("num_key_value_heads", "rope_scaling", "max_position_embeddings")
    },
    "CodeLlama-7b": LLAMA_2_7B | {"rope_theta": 1000000, "max_position_embeddings": 16384, "vocab_size": 32016},
    "Llama-3-8B": LLAMA_3_1_8B | {"rope_scaling": None, "max_position_embeddings": 8192},
    "Llama-3.1-8B-Instruct": LLAMA_3_1_8B,
    "Llama-3.2-1B-Instruct": LLAMA_3_2_1B,
    "DeepSeek-R1-Distill-Llama-8B": LLAMA_3_1_8B | {"eos_token_id": 128001},
    "SmolLM2-135M": SMOLLM2,
    "deepseek-coder-6.7b": DEEPSEEK_CODER,
    "Mistral-7B-v0.1": MISTRAL_7B,
    "Mistral-7B-Instruct-v0.3": MISTRAL_7B | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "Mistral without what it need not say": without(
        MISTRAL_7B, "sliding_window", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"
    ),
    "Mistral-7B-v0.1 with its kinds of layers": MISTRAL_7B | {"layer_types": ["sliding_attention"] * 32},
    "Llama with another llama3 RoPE": LLAMA_3_1_8B
    | {
        "rope_scaling": {
            **LLAMA3_ROPE,
            "factor": 5.5,
            "low_freq_factor": 2.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 640,
        }
    },
    "a sequence classifier": LLAMA_3_1_8B
    | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": 128256,
    },
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
QUANTIZED = {"bits": 4, "group_size": 128, "quant_method": "gptq"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another family": (
        LLAMA_2_7B | {"model_type": "gemma2"},
        "model_type 'gemma2' cannot be trained; supported are qwen2, qwen3, qwen3_moe, llama",
    ),
    "experts of a dense family": (QWEN3_8B | {"num_experts": 8}, "num_experts is 8, which is not known here"),
    "shared experts": (
        QWEN3_30B_A3B | {"shared_expert_intermediate_size": 64},
        "shared_expert_intermediate_size is 64, which is not known",
    ),
    "more experts per token than there are": (QWEN3_30B_A3B | {"num_experts_per_tok": 129}, "129; there are only 128 experts"),
    "two numbers of experts": (QWEN3_30B_A3B | {"num_local_experts": 64}, "num_local_experts is 64 beside num_experts 128"),
    "a router without a choice": (QWEN3_30B_A3B | {"num_experts_per_tok": 1}, "its weight would always be 1"),
    "no layer with experts": (QWEN3_30B_A3B | {"decoder_sparse_step": 99}, "leave no layer with experts"),
    "no size of experts": (without(QWEN3_30B_A3B, "moe_intermediate_size"), "has no 'moe_intermediate_size'"),
    "dense layers by name": (QWEN3_30B_A3B | {"mlp_only_layers": ["first"]}, "it must be a list of layer numbers"),
    "partial rotation of transformers 5": (
        LLAMA_2_7B | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is not supported",
    ),
    "Qwen2.5-7B with YaRN": (QWEN2_5_7B | {"rope_scaling": YARN}, "RoPE scaling 'yarn' is not supported"),
    "Qwen3-8B with YaRN": (QWEN3_8B | {"rope_scaling": {**YARN, "rope_type": "yarn"}}, "RoPE scaling 'yarn' is not supported"),
    "saved by transformers 5, then the family's YaRN advice": (
        QWEN2_AS_TRANSFORMERS_5_SAVES_IT | {"rope_scaling": {**YARN, "rope_type": "yarn"}},
        "rope_parameters is .* and rope_scaling is .*: transformers and the engines would drop the first; write one dictionary",
    ),
    "saved by transformers 5, with linear scaling beside it": (
        QWEN2_AS_TRANSFORMERS_5_SAVES_IT | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "write one dictionary, rope_parameters",
    ),
    "two base wavelengths": (QWEN2_AS_TRANSFORMERS_5_SAVES_IT | {"rope_theta": 10000.0}, r"rope_theta is 10000\.0 beside 1000000\.0"),
    "one RoPE per kind of layer": (
        QWEN2_AS_TRANSFORMERS_5_SAVES_IT | {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
        "rope_parameters has settings of its own for full_attention",
    ),
    "a RoPE of several dimensions": (
        QWEN2_5_7B | {"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}},
        r"RoPE scaling default with mrope_section \[16, 24, 24\], which is not known",
    ),
    "dynamic NTK": (LLAMA_2_7B | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic' is not supported"),
    "a llama3 RoPE upside down": (
        LLAMA_3_1_8B | {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}},
        r"low_freq_factor 4\.0, which is not below high_freq_factor 4\.0",
    ),
    "a llama3 RoPE without its length": (
        LLAMA_3_1_8B | {"rope_scaling": without(LLAMA3_ROPE, "original_max_position_embeddings")},
        "original_max_position_embeddings None; it must be a positive number",
    ),
    "fewer kinds of layers than layers": (
        QWEN3_8B | {"layer_types": ["full_attention"] * 35},
        "layer_types has 35 entries; num_hidden_layers is 36",
    ),
    "a Qwen2 with heads of their own size": (QWEN2_5_7B | {"head_dim": 64}, "head_dim is 64; engines take .* = 128"),
    "its activation by another name": (LLAMA_2_7B | {"hidden_act": "swish"}, "hidden_act is 'swish'; only 'silu' is supported"),
    "linear without a factor": (LLAMA_2_7B | {"rope_scaling": {"type": "linear"}}, "linear needs a factor"),
    "Qwen2.5-7B-1M": (
        QWEN2_5_7B | {"dual_chunk_attention_config": {"chunk_size": 262144}},
        r"dual_chunk_attention_config is \{'chunk_size'",
    ),
    "Qwen2.5-7B-GPTQ": (QWEN2_5_7B | {"quantization_config": QUANTIZED}, "quantised weights cannot be trained"),
    "Qwen2 with its sliding window": (QWEN2_5_7B | {"use_sliding_window": True}, "use_sliding_window is True; only False"),
    "layers with a sliding window": (
        QWEN3_8B | {"layer_types": ["full_attention", "sliding_attention"] * 18},
        "layer_types holds 'sliding_attention'",
    ),
    "a Llama with a sliding window": (LLAMA_2_7B | {"sliding_window": 4096}, "sliding_window is 4096; set it to null"),
    "a Mistral with two minds about its window": (
        MISTRAL_7B | {"layer_types": ["full_attention"] * 32},
        "layer_types holds 'full_attention'; only 'sliding_attention' is supported: every layer here attends to the sliding_window",
    ),
    "a window of nothing": (MISTRAL_7B | {"sliding_window": 0}, "sliding_window is 0; it must be a positive integer"),
    "an embedding model of both directions": (QWEN2_5_7B | {"is_causal": False}, "is_causal is False; only True"),
    "an attention with biases": (LLAMA_3_1_8B | {"attention_bias": True}, "attention_bias is True"),
    "an MLP with biases": (LLAMA_3_1_8B | {"mlp_bias": True}, "mlp_bias is True"),
    "another activation": (LLAMA_2_7B | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
    "dropout": (LLAMA_2_7B | {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "partial rotation": (LLAMA_3_1_8B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "a reward model with a head of its own": (
        QWEN2_5_7B | {"architectures": ["Qwen2ForRewardModel"], "auto_map": {"AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel"}},
        "architectures names 'Qwen2ForRewardModel'; supported for qwen2 are Qwen2ForCausalLM.*auto_map is",
    ),
    "another family's code": (LLAMA_2_7B | {"architectures": ["MistralForCausalLM"]}, "architectures names 'MistralForCausalLM'"),
    "fields of nobody's": (
        LLAMA_2_7B | {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
        "logits_scaling is 8.0.*embedding_multiplier is",
    ),
    "scaling that is a list": (LLAMA_2_7B | {"rope_scaling": [1]}, "rope_scaling is .1.; it must be a dictionary"),
    "a factor of nothing": (LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": 0}}, "needs a factor of at least 1, got 0"),
    "a factor that is none": (LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": True}}, "needs a factor of at least 1, got True"),
    "no epsilon": (LLAMA_2_7B | {"rms_norm_eps": None}, "rms_norm_eps is None; it must be a small positive number"),
    "an epsilon in words": (LLAMA_2_7B | {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
    "no number of heads": (without(LLAMA_2_7B, "num_attention_heads"), "has no 'num_attention_heads'"),
}
