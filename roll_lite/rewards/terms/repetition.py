"""Reward `repetition`: a term for repeated n-grams."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.reward_type import RewardType


class RepetitionReward(RewardType):
    """A term for repetition: the share of n-grams that occurred before, from 0 to almost 1; its weight should be negative. Case does not
    matter. A response with fewer than `n` words (or characters) repeats nothing.

    ```yaml
    reward:
      name: math
      terms:
        - {name: repetition, args: {n: 4, free: 0.1}, weight: -0.5}
    ```
    """

    n: Annotated[int, Field(ge=1)] = 4
    """Length of the n-grams."""
    unit: Literal["words", "characters"] = "words"
    """Unit of the n-grams."""
    free: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of repetition that costs nothing; from there the value rises linearly to 1."""

    def __call__(self, sample: RewardInput) -> Score:
        text = sample.response.casefold()
        parts = text.split() if self.unit == "words" else list(text)
        count = len(parts) - self.n + 1
        if count <= 0:
            return Score(0.0, None, {"repeated": 0.0})
        different = len({tuple(parts[start : start + self.n]) for start in range(count)})
        share = 1 - different / count
        return Score(max(0.0, share - self.free) / (1 - self.free), None, {"repeated": share})

    def no_response(self) -> str:
        return "nothing"
