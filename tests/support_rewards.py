"""Rewards outside of a scorer."""

from __future__ import annotations

import asyncio

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed, RewardFunction
from roll_lite.rewards.terms import Reward


def score_of(reward: Reward | RewardFunction, item: RewardInput) -> Score:
    """Score a sample with every function of the reward; RewardFailed if one fails."""
    if isinstance(reward, RewardFunction):
        scoring = reward.score(item)
        return asyncio.run(scoring) if reward.is_async else reward.run(scoring)
    results: list[Score | RewardFailed] = []
    for function in reward.functions:
        try:
            results.append(score_of(function, item))
        except RewardFailed as failure:
            results.append(failure)
            break
    return reward.combined(results)
