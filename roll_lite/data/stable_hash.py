"""Hash that is equal in all processes, unlike Python's salted hash."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """Return a 63-bit hash, a valid seed for every engine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def derived_seed(run_seed: int, purpose: str, *parts: object) -> int:
    """Seed for one use of random numbers. Sums like `seed + step` would collide between runs. 31 bits, as Megatron-Core adds the rank."""
    return stable_hash(run_seed, purpose, *parts) >> 32
