from __future__ import annotations

from functools import partial
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from roll_lite.config.schema.environments import ReasoningGymEnvironmentConfig
from roll_lite.environments.base import Message, Step, Task, opening, seed_of
from roll_lite.environments.episode import Calls, EpisodeFunction, play_class
from roll_lite.rewards.answer_extraction import without_thinking


def play_reasoning_gym(settings: ReasoningGymEnvironmentConfig, path: str, calls: Calls) -> EpisodeFunction:
    """Build the episode function; ValueError if the dataset does not exist or refuses its settings."""
    make = partial(reasoning_gym.create_dataset, settings.dataset, size=1, **settings.args)
    try:
        make(seed=0)
    except Exception as error:  # datasets check their settings with assertions
        raise ValueError(f"{path}.dataset: {settings.dataset!r}: it cannot be made: {type(error).__name__}: {error}") from error
    return play_class(partial(ReasoningGymEpisode, make), {}, calls)


class ReasoningGymEpisode:
    def __init__(self, make: Any) -> None:
        self._make = make

    def reset(self, task: Task) -> list[Message]:
        self._dataset = self._make(seed=seed_of(task))
        self._entry = self._dataset[0]
        return opening(task, self._entry["question"])

    def step(self, message: Message) -> Step:
        answer = extract_answer(without_thinking(message["content"]))
        return Step((), float(self._dataset.score_answer(answer, self._entry)), True)
