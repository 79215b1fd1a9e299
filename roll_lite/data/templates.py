"""How a row of a domain's data becomes the text and the tokens that the model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_lite.config.problems import or_nearest
from roll_lite.config.schema.domains import TemplateConfig
from roll_lite.config.text_templates import placeholders

Tokenizer = Any
"""A Hugging Face tokenizer; transformers, slow to import, is loaded only where one is made."""


class RowError(ValueError):
    """What is wrong with one row, and in which of its columns."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"column {column!r}: {problem}")


def load_tokenizer(path: Path | str, setting: str = "model.path") -> Tokenizer:
    from transformers import AutoTokenizer

    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{setting}: {folder} is no folder; it must hold a model in Hugging Face format with its tokenizer")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{setting}: no tokenizer could be loaded from {folder}: {error}") from error


class Template:
    """The template of one domain. `setting` is its place in the configuration, for messages."""

    def __init__(self, config: TemplateConfig, prompt_column: str, tokenizer: Tokenizer, setting: str) -> None:
        self._config = config
        self._prompt_column = prompt_column
        self._tokenizer = tokenizer
        self._setting = setting
        self._placeholders: list[str] = []
        if config.type == "chat":
            if config.text != TemplateConfig.model_fields["text"].default:
                raise ValueError(f"{setting}.text: {config.text!r} has no effect with type: chat; leave it out, or use type: plain")
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError(f"{setting}.type: chat, but the tokenizer has no chat template; use type: plain")
        else:
            if config.system is not None:
                raise ValueError(
                    f"{setting}.system: {config.system!r} has no effect with type: plain; write it into text, or use type: chat"
                )
            self._placeholders = _placeholders(config.text, f"{setting}.text")

    def render(self, row: Mapping[str, Any]) -> str:
        """The text of a row; RowError where a column does not fit."""
        if self._prompt_column not in row:
            raise RowError(self._prompt_column, f"missing; {_has(row, self._prompt_column)}")
        if self._config.type == "chat":
            messages = _messages(self._prompt_column, row[self._prompt_column], self._config.system)
            try:
                return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # whatever the model's own template objects to
                raise RowError(self._prompt_column, f"the tokenizer's chat template refuses the messages: {error}") from error
        return self._config.text.format_map({name: self._filling(name, row) for name in self._placeholders})

    def _filling(self, placeholder: str, row: Mapping[str, Any]) -> str:
        column = self._prompt_column if placeholder == "prompt" else placeholder
        if column not in row:
            raise RowError(column, f"missing, but {self._setting}.text has the placeholder {{{placeholder}}}; {_has(row, column)}")
        value = row[column]
        if isinstance(value, list) and placeholder == "prompt":
            raise RowError(column, f"a list of chat messages needs {self._setting}.type: chat")
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise RowError(column, f"only a string or a number can be filled into a text, got {value!r:.80}")
        return str(value)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Plain text gets the special tokens that the tokenizer adds by itself, as in pre-training (a BOS for Llama, none for Qwen);
        a chat template has written them into the text already."""
        if not texts:
            return []
        add = self._config.type == "plain"
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=add, return_attention_mask=False, verbose=False)["input_ids"]
        self._check_special_tokens(texts[0], ids[0])
        return ids

    def _check_special_tokens(self, text: str, ids: list[int]) -> None:
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ValueError(
                f"{self._setting}.text: prompts begin with the tokenizer's BOS twice, because it adds one by itself; "
                f"leave {self._tokenizer.bos_token!r} out of the text"
            )
        if eos is not None and ids[-1:] == [eos] and not text.rstrip().endswith(self._tokenizer.eos_token):
            raise ValueError(
                f"{self._setting}: the tokenizer ends every text with its EOS {self._tokenizer.eos_token!r}, so no prompt can be continued"
            )


def _placeholders(text: str, setting: str) -> list[str]:
    try:
        names = placeholders(text)
    except ValueError as error:
        raise ValueError(f"{setting}: {text!r}: {error}") from error
    if not names:
        raise ValueError(f"{setting}: {text!r} has no placeholder, so that all prompts would be the same; {{prompt}} stands for the prompt")
    return names


def _messages(column: str, prompt: Any, system: str | None) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt:
        messages = prompt
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
                raise RowError(column, f"message {number} must be {{role: ..., content: ...}} with strings, got {message!r:.80}")
    else:
        raise RowError(column, f"must be a string or a list of chat messages, got {prompt!r:.80}")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise RowError(column, "begins with a system message, but template.system sets one too; keep one of them")
    return [{"role": "system", "content": system}, *messages]


def _has(row: Mapping[str, Any], wanted: str) -> str:
    return f"the line has the columns {', '.join(row) or '(none)'}{or_nearest(wanted, row)}"
