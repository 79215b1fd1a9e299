"""Keep masks: the tokens that truncated sampling (top-k, top-p, min-p) could draw.

Engines report log-probs of the likeliest tokens, enough to include all tokens of the mask. Minus infinity marks tokens that could not be
drawn."""

from __future__ import annotations

from typing import Protocol

KEEP_LIMIT = 1024
"""Maximum log-probs that an engine reports per sampled token."""
TIE_ROOM = 8
"""Tokens reported beyond top_k. Engines keep all tokens tied with the k-th, and ties are common in bfloat16; the mask lacks ties beyond
this number."""


class Truncation(Protocol):
    """Protocol for sampling settings that can exclude tokens (top-k, top-p, min-p). SamplingConfig and Sampling satisfy it."""

    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...


def is_truncated(sampling: Truncation) -> bool:
    """True if some tokens of the vocabulary cannot be sampled. min_tokens counts: it forbids the end of sequence in shorter responses."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.min_tokens > 0


def keep_mask_width(sampling: Truncation, vocab_size: int) -> int:
    """Number of likeliest tokens to report, to include all that can be sampled; 0 without truncation."""
    if not is_truncated(sampling):
        return 0
    return min(sampling.top_k + TIE_ROOM, vocab_size) if sampling.top_k else vocab_size


def keep_mask_available(sampling: Truncation, vocab_size: int) -> str | None:
    """Why an engine cannot give the keep mask; None if it can."""
    width = keep_mask_width(sampling, vocab_size)
    if width <= KEEP_LIMIT:
        return None
    most = KEEP_LIMIT - TIE_ROOM
    if sampling.top_k:
        return f"top_k {sampling.top_k} is too large for a keep mask, which holds {most} tokens at most"
    wanted = "top_p" if sampling.top_p < 1 else "min_p" if sampling.min_p > 0 else "min_tokens"
    return (
        f"{wanted} without top_k may keep any number of the {vocab_size} tokens, and a keep mask holds {most} at most; "
        f"set top_k (1 to {most}) as well"
    )
