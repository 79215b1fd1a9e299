from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import textarena

from roll_lite.config.schema.environments import TextArenaEnvironmentConfig
from roll_lite.environments.adapters.gym import numbers_of
from roll_lite.environments.base import Message, Step, Task, opening, seed_of
from roll_lite.environments.episode import Calls, EpisodeFunction, play_class
from roll_lite.rewards.answer_extraction import without_thinking


def play_textarena(settings: TextArenaEnvironmentConfig, path: str, calls: Calls) -> EpisodeFunction:
    """Build the episode function. ValueError if the game does not exist or cannot be played alone."""
    arguments = settings.args
    try:
        game = textarena.make(settings.id, **arguments)
        game.reset(num_players=1)
    except Exception as error:  # games raise anything, also AssertionError for a wrong number of players
        raise ValueError(f"{path}.id: {settings.id!r}: it cannot begin with one player: {type(error).__name__}: {error}") from error
    return play_class(partial(TextArenaEpisode, game), {}, calls)


class TextArenaEpisode:
    """Episode of a game. TextArena draws from Python's global random generator, so each call swaps in the episode's random state. Methods
    are async to run in the event loop's thread, never two at once."""

    def __init__(self, game: Any) -> None:
        self._template = game
        self._random: Any = None

    async def reset(self, task: Task) -> list[Message]:
        self._game = copy.deepcopy(self._template)
        seed = seed_of(task)
        self._random = random.Random(seed).getstate()
        self._with_own_random(self._game.reset, num_players=1, seed=seed)
        return opening(task, self._news())

    async def step(self, message: Message) -> Step:
        done, _ = self._with_own_random(self._game.step, without_thinking(message["content"]).strip())
        if not done:
            return Step(self._news())
        rewards, info = self._game.close()
        return Step((), float(rewards[0]), True, metrics=numbers_of(info[0]))

    def _news(self) -> str:
        """Text that the game has added since the last response, from the game's state: wrappers would repeat the whole conversation."""
        said = self._game.state.get_current_player_observation()
        return "\n".join(text for _, text, kind in said if kind is not textarena.ObservationType.PLAYER_ACTION).strip()

    def _with_own_random(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        others = random.getstate()
        random.setstate(self._random)
        try:
            return call(*args, **kwargs)
        finally:
            self._random = random.getstate()
            random.setstate(others)
