"""A Hugging Face config.json, read and checked: the shape of the model, independent of Megatron."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_lite.config.model_shape import SUPPORTED_TYPES


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    linear_factor: float | None = None
    """Positions are divided by this."""
    llama3_factor: float | None = None
    """Llama 3.1's frequency-dependent scaling."""


@dataclass(frozen=True)
class HfConfig:
    """What the layers look like."""

    family: str
    vocab_size: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeConfig


def read_hf_config(folder: Path, key: str = "model.path") -> HfConfig:
    """ValueError, naming the file and the field, for what cannot be trained here. `key`: where the YAML names the folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{key}: {folder} holds no config.json; it must be a model in Hugging Face format")
    raw: dict[str, Any] = json.loads(file.read_text())
    family = raw.get("model_type")
    if family not in SUPPORTED_TYPES:
        raise ValueError(f"{key}: {file}: model_type {family!r} cannot be trained; supported are {', '.join(SUPPORTED_TYPES)}")
    _refuse_unsupported(key, file, raw)
    heads = raw["num_attention_heads"]
    return HfConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden=raw["hidden_size"],
        feed_forward=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or (128 if family == "qwen3" else raw["hidden_size"] // heads),
        max_positions=raw.get("max_position_embeddings", 32768),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope=_read_rope(key, file, raw),
    )


def _refuse_unsupported(key: str, file: Path, raw: dict[str, Any]) -> None:
    wanted = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0}
    if raw["model_type"] == "qwen2":
        del wanted["attention_bias"]  # not one of its settings; its biases are those of query, key and value
    for field, value in wanted.items():
        if raw.get(field, value) != value:
            raise ValueError(f"{key}: {file}: {field} is {raw[field]!r}; only {value!r} is supported for {raw['model_type']}")


def _read_rope(key: str, file: Path, raw: dict[str, Any]) -> RopeConfig:
    """transformers 5 writes rope_parameters; before, rope_theta stood beside rope_scaling."""
    fields = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(fields.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if fields.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{key}: {file}: partial_rotary_factor is not supported")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=float(fields["factor"]))
    if kind == "llama3":
        # The values that Megatron-Core has built in; every Llama 3.1 to 3.3 has them.
        built_in = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for field, value in built_in.items():
            if fields.get(field) != value:
                raise ValueError(f"{key}: {file}: RoPE scaling llama3 with {field} {fields.get(field)!r}; only {value!r} is supported")
        return RopeConfig(theta, llama3_factor=float(fields["factor"]))
    raise ValueError(f"{key}: {file}: RoPE scaling {kind!r} is not supported; supported are default, linear and llama3")
