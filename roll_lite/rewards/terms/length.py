"""Reward `length`: a term for the response's length."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.reward_type import RewardType

Count = Annotated[int, Field(ge=0)]


class LengthReward(RewardType):
    """A term for the response's length: 1 for an ideal length, falling linearly to 0 at a distance of `width`.

    Without `target` and `limit` the value is the share of `width` that the response fills, at most 1: longer is better. Rewards see no
    tokens: length counts characters or words (by white space).

    ```yaml
    reward:
      name: math
      terms:
        - {name: length, args: {limit: 2000, width: 1000}, weight: 0.2}      # 0.2 up to 2,000 characters, nothing from 3,000 on
    ```
    """

    target: Count | None = None
    """Ideal length."""
    limit: Count | None = None
    """Maximum ideal length, instead of a target."""
    tolerance: Count = 0
    """Distance from the target that still counts as ideal."""
    width: Annotated[int, Field(ge=1)] = 100
    """Distance from the ideal length at which the value is 0."""
    unit: Literal["characters", "words"] = "characters"
    """Unit of the length."""

    @field_validator("limit")
    @classmethod
    def _one_aim(cls, limit: int | None, others: ValidationInfo) -> int | None:
        if limit is not None and others.data.get("target") is not None:
            raise ValueError("length takes target or limit, not both; remove one")
        return limit

    @field_validator("tolerance")
    @classmethod
    def _of_a_target(cls, tolerance: int, others: ValidationInfo) -> int:
        if tolerance and "target" in others.data and others.data["target"] is None:
            raise ValueError("is that of a target, and there is none; remove it, or give a target")
        return tolerance

    def __call__(self, sample: RewardInput) -> Score:
        count = len(sample.response) if self.unit == "characters" else len(sample.response.split())
        if self.target is not None:
            off = max(0, abs(count - self.target) - self.tolerance)
        elif self.limit is not None:
            off = max(0, count - self.limit)
        else:
            return Score(min(1.0, count / self.width), None, {self.unit: float(count)})
        return Score(max(0.0, 1 - off / self.width), off == 0, {self.unit: float(count)})

    def no_response(self) -> str:
        return "nothing"
