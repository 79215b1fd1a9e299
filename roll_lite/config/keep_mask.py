"""When an engine can say which tokens survived truncated sampling: it reports the log-probs of so many of the likeliest tokens that the
survivors are all among them (those of the others are minus infinity)."""

from __future__ import annotations

from typing import Protocol

KEEP_LIMIT = 1024
"""Log-probs that an engine reports of one token at most."""
TIE_ROOM = 8
"""Engines keep every token that is as likely as the k-th, so that more than top_k survive; with bfloat16 logits that is common. So many
more are looked at. Should even more tie, the rest of them is missing from the mask (their probability is that of the k-th each)."""


class Truncation(Protocol):
    """What SamplingConfig and Sampling have in common."""

    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...


def is_truncated(sampling: Truncation) -> bool:
    """Whether a token is sampled from less than the whole vocabulary. min_tokens forbids the end of sequence for a while."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.min_tokens > 0


def keep_mask_width(sampling: Truncation, vocab_size: int) -> int:
    """How many of the likeliest tokens hold all survivors; 0 where all tokens survive."""
    if not is_truncated(sampling):
        return 0
    return min(sampling.top_k + TIE_ROOM, vocab_size) if sampling.top_k else vocab_size


def keep_mask_available(sampling: Truncation, vocab_size: int) -> str | None:
    """Why an engine cannot supply the keep mask of this sampling; None where it can."""
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
