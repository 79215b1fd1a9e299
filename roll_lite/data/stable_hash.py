"""Hash that is equal in all processes and runs; Python's own is salted."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """Hash of the parts' texts, 63 bits: a valid seed for every engine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def derived_seed(run_seed: int, purpose: str, *parts: object) -> int:
    """Derive a seed for one use of random numbers. Sums such as `seed + step` would give step 2 of run 1 the numbers of step 1 of run 2.

    31 bits: valid for numpy, torch, engines, and Megatron-Core, which adds a rank."""
    return stable_hash(run_seed, purpose, *parts) >> 32
