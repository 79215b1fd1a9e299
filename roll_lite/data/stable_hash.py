"""Hash that is equal in all processes and runs; Python's own is salted."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """63 bits from the parts' texts: a valid seed for every engine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def derived_seed(run_seed: int, purpose: str, *parts: object) -> int:
    """Seed for one use of random numbers. With sums such as `seed + step`, step 2 of run 1 would get the numbers of step 1 of run 2.

    31 bits: valid for numpy, torch, engines, and Megatron-Core, which adds a rank.
    """
    return stable_hash(run_seed, purpose, *parts) >> 32
