"""Hash that is equal in all processes and runs, unlike Python's salted one."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """Hash the texts of the parts to 63 bits, a valid seed for every engine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def derived_seed(run_seed: int, purpose: str, *parts: object) -> int:
    """Derive a seed for one use of random numbers. Sums such as `seed + step` would repeat numbers between runs. The seed has 31 bits:
    valid for numpy, torch, engines, and Megatron-Core, which adds a rank to it."""
    return stable_hash(run_seed, purpose, *parts) >> 32
