"""Reward `length`: a term for how long the response is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.data.samples import RewardInput, Score

Unit = Literal["characters", "words"]
Count = Annotated[int, Field(ge=0)]


def length(
    sample: RewardInput,
    *,
    target: Count | None = None,
    limit: Count | None = None,
    tolerance: Count = 0,
    width: Annotated[int, Field(ge=1)] = 100,
    unit: Unit = "characters",
) -> Score:
    """1 where the length is right, falling in a straight line to 0 where it is off by `width` or more.

    target: right is what is at most `tolerance` away from it. limit: right is what is no longer than this. Without either, the value is
    the share of `width` that the response fills, at most 1: longer is more. A reward function sees no tokens: length counts characters
    or words (by white space).
    """
    check_length(target, limit)
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    count = len(sample.response) if unit == "characters" else len(sample.response.split())
    if target is not None:
        off = max(0, abs(count - target) - tolerance)
    elif limit is not None:
        off = max(0, count - limit)
    else:
        return Score(min(1.0, count / width), None, {unit: float(count)})
    return Score(max(0.0, 1 - off / width), off == 0, {unit: float(count)})


def check_length(target: int | None = None, limit: int | None = None, **_: Any) -> None:
    """ValueError where the arguments contradict each other."""
    if target is not None and limit is not None:
        raise ValueError("limit: length takes target or limit, not both")
