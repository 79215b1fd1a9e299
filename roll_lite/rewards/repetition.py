"""Reward `repetition`: a term for how much of the response says again what it said before."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll_lite.data.samples import RewardInput, Score

Unit = Literal["words", "characters"]


def repetition(
    sample: RewardInput, *, n: Annotated[int, Field(ge=1)] = 4, unit: Unit = "words", free: Annotated[float, Field(ge=0, lt=1)] = 0.0
) -> Score:
    """The share of n-grams that are repetitions of an earlier one, from 0 to almost 1: give the term a negative weight.

    free: a share that costs nothing; what is above it counts in full proportion up to 1. Case does not matter. A response with fewer
    than n words (or characters) repeats nothing.
    """
    if n < 1 or not 0 <= free < 1:
        raise ValueError(f"n must be at least 1 and free in [0, 1), got {n} and {free}")
    text = sample.response.casefold()
    parts = text.split() if unit == "words" else list(text)
    count = len(parts) - n + 1
    if count <= 0:
        return Score(0.0, None, {"repeated": 0.0})
    different = len({tuple(parts[start : start + n]) for start in range(count)})
    share = 1 - different / count
    return Score(max(0.0, share - free) / (1 - free), None, {"repeated": share})
