"""Floating-point operations of a model's forward pass, against torch's own count over Hugging Face's model, and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from roll_lite.models.hf_config import HfConfig, read_hf_config

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3, wide heads": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False},
    "llama without groups": {"model_type": "llama", "num_key_value_heads": 4},
    "experts": {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 8, **EXPERTS},
    "experts in one layer": {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 8, **EXPERTS, "mlp_only_layers": [0, 2]},
}


def read(folder: Path, **fields: Any) -> HfConfig:
    (folder / "config.json").write_text(json.dumps(SIZES | fields))
    return read_hf_config(folder)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[9], [1, 5, 12]])
def test_torch_counts_the_same(name: str, lengths: list[int], tmp_path: Path) -> None:
    """Eager attention multiplies each token with the later ones, too, and masks them: of T * T pairs T * (T - 1) / 2 are not needed."""
    ours = read(tmp_path, **MODELS[name])
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    masked = 4 * ours.layers * ours.heads * ours.head_dim * sum(length * (length - 1) // 2 for length in lengths)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        for length in lengths:
            model(torch.arange(length)[None], use_cache=False)
    assert ours.flops(lengths, sum(lengths)) == pytest.approx(counted.get_total_flops() - masked, rel=1e-12)
    for passes in (2, 3):  # gradients of inputs alone, as under LoRA, or of weights, too
        model.requires_grad_(passes == 3)
        with FlopCounterMode(display=False) as counted:
            for length in lengths:
                given = model.get_input_embeddings()(torch.arange(length)[None]).detach().requires_grad_()
                model(inputs_embeds=given, use_cache=False).logits.sum().backward()
        assert ours.flops(lengths, sum(lengths), passes) == pytest.approx(counted.get_total_flops() - 3 * masked, rel=1e-12)


def test_numbers_by_hand(tmp_path: Path) -> None:
    """One layer with 2 heads of 4 and 1 for keys and values, hidden 8, feed-forward 10: q and o have 8 x 8 weights, k and v 8 x 4, the
    feed-forward part 3 x 8 x 10, together 432. Three tokens see 1, 2 and 3 tokens, in both products 2 x 4 multiplications each."""
    fields = {"model_type": "llama", "vocab_size": 7, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 1}
    model = read(tmp_path, **fields, num_attention_heads=2, num_key_value_heads=1)
    matrices, attention = 3 * 432, 6 * 2 * 8
    assert model.flops([3], 0) == 2 * (matrices + attention)
    assert model.flops([3], 2) == 2 * (matrices + attention + 2 * 8 * 7), "two of the tokens reach the output layer"
    assert model.flops([3, 3], 0) == 2 * model.flops([3], 0) and model.flops([], 0) == 0


def test_a_window_limits_attention(tmp_path: Path) -> None:
    """Tokens see 1, 2, 3, 3 and 3 tokens."""
    wide, narrow = (read(tmp_path, model_type="mistral", num_key_value_heads=2, sliding_window=size) for size in (5, 3))
    of_pair = 4 * wide.layers * wide.heads * wide.head_dim
    assert wide.flops([5], 5) - narrow.flops([5], 5) == (15 - 12) * of_pair


def test_a_seven_billion_model_takes_twice_its_weights_per_token(tmp_path: Path) -> None:
    """Qwen2.5-7B has 6.53 billion weights beside embeddings and output layer (its model card)."""
    fields = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    model = read(tmp_path, model_type="qwen2", num_key_value_heads=4, **fields)
    assert model.flops([1], 0) == pytest.approx(2 * 6.53e9, rel=0.002)
