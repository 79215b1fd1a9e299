"""Environments as users of other projects write them."""

from __future__ import annotations

from typing import Any

import gymnasium
from openenv.core.env_server import Action, Environment, Observation, State


class Countdown(gymnasium.Env[str, str]):
    """Gymnasium: say the numbers downwards, from the option `start`."""

    observation_space = gymnasium.spaces.Text(100)
    action_space: Any = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = (options or {})["start"]
        return f"Count down from {self.left}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_right = action == str(self.left)
        self.left -= 1
        over = not is_right or self.left == 0
        return "Go on.", 0.25, over, False, {"is_success": is_right, "left": self.left, "note": "text"}


class Pairs(Countdown):
    action_space = gymnasium.spaces.MultiDiscrete([2, 2])


def last_word(text: str) -> str:
    if not text:
        raise ValueError("Say something.")
    return text.split()[-1]


class Say(Action):
    text: str


class Heard(Observation):
    heard: str
    said: int = 0


class Repeat(Environment[Say, Heard, State]):
    """OpenEnv: repeats what it hears, and ends after `bye`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.said = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, word: str = "", **_: Any) -> Heard:
        return Heard(heard=f"seed {seed}, word {word}")

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        if action.text == "crash":
            raise RuntimeError("the server's environment failed")
        self.said += 1
        return Heard(heard=action.text, said=self.said, reward=0.5, done=action.text == "bye", metadata={"said": self.said})

    @property
    def state(self) -> State:
        return State(step_count=self.said)


def shout(observation: dict[str, Any]) -> str:
    return str(observation["heard"]).upper()


def say(text: str) -> dict[str, Any]:
    return {"text": last_word(text)}
