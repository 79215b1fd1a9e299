from __future__ import annotations

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed, RewardType


class EnvironmentReward(RewardType):
    """Score of the episode: the environment's rewards (`environment.rewards`: their sum, or the last one). The default in domains with an
    environment that gives rewards.

    ```yaml
    reward: {name: environment}
    ```
    """

    within_a_run = True

    def __call__(self, sample: RewardInput) -> Score:
        if sample.episode is None:
            raise RewardFailed("reward environment: the sample has no episode")
        return Score(sample.episode.score, sample.episode.correct)
