"""Check the fields of config.json.

Unknown fields are refused: they might change the model. A field is ignored only if engines ignore it: they read more fields than
transformers (vLLM: is_causal, layer_types).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


READ = names(
    """model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings rms_norm_eps tie_word_embeddings rope_theta rope_scaling rope_parameters sliding_window"""
)
READ_OF_EXPERTS = names(
    """num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers
    router_aux_loss_coef output_router_logits"""
)
"""Fields of models with experts. The last two are ignored: roll_lite's balance_coef sets the load-balancing loss."""

ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "the MLP here is SwiGLU; engines know its function (SiLU, swish) by this name alone"),
    "attention_bias": ((False, None), "biases here are those of Qwen2's query, key and value"),
    "mlp_bias": ((False, None), "the MLP here has no biases"),
    "attention_dropout": ((0, None), "set it to 0: engines know no dropout, so that training would see another policy"),
    "hidden_dropout": ((0, None), "set it to 0: engines know no dropout, so that training would see another policy"),
    "use_sliding_window": ((False, None), "every layer here attends to the whole context"),
    "is_causal": ((True,), "attention here is causal"),
    "partial_rotary_factor": ((1, None), "RoPE here turns whole heads"),
    "use_mrope": ((False, None), "positions here have one dimension"),
    "rope_interleaved": ((False, None), "RoPE here turns the two halves of a head against each other"),
    "is_encoder_decoder": ((False, None), "models here are decoders"),
    "add_cross_attention": ((False, None), "models here are decoders"),
    "pruned_heads": (({}, None), "all layers here have all heads"),
    "per_layer_config": (({}, None), "all layers here are alike"),
    "auto_map": (({}, None), "code that comes with a model is not run; take a model that transformers itself knows"),
    "quantization_config": ((None,), "quantised weights cannot be trained; take the model in bfloat16 or float32"),
    "compression_config": ((None,), "compressed weights cannot be trained; take the model in bfloat16 or float32"),
}
"""{field that changes the model: (supported values, reason)}."""

OF_FILES = names(
    """transformers_version dtype torch_dtype use_cache initializer_range max_window_layers pretraining_tp _name_or_path name_or_path
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal attn_implementation _commit_hash _from_model_config
    _flash_attn_2_enabled _experts_implementation_internal chunk_size_feed_forward gradient_checkpointing is_decoder tie_encoder_decoder
    cross_attention_hidden_size output_attentions output_hidden_states return_dict use_return_dict torchscript tf_legacy_loss
    use_bfloat16 tokenizer_class prefix task_specific_params finetuning_task unsloth_fixed unsloth_version is_llama_config"""
)
"""Ignored fields: about files, training, and transformers' implementation."""
OF_HEADS = names("problem_type id2label label2id num_labels classifier_dropout")
"""Fields of classifiers, ignored here; config/checks/scoring_models.py checks the number of labels."""
OF_LENGTHS = names("max_sequence_length model_max_length seq_length")
"""Ignored length limits; engines report requests that exceed them."""
OF_GENERATION = names(
    """bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id end_token_id max_length
    max_new_tokens min_length min_new_tokens min_p do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens assistant_confidence_threshold assistant_lookbehind num_assistant_tokens num_assistant_tokens_schedule
    target_lookbehind"""
)
"""Ignored fields: special tokens and sampling defaults. Requests carry their own."""
WITH_EXPERTS = ("qwen3_moe",)
_CLASSES = {"qwen3_moe": "Qwen3Moe"}
WITHOUT_EFFECT = OF_FILES | OF_HEADS | OF_LENGTHS | OF_GENERATION
HEADS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "Model")
POLICY_HEADS = ("ForCausalLM",)
"""Class-name endings of architectures that generate text; with others, engines would not generate."""
LLAMA3_FIELDS = names("factor low_freq_factor high_freq_factor original_max_position_embeddings")
_ROPE_FIELDS = {"default": names(""), "linear": names("factor"), "llama3": LLAMA3_FIELDS}


def refusals(raw: Mapping[str, Any], heads: Sequence[str] = HEADS) -> Iterator[str]:
    """Yield a message per unsupported field. `heads`: allowed endings of the architecture's class name."""
    for field, value in raw.items():
        if field in ONLY:
            accepted, reason = ONLY[field]
            if value not in accepted and not (field == "attention_bias" and raw["model_type"] == "qwen2"):  # not a setting of Qwen2
                yield f"{field} is {value!r}; only {accepted[0]!r} is supported: {reason}"
        elif field == "architectures":
            yield from _architecture(raw["model_type"], value, heads)
        elif field == "layer_types":
            yield from _layer_types(raw, value)
        elif field == "sliding_window":
            if value is not None and raw["model_type"] == "llama":  # Qwen has a switch, use_sliding_window; Mistral's is supported
                yield f"sliding_window is {value!r}; set it to null: every layer here attends to the whole context"
        elif field in READ_OF_EXPERTS and raw["model_type"] in WITH_EXPERTS:
            continue
        elif field not in READ and field not in WITHOUT_EFFECT and not field.startswith("transformers.js"):
            yield f"{field} is {value!r:.80}, which is not known here and may change what the model computes; remove it if it does not"


def _layer_types(raw: Mapping[str, Any], value: Any) -> Iterator[str]:
    """Refuse `layer_types` that differ from the trainer's attention, because vLLM would follow them."""
    has_window = raw["model_type"] == "mistral" and raw.get("sliding_window", 0) is not None
    wanted = "sliding_attention" if has_window else "full_attention"
    others = [one for one in value if one != wanted] if isinstance(value, list) else [] if value is None else [value]
    reason = "every layer here attends to the sliding_window" if has_window else "every layer here attends to the whole context"
    if others or value == []:
        yield f"layer_types holds {others[0] if others else None!r:.80}; only {wanted!r} is supported: {reason}"
    elif value is not None and len(value) != (layers := raw.get("num_hidden_layers")):
        yield f"layer_types has {len(value)} entries; num_hidden_layers is {layers!r:.40}"


def _architecture(family: str, names: Any, heads: Sequence[str]) -> Iterator[str]:
    for name in names if isinstance(names, list) else [] if names is None else [names]:
        known = [architecture(family, head) for head in heads]
        if not isinstance(names, list) or not isinstance(name, str) or name.lower() not in map(str.lower, known):
            yield f"architectures names {name!r:.80}; supported for {family} are {', '.join(known)}, in a list"


def architecture(family: str, head: str) -> str:
    return f"{_CLASSES.get(family, family.capitalize())}{head}"


def rope_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings with rope_type and rope_theta; ValueError if unsupported. transformers 5 writes rope_parameters, earlier versions
    rope_theta and rope_scaling."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for name, given in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} is {given!r}; it must be a dictionary or null")
    if new and old and _filled(new, raw) != _filled(old, raw):
        raise ValueError(
            f"rope_parameters is {new!r} and rope_scaling is {old!r}: transformers and the engines would drop the first; write one "
            f"dictionary, rope_parameters, with rope_theta and the scaling, and remove rope_scaling"
        )
    fields = _filled(new or old, raw)
    nested = [name for name, value in fields.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"rope_parameters has settings of its own for {', '.join(nested)}; only one RoPE for all layers is supported")
    if (outside := raw.get("rope_theta")) is not None and outside != fields["rope_theta"]:
        raise ValueError(f"rope_theta is {outside!r} beside {fields['rope_theta']!r} in rope_parameters; keep one of them")
    if fields.get("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor is not supported: RoPE here turns whole heads")
    kind = fields["rope_type"]
    if not _is_number(fields["rope_theta"]) or not 0 < fields["rope_theta"] < 1e30:
        raise ValueError(f"rope_theta is {fields['rope_theta']!r:.40}; it must be a positive number")
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        message = f"RoPE scaling {kind!r} is not supported; supported are {', '.join(_ROPE_FIELDS)}"
        trained_on = fields.get("original_max_position_embeddings", "original")
        short = f"; where prompt and response stay within the {trained_on} positions that the model was trained on, remove it"
        raise ValueError(message + (short if kind == "yarn" else ""))
    unknown = [name for name in fields if name not in _ROPE_FIELDS[kind] | {"rope_type", "rope_theta", "partial_rotary_factor"}]
    if unknown:
        listed = ", ".join(f"{name} {fields[name]!r}" for name in unknown)
        raise ValueError(f"RoPE scaling {kind} with {listed}, which is not known here and may change the positions; remove it if not")
    for field in sorted(LLAMA3_FIELDS - {"factor"}) if kind == "llama3" else ():
        if not _is_number(value := fields.get(field)) or not 0 < value < 1e30:
            raise ValueError(f"RoPE scaling llama3 with {field} {value!r:.40}; it must be a positive number")
    if kind == "llama3" and fields["low_freq_factor"] >= fields["high_freq_factor"]:
        low, high = fields["low_freq_factor"], fields["high_freq_factor"]
        raise ValueError(f"RoPE scaling llama3 with low_freq_factor {low!r}, which is not below high_freq_factor {high!r}")
    factor = fields.get("factor")
    if kind != "default" and not (_is_number(factor) and 1 <= factor < 1e30):
        raise ValueError(f"RoPE scaling {kind} needs a factor of at least 1, got {factor!r}")
    return fields


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _filled(fields: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    filled = {name: value for name, value in fields.items() if value is not None and name != "type"}
    return {
        **filled,
        "rope_type": filled.get("rope_type", fields.get("type") or "default"),
        "rope_theta": filled.get("rope_theta", 10000.0 if raw.get("rope_theta") is None else raw["rope_theta"]),
    }
