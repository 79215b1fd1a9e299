"""What a model's config.json says about its shape; read without torch or transformers, so that checking a configuration stays fast."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SUPPORTED_TYPES = ("qwen2", "qwen3", "llama")
"""`model_type`s whose weights the Megatron strategy can read and write."""


@dataclass(frozen=True)
class ModelShape:
    model_type: str
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocab_size: int
    max_positions: int | None


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
        )
    except KeyError as error:
        raise ValueError(f"{file} has no {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


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
