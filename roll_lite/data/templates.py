from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_lite.config.schema.domains import PlainTemplateConfig, TemplateConfig
from roll_lite.config.text_templates import placeholders
from roll_lite.data.row_values import RowError, messages_of, text_of
from roll_lite.files import first_line, read_text

Tokenizer = Any
"""Untyped, since importing transformers is slow."""


def load_tokenizer(path: Path | str, setting: str = "model.path") -> Tokenizer:
    from transformers import AutoTokenizer

    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{setting}: {folder} is no folder; it must hold a model in Hugging Face format with its tokenizer")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # broken files may raise anything
        raise ValueError(f"{setting}: no tokenizer could be loaded from {folder}: {first_line(error)}") from error


class Template:
    def __init__(self, config: TemplateConfig, prompt_column: str, tokenizer: Tokenizer, setting: str) -> None:
        self._config = config
        self._prompt_column = prompt_column
        self._tokenizer = tokenizer
        self._setting = setting
        self._chat_template: str | None = None
        self._placeholders: list[str] = []
        if isinstance(config, PlainTemplateConfig):
            place = f"{setting}.text: {config.text!r}"
            try:
                self._placeholders = placeholders(config.text)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            if not self._placeholders:
                raise ValueError(f"{place} has no placeholder, so that all prompts would be the same; {{prompt}} stands for the prompt")
        elif config.file is not None:
            self._chat_template = read_text(config.file)
        elif not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"{setting}.name: chat, but the tokenizer has no chat template; use name: plain")

    def render(self, row: Mapping[str, Any]) -> str:
        """Render a row's prompt. RowError if a column's value cannot be used."""
        if isinstance(self._config, PlainTemplateConfig):
            columns = {name: self._prompt_column if name == "prompt" else name for name in self._placeholders}
            return self._config.text.format_map({name: text_of(row, column, name, self._setting) for name, column in columns.items()})
        messages = messages_of(row, self._prompt_column, self._config.system)
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._chat_template, tokenize=False, add_generation_prompt=True, **self._config.arguments
            )
        except Exception as error:  # templates may raise anything
            raise RowError(self._prompt_column, f"the chat template refuses the messages: {error}") from error

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize. Plain text gets the tokenizer's special tokens (BOS for Llama, none for Qwen); a chat template already writes them."""
        if not texts:
            return []
        add = isinstance(self._config, PlainTemplateConfig)
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=add, return_attention_mask=False, verbose=False)["input_ids"]
        bos, eos, text, first = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id, texts[0], ids[0]
        if bos is not None and first[:2] == [bos, bos]:
            raise ValueError(
                f"{self._setting}.text: prompts begin with the tokenizer's BOS twice, because it adds one by itself; "
                f"leave {self._tokenizer.bos_token!r} out of the text"
            )
        if eos is not None and first[-1:] == [eos] and not text.rstrip().endswith(self._tokenizer.eos_token):
            raise ValueError(
                f"{self._setting}: the tokenizer ends every text with its EOS {self._tokenizer.eos_token!r}, so no prompt can be continued"
            )
        return ids
