from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import gymnasium

from roll_lite.config.schema.environments import GymEnvironmentConfig
from roll_lite.config.user_function import load_function
from roll_lite.environments.base import Message, Step, Task, opening, seed_of
from roll_lite.environments.episode import Calls, EpisodeFunction, play_class
from roll_lite.rewards.answer_extraction import without_thinking


def play_gym(settings: GymEnvironmentConfig, path: str, calls: Calls) -> EpisodeFunction:
    """Build the episode function; ValueError if the environment cannot be made or its actions cannot be read from text."""
    if settings.function is not None:
        make = partial(load_function(settings.function, f"{path}.function", or_class=True), **settings.args)
        place = f"{path}.function: {settings.function!r}"
    else:
        make = partial(gymnasium.make, settings.id, **settings.args)
        place = f"{path}.id: {settings.id!r}"
    try:
        environment = make()
        environment.close()
    except Exception as error:  # a user's environment may raise anything
        raise ValueError(f"{place}: it cannot be made: {type(error).__name__}: {error}") from error
    space = getattr(environment, "action_space", None)
    if settings.action is not None:
        read = load_function(settings.action, f"{path}.action")
    elif isinstance(space, gymnasium.spaces.Discrete):
        read = partial(_number, int(space.start), int(space.start + space.n - 1))
    elif space is None or isinstance(space, gymnasium.spaces.Text):
        read = str
    else:
        raise ValueError(f"{place} takes actions of {space}; name a function `text -> action` in {path}.action")
    return play_class(partial(GymEpisode, make, read, settings.columns), {}, calls)


class GymEpisode:
    def __init__(self, make: Callable[[], Any], read: Callable[[str], Any], columns: Sequence[str]) -> None:
        self._environment = make()
        self._read = read
        self._columns = columns

    def reset(self, task: Task) -> list[Message]:
        options = {name: task.columns[name] for name in self._columns}
        observation, _ = self._environment.reset(seed=seed_of(task), options=options or None)
        return opening(task, self._shown(observation))

    def step(self, message: Message) -> Step:
        try:
            action = self._read(without_thinking(message["content"]).strip())
        except ValueError as error:
            return Step(str(error), metrics={"invalid_actions": 1})
        observation, reward, terminated, truncated, info = self._environment.step(action)
        if not (terminated or truncated):
            return Step(self._shown(observation), float(reward))
        solved = info.get("is_success")
        return Step((), float(reward), True, None if solved is None else bool(solved), numbers_of(info))

    def _shown(self, observation: Any) -> str:
        return str(self._environment.render() if getattr(self._environment, "render_mode", None) == "ansi" else observation)

    def close(self) -> None:
        self._environment.close()


def _number(least: int, most: int, text: str) -> int:
    found = re.findall(r"-?\d+", text)
    if not found or not least <= int(found[-1]) <= most:
        raise ValueError(f"Answer with a whole number from {least} to {most}.")
    return int(found[-1])


def numbers_of(info: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in info.items() if isinstance(value, Real) and math.isfinite(value)}
