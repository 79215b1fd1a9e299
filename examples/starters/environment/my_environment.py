"""The environment of the domain `guess`."""

from __future__ import annotations

from roll_lite.environments.base import Message, Step, Task


class Guess:
    """Game: guess a number from the replies "higher" and "lower". The fewer guesses, the higher the reward."""

    def reset(self, task: Task) -> None:
        self.number, self.guesses = int(task.answer), 0

    def step(self, message: Message) -> Step:
        self.guesses += 1
        text = message["content"].strip()
        if not text.isdecimal() or len(text) > 9:
            return Step("A number, please.")
        if int(text) == self.number:
            return Step(reward=1.0 - 0.08 * (self.guesses - 1), done=True, correct=True)
        return Step("higher" if int(text) < self.number else "lower")
