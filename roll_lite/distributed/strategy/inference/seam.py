"""The seam of a response that was interrupted: what an engine has to know of the tokens before it to find a stop text that lies across."""

from __future__ import annotations

from roll_lite.data.samples import GenerationRequest

SEAM = "roll_lite_seam"
"""The name under which a request takes `seam_tokens` through an engine."""
TOKENS_PER_CHARACTER = 4
WITHOUT_TEXT = 32
"""Of special tokens, and of such as show their text only with the next one."""


def seam_tokens(request: GenerationRequest) -> int:
    """So many of the prompt's last tokens, which are part of the response, may hold the beginning of a stop text."""
    longest = max(map(len, request.sampling.stop), default=0)
    return min(request.resumed, longest * TOKENS_PER_CHARACTER + WITHOUT_TEXT) if longest else 0
