"""Files of weights without the weights: what a configuration is checked against are names and shapes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def tensors(shape: Mapping[str, int]) -> dict[str, list[int]]:
    """Names and shapes of a qwen2's weights, as published ones have them."""
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    found = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden], "lm_head.weight": [vocabulary, hidden]}
    for layer in range(shape["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        found |= {f"{place}.{norm}.weight": [hidden] for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{place}.mlp.{part}.weight": [inner, hidden] for part in ("gate_proj", "up_proj")}
        found |= {f"{place}.mlp.down_proj.weight": [hidden, inner], f"{place}.self_attn.o_proj.weight": [hidden, hidden]}
        for part, rows in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
            found[f"{place}.self_attn.{part}.weight"] = [rows, hidden]
            found[f"{place}.self_attn.{part}.bias"] = [rows]
    return found


def write_safetensors(file: Path, shapes: Mapping[str, list[int]], types: Mapping[str, str] = MappingProxyType({})) -> None:
    """A header, and a hole for the numbers, which are BF16 but for `types`."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": types.get(name, "BF16"), "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
