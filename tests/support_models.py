"""Tiny random Hugging Face models with a character-level tokenizer, made on the spot and the same every time."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Family = Literal["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"]
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD_ID, BOS_ID, EOS_ID = range(3)
ALPHABET = string.digits + string.ascii_letters + " \n" + string.punctuation
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(ALPHABET) + (-(len(SPECIAL_TOKENS) + len(ALPHABET)) % 4)
"""Rounded up, so that the vocabulary can be split over two or four ranks. Ids at the end may have no character."""

_FAMILIES: dict[str, tuple[type, type]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
HEAD_DIM = 64 if torch.cuda.is_available() else 32
"""vLLM's CPU attention refuses 8, 16 and 24, and not all of SGLang's for GPUs have 32."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character; `<pad>`, `<bos>`, `<eos>` are 0, 1, 2."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def make_model(
    family: Family = "qwen2",
    tied: bool = True,
    hidden: int = 2 * HEAD_DIM,
    layers: int = 2,
    seed: int = 0,
    sharpness: float = 1.0,
    **overrides: Any,
) -> PreTrainedModel:
    """A random model in float32. Biases and norms are random too, so that forgetting one shows.

    `sharpness` scales the weights: above 1 the distributions have clear favourites and greedy decoding does not hang on rounding.
    """
    config_class, model_class = _FAMILIES[family]
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(2, hidden // HEAD_DIM),
        "num_key_value_heads": max(2, hidden // HEAD_DIM) // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "attn_implementation": "sdpa",
        **(EXPERTS if family == "qwen3_moe" else {}),
        **overrides,
    }
    model = model_class(config_class(**values)).float()
    randomize_(model, seed, sharpness)
    return model


def randomize_(model: PreTrainedModel, seed: int, sharpness: float = 1.0) -> None:
    """Fill a model with new random weights, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise * sharpness * parameter.shape[-1] ** -0.5)


def make_tiny_model(folder: Path, family: Family = "qwen2", tied: bool = True, dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    """Write config, safetensors and tokenizer into `folder` and return it. `shape`: see make_model."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(family, tied, **shape).to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_reward_model(folder: Path, family: Family = "qwen2", seed: int = 0, **overrides: Any) -> Path:
    """A sequence-classification checkpoint with one label, as Hugging Face saves it. Four heads and two key/value heads."""
    make_tiny_model(folder, family, **{"hidden": 128, "tied": family != "llama", "seed": seed, "num_labels": 1, **overrides})
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + 5)) / 8)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder)
    return folder


def hf_scores(folder: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    """What transformers' own forward pass and pooling say of each row of tokens alone: the oracle of reward models."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]


def load_hf(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the oracle. transformers would give the pad token's embedding no gradient."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    model.get_input_embeddings().padding_idx = None
    return model


def by_checkpoint(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of the checkpoint: in memory transformers has all experts of a layer in one tensor."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place, _, part = name.rpartition(".")
        if not place.endswith("mlp.experts"):
            found[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = {"gate_proj": own[: len(own) // 2], "up_proj": own[len(own) // 2 :]} if part == "gate_up_proj" else {part: own}
            found |= {f"{place}.{expert}.{each}.weight": matrix for each, matrix in parts.items()}
    return found
