"""Stop strings in the text of a growing response, found where vLLM finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 8
"""Prompt tokens to decode together with the response's first ones."""
_INCOMPLETE = "\ufffd"
"""Text that an incomplete character is decoded to."""


class StopText:
    """Text of a response, token by token. Special tokens have none; a character of several tokens appears with the last one."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stops: Sequence[str], seam: int = 0) -> None:
        """`seam`: number of tokens at the prompt's end that belong to the response."""
        begin = len(prompt_ids) - seam
        self._tokenizer = tokenizer
        self._stops = stops
        self._pending = list(prompt_ids[max(0, begin - _CONTEXT) : begin])
        """Tokens to decode together with the next one, whose text may depend on them."""
        self._shown = len(self._pending)
        """Number of `_pending` tokens whose text is already in `_text` or the prompt's."""
        self._before = self._decoded().rstrip(_INCOMPLETE)
        self._text = ""
        self._longest = max(map(len, stops))
        self.tokens = -seam
        """Number of tokens generated so far; negative while the seam is read."""
        for token in prompt_ids[begin:]:
            self.next(token)

    def next(self, token: int) -> str | None:
        """Stop string that the token's text completes, or None."""
        self.tokens += 1
        new = self._new_text(token)
        if not new:
            return None
        self._text = self._text[max(0, len(self._text) - self._longest + 1) :]
        old, self._text = len(self._text), self._text + new
        return next((stop for stop in self._stops if self._text.find(stop, max(0, old - len(stop) + 1)) >= 0), None)

    def _new_text(self, token: int) -> str:
        self._pending.append(token)
        decoded = self._decoded()
        if len(decoded) <= len(self._before) or decoded.endswith(_INCOMPLETE):
            return ""
        new = decoded[len(self._before) :]
        self._pending = self._pending[self._shown :]
        self._shown = len(self._pending)
        self._before = self._decoded()
        return new

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._pending, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
