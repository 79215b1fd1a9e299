"""Stop strings in the text of a response that grows token by token, found where vLLM finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 8
"""Tokens of the prompt that are decoded together with the first ones of the response."""
_INCOMPLETE = "\ufffd"
"""What a part of a character is decoded to."""


class StopText:
    """Special tokens have no text here. A character of several tokens comes with the last of them."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stops: Sequence[str], seam: int = 0) -> None:
        """`seam`: so many tokens at the end of the prompt belong to the response."""
        begin = len(prompt_ids) - seam
        self._tokenizer = tokenizer
        self._stops = stops
        self._pending = list(prompt_ids[max(0, begin - _CONTEXT) : begin])
        """Tokens that the next one is decoded together with: alone it may read otherwise."""
        self._shown = len(self._pending)
        """So many of them have their text in `_text`, or belong to the prompt."""
        self._before = self._decoded().rstrip(_INCOMPLETE)
        self._text = ""
        self._longest = max(map(len, stops))
        self.tokens = -seam
        """Of the response so far, as far as the engine has generated it."""
        for token in prompt_ids[begin:]:
            self.next(token)

    def next(self, token: int) -> str | None:
        """The stop string that the token's text completes."""
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
