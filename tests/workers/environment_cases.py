"""Environments of the tests, loaded by the workers."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from roll_lite.environments.base import Message, Step, Task
from roll_lite.environments.episode import Policy


class HigherLower:
    """Guess `answer`."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    def reset(self, task: Task) -> None:
        self.number = int(task.answer)

    def step(self, message: Message) -> Any:
        guess = int(message["content"])
        if guess == self.number:
            return Step(reward=1.0 + self.bonus, done=True, correct=True)
        return "higher" if guess < self.number else "lower"


async def troubled(task: Task, policy: Policy) -> float:
    """Do what the row says, and succeed otherwise."""
    await policy.respond("Go.")
    match task.columns.get("trouble"):
        case "raise":
            raise OSError("no service")
        case "die":
            os._exit(1)
        case "block":
            time.sleep(600)  # noqa: ASYNC251 - what is tested
        case "hang":
            await asyncio.sleep(600)
        case "slow":
            await asyncio.sleep(1)
    return 1.0


class NeverCloses(HigherLower):
    """Hang in a step, and again after its time limit."""

    def step(self, message: Message) -> Any:
        time.sleep(600)

    def close(self) -> None:
        time.sleep(600)


class NoStep:
    def reset(self, task: Task) -> None: ...


def not_async(task: Task, policy: Policy) -> None: ...


async def second_chance(task: Task, policy: Policy) -> bool:
    """Ask again if the first answer is wrong: a whole run with the tiny model."""
    message = await policy.respond(task.messages)
    if message["content"] == task.answer:
        return True
    message = await policy.respond(task.messages)
    return message["content"] == task.answer
