"""Keep masks: the tokens that truncated sampling (top-k, top-p, min-p) could draw. The log-prob of other tokens is minus infinity."""

from __future__ import annotations

from typing import Protocol

KEEP_LIMIT = 1024
"""Maximum log-probs that an engine reports per token."""
TIE_ROOM = 8
"""Tokens requested beyond top_k: engines keep all tokens that tie with the k-th, and ties are common in bfloat16."""


class Truncation(Protocol):
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...


def is_truncated(sampling: Truncation) -> bool:
    """True if some tokens cannot be sampled; min_tokens forbids an early end of sequence."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.min_tokens > 0


def keep_mask_width(sampling: Truncation, vocab_size: int) -> int:
    """Number of likeliest tokens whose log-probs an engine must report to include the whole keep mask; 0 without truncation."""
    if not is_truncated(sampling):
        return 0
    return min(sampling.top_k + TIE_ROOM, vocab_size) if sampling.top_k else vocab_size


def keep_mask_available(sampling: Truncation, vocab_size: int) -> str | None:
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
