"""Small tokenizers of our own with the added tokens and the chat templates of four families."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the weather in Paris is 21 degrees.",
    "You may call one or more functions to assist with the user query. Question: what is 3 + 4?",
    '{"name": "weather", "arguments": {"city": "Paris"}}\n{"type": "function", "function": {"description": "the", "parameters": {}}}',
    "assistant\n\nuser\n\nsystem\n\nThe answer is 42.\n\n\nThink first.\n",
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization of Llama 3; Qwen's differs in numbers only."""

_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_MISTRAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
)
SPECIAL = {
    "qwen2.5": _QWEN_SPECIAL,
    "qwen3": _QWEN_SPECIAL,
    "llama3.1": (*_LLAMA, *(f"<|reserved_special_token_{number}|>" for number in range(50))),
    "mistral-nemo": _MISTRAL,
}
PLAIN = {"qwen2.5": _QWEN_PLAIN, "qwen3": (*_QWEN_PLAIN, "<tool_response>", "</tool_response>", "<think>", "</think>")}
"""Added tokens that are not special: decoding keeps them."""
BOS_EOS = {
    "qwen2.5": (None, "<|im_end|>"),
    "qwen3": (None, "<|im_end|>"),
    "llama3.1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral-nemo": ("<s>", "</s>"),
}
"""EOS is the template's end-of-turn token."""


@cache
def _tokenizer(family: str) -> Any:
    """Byte-level BPE tokenizer with the family's added tokens and chat template."""
    inner = Tokenizer(models.BPE())
    if family.startswith("qwen"):
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1, max_token_length=8
    )
    inner.train_from_iterator(SENTENCES, trainer)
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL[family]])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN.get(family, ())])
    bos, eos = BOS_EOS[family]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    return _tokenizer
