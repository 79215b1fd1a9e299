"""A Hugging Face config.json, read and checked: the shape of the model, without torch, transformers or Megatron."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_lite.config.hf_fields import refusals, rope_fields

SUPPORTED_TYPES = ("qwen2", "qwen3", "llama")
"""`model_type`s whose weights the Megatron strategy can read and write."""


@dataclass(frozen=True)
class ModelShape:
    """What checks need to know of any model, also of one that cannot be trained."""

    model_type: str
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocab_size: int
    max_positions: int | None
    tied_embeddings: bool


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


def read_model_shape(folder: Path) -> ModelShape:
    """Raises ValueError, saying what is wrong with which file."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}{elsewhere(folder)}")
    if not file.is_file():
        raise ValueError(f"no config.json in {folder}; expected a model in Hugging Face format")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return ModelShape(
            model_type=str(raw["model_type"]),
            layers=int(raw["num_hidden_layers"]),
            heads=int(raw["num_attention_heads"]),
            kv_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
            feed_forward=int(raw["intermediate_size"]),
            vocab_size=int(raw["vocab_size"]),
            max_positions=int(raw["max_position_embeddings"]) if "max_position_embeddings" in raw else None,
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ValueError(f"{file} has no {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def read_hf_config(folder: Path, key: str = "model.path") -> HfConfig:
    """ValueError, naming the file and every field, for what cannot be trained here. `key`: where the YAML names the folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{key}: {folder} holds no config.json; it must be a model in Hugging Face format")
    raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    family = raw.get("model_type")
    if family not in SUPPORTED_TYPES:
        raise ValueError(f"{key}: {file}: model_type {family!r} cannot be trained; supported are {', '.join(SUPPORTED_TYPES)}")
    refused = list(refusals(raw))
    try:
        rope = rope_fields(raw)
    except ValueError as error:
        refused.append(str(error))
    if refused:
        raise ValueError(f"{key}: {file}: {'; '.join(refused)}")
    try:
        return _of_fields(raw, rope)
    except KeyError as error:
        raise ValueError(f"{key}: {file} has no {error.args[0]!r}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {file}: {error}") from error


def _of_fields(raw: dict[str, Any], rope: dict[str, Any]) -> HfConfig:
    """What is missing is what transformers takes for it."""
    family, heads, norm_eps = raw["model_type"], raw["num_attention_heads"], raw.get("rms_norm_eps", 1e-6)
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, int | float) or not 0 < norm_eps < 1:
        raise ValueError(f"rms_norm_eps is {norm_eps!r}; it must be a small positive number")
    return HfConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden=raw["hidden_size"],
        feed_forward=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        key_value_heads=raw.get("num_key_value_heads", heads if family == "llama" else 32) or heads,
        head_dim=raw.get("head_dim") or (128 if family == "qwen3" else raw["hidden_size"] // heads),
        max_positions=raw.get("max_position_embeddings", 2048 if family == "llama" else 32768),
        norm_eps=float(norm_eps),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope=RopeConfig(
            float(rope["rope_theta"]),
            linear_factor=float(rope["factor"]) if rope["rope_type"] == "linear" else None,
            llama3_factor=float(rope["factor"]) if rope["rope_type"] == "llama3" else None,
        ),
    )


def elsewhere(path: Path) -> str:
    """A hint for a path that is right in another folder: relative paths count from the current one."""
    current = Path.cwd()
    if not path.is_relative_to(current):
        return ""
    relative = path.relative_to(current)
    for parent in current.parents:
        if (parent / relative).exists():
            return f" (relative paths count from the current folder; there is {parent / relative}: start from {parent})"
    return " (relative paths count from the current folder)"
