"""The reward of the domain `sums`."""

from __future__ import annotations

from roll_lite.data.samples import RewardInput, Score


def score(sample: RewardInput, partial_credit: float = 0.0) -> Score:
    """Full marks for the right sum, and partial credit for a number with the right last digit."""
    response = sample.response.strip()
    if response == sample.answer:
        return Score(1.0, correct=True)
    is_near = response.isdecimal() and response[-1] == sample.answer[-1]
    return Score(partial_credit if is_near else 0.0, correct=False)
