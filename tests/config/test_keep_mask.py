"""Which samplings an engine can supply a keep mask for."""

from __future__ import annotations

import pytest

from roll_lite.config.keep_mask import KEEP_LIMIT, TIE_ROOM, keep_mask_available, keep_mask_width
from roll_lite.config.schema.domains import SamplingConfig

LARGE = 151_936


@pytest.mark.parametrize(
    ("sampling", "vocab_size", "width"),
    [
        ({}, LARGE, 0),
        ({"top_k": 20}, LARGE, 20 + TIE_ROOM),
        ({"top_k": 20, "top_p": 0.9, "min_p": 0.1, "min_tokens": 3}, LARGE, 20 + TIE_ROOM),
        ({"top_k": 20}, 22, 22),
        ({"top_k": 5000}, 258, 258),
        ({"top_p": 0.9}, 258, 258),
        ({"min_p": 0.1}, KEEP_LIMIT, KEEP_LIMIT),
        ({"min_tokens": 1}, 258, 258),
        ({"top_k": KEEP_LIMIT - TIE_ROOM}, LARGE, KEEP_LIMIT),
    ],
)
def test_available(sampling: dict[str, float], vocab_size: int, width: int) -> None:
    config = SamplingConfig(**sampling)  # type: ignore[arg-type]
    assert keep_mask_available(config, vocab_size) is None
    assert keep_mask_width(config, vocab_size) == width


@pytest.mark.parametrize(
    ("sampling", "vocab_size", "reason"),
    [
        ({"top_p": 0.9, "min_p": 0.1}, LARGE, r"top_p without top_k may keep any number of the 151936 tokens.*set top_k \(1 to 1016\)"),
        ({"min_p": 0.1}, KEEP_LIMIT + 1, "min_p without top_k"),
        ({"min_tokens": 1}, LARGE, "min_tokens without top_k"),
        ({"top_k": KEEP_LIMIT}, LARGE, "top_k 1024 is too large for a keep mask, which holds 1016"),
    ],
)
def test_not_available(sampling: dict[str, float], vocab_size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        raise ValueError(keep_mask_available(SamplingConfig(**sampling), vocab_size))  # type: ignore[arg-type]
