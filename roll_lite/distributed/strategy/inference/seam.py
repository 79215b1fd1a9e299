"""Stop-string overlap at a resume point: tokens before an interruption that may hold the beginning of a stop string."""

from __future__ import annotations

from roll_lite.data.samples import GenerationRequest

SEAM = "roll_lite_seam"
"""Key under which a request carries `seam_tokens` through an engine."""
TOKENS_PER_CHARACTER = 4
WITHOUT_TEXT = 32
"""Allowance for special tokens and for tokens whose text appears only with the next one."""


def seam_tokens(request: GenerationRequest) -> int:
    """Number of the prompt's last tokens, part of the response, that may hold the beginning of a stop string."""
    longest = max(map(len, request.sampling.stop), default=0)
    return min(request.resumed, longest * TOKENS_PER_CHARACTER + WITHOUT_TEXT) if longest else 0
