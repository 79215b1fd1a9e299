"""A hash that is the same in every process and every run, unlike Python's own, which is salted."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """63 bits from the text of the parts. What fits into a signed 64-bit integer every engine takes as a seed."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def derived_seed(run_seed: int, purpose: str, *parts: object) -> int:
    """A seed for one use of random numbers in a run. Sums such as `seed + step` would give step 2 of run 1 the numbers of step 1 of run 2.

    31 bits: numpy's and torch's generators, Megatron-Core, which adds a rank's number, and the engines all take them.
    """
    return stable_hash(run_seed, purpose, *parts) >> 32
