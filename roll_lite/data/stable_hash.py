"""A hash that is the same in every process and every run, unlike Python's own, which is salted."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """63 bits from the text of the parts. What fits into a signed 64-bit integer every engine takes as a seed."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
