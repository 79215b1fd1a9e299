from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from roll_lite.config.schema.environments import OpenEnvEnvironmentConfig
from roll_lite.config.user_function import load_function
from roll_lite.environments.adapters.gym import numbers_of
from roll_lite.environments.base import Message, Step, Task, opening, seed_of
from roll_lite.environments.episode import Calls, EpisodeFunction, play_class
from roll_lite.rewards.answer_extraction import without_thinking


def play_openenv(settings: OpenEnvEnvironmentConfig, path: str, calls: Calls, gives_reward: bool) -> EpisodeFunction:
    """Build the episode function; ValueError if a function in the settings cannot be loaded. `gives_reward`: the server's
    rewards are the score, so the last one must not be missing."""
    action, shown = settings.action, settings.observation
    write: Callable[[str], Any] = lambda text: {action: text}  # noqa: E731
    show: Callable[[Any], str] = partial(_field, shown)
    if "." in action:
        write = load_function(action, f"{path}.action")
    if shown is not None and "." in shown:
        show = load_function(shown, f"{path}.observation")
    return play_class(partial(OpenEnvEpisode, settings, write, show, gives_reward), {}, calls)


class OpenEnvEpisode:
    def __init__(
        self, settings: OpenEnvEnvironmentConfig, write: Callable[[str], Any], show: Callable[[Any], str], gives_reward: bool
    ) -> None:
        # turn_timeout_s ends a turn before the client's own limit can.
        self._client = GenericEnvClient(settings.url, message_timeout_s=2 * settings.turn_timeout_s, mode="simulation")
        self._columns = settings.columns
        self._write = write
        self._show = show
        self._gives_reward = gives_reward

    async def reset(self, task: Task) -> list[Message]:
        result = await self._client.reset(seed=seed_of(task), **{name: task.columns[name] for name in self._columns})
        return opening(task, self._show(result.observation))

    async def step(self, message: Message) -> Step:
        try:
            action = self._write(without_thinking(message["content"]).strip())
        except ValueError as error:
            return Step(str(error), metrics={"invalid_actions": 1})
        try:
            result = await self._client.step(action)
        except RuntimeError as error:  # the server does not say what it refused
            raise RuntimeError(f"{error}; the action (environment.action) was {action!r:.200}") from error
        if result.done and result.reward is None and self._gives_reward:
            raise RuntimeError("the server ended the episode without a reward; to score responses, name a `reward` in the domain")
        reward = float(result.reward or 0.0)
        if not result.done:
            return Step(self._show(result.observation), reward)
        return Step((), reward, True, metrics=numbers_of(result.metadata or {}))

    async def close(self) -> None:
        await self._client.close()


def _field(name: str | None, observation: Any) -> str:
    if name is None:
        return json.dumps(observation, ensure_ascii=False)
    if name not in observation:
        raise ValueError(f"an observation has no field {name!r} (environment.observation); it has {', '.join(observation)}")
    return str(observation[name])
