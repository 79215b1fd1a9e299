"""A word-level tokenizer, made on the spot: ids are known by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

WORDS = ["<unk>", "<s>", "</s>", "add", "one", "two", "three", "please", "user", "system", "assistant", ":", "and"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """make_tokenizer(around="<s> $A", chat=True): `around` is what the tokenizer adds to every text by itself."""

    def make(around: str = "$A", chat: bool = False) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        inner.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 1), ("</s>", 2)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        if chat:
            tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer

    return make
