"""A further term of the reward."""

from __future__ import annotations

from roll_lite.data.samples import RewardInput


def brief(sample: RewardInput, most: int = 400) -> float:
    """1 for a response of at most `most` characters, less for a longer one."""
    return min(1.0, most / max(len(sample.response), 1))
